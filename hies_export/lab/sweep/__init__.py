"""Compare many ways to prune one model.

The input is a recipe and a `SweepGrid` of criteria, alphas, kinds of modules, budgets, seeds, calibration sizes and
compensations. The output is a folder with one row of quality and stability per combination, as JSON, CSV, tables and
figures, with measured time if wanted. No checkpoint is written.

In the order of reading:

- `grid.py`: `SweepGrid`, and its combinations, the cells.
- `sweep.py`: `sweep`, which has every cell evaluated and writes the results.
- `evaluating.py`: `Evaluator`, which evaluates a cell; `evaluate` does it in the worker of an executor.
- `executors.py`: connects to the executor that a command line names.
- `choosing.py`: `Chooser`, which scores and selects the units that a cell keeps.
- `stopwatch.py`: `Stopwatch`, which times the slim models.
- `shared.py`: the common parts of cells, computed once: the model, statistics, moments.
- `journal.py`: the finished cells on disk, so that an interrupted sweep can continue.
- `tables.py`: write the rows as JSON, CSV, Markdown and LaTeX.
- `charts.py`, `templates/`: the curves; `page.py`: sweep.html; `figures.py`: the figures as files.
"""
