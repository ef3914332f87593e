"""Compare many ways to prune one model.

The input is a recipe and a `SweepGrid` of criteria, alphas, kinds of modules, budgets, seeds, calibration sizes and
compensations. The output is a folder with one row of quality and stability per combination, as JSON, CSV, tables and
one page, with measured time if wanted. No checkpoint is written.

In the order of reading:

- `grid.py`: `SweepGrid`, and its combinations, the cells.
- `sweep.py`: `sweep`, which has every cell evaluated and writes the results.
- `cells.py`: `evaluate_cell`, on the stages of a run; `Shared` is what the cells share.
- `journal.py`: the finished cells on disk, so that an interrupted sweep can continue.
- `stopwatch.py`: times the slim models.
- `results.py`: writes the rows as JSON, CSV and Markdown.
- `charts.py`, `templates/`: the curves; `page.py`: sweep.html.
"""
