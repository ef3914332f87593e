"""Show what a run did: one `Report`, written as report.json, and everything readable that is rendered from it.

The input is a `Report` (or the `Bench` of a comparison); the output is text, pages and figures. In the order of
reading:

- `report.py`, `details.py`: the typed parts of report.json, written and read; `schemas.py`: the files beside it;
  `provenance.py`: what a run was asked for, and digests of what it read.
- `lead.py`: the first sentence of all renderings; `outcomes.py`: a budget in words; `text.py`, `rows.py`: the other
  sentences, and the tables.
- `maps.py`: which heads, and how many neurons, every layer keeps.
- `console.py`, `html.py`, `card.py`: one rendering each; `bench.py`: the same for a comparison.
- `jinja.py`, `templates/`: the pages as templates, and the escaping of names in them; report.md is only a template.
- `drawing.py`: where cells, bars and dots of the figures go; `figures.py`: the figures as files.

A further kind of unit gets a map in every rendering through `maps.unit_maps`.
"""
