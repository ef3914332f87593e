"""Show what a run did: one `Report`, written as report.json, and everything readable that is rendered from it.

A `Report` (or the `Bench` of a comparison) goes in; text, pages and figures come out. In the order of reading:

- `report.py`: the typed parts of report.json, written and read; `provenance.py`: what a run was asked for, and which
  dense model it read.
- `words.py`: every sentence; `tables.py`: the tables and maps of all renderings, and the report on a terminal.
- `html.py`: report.html and report.md; `card.py`: the card of a checkpoint; `templates/`: what they fill.
- `comparison.py`: the same for the times of two models.
- `figures.py`: all pictures of a run, for the page and as files; `frontier.py`: that of agreement against time;
  `drawing.py`: their style.
"""
