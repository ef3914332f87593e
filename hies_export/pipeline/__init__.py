"""Prune a model in memory, or run a recipe from start to end.

The input is a model with batches, or a recipe; the output is a `PruneResult`, or the folder of a run and its `Report`.
Both become a `Pruning`, which every stage takes with what the stage before it returned. How the slim model is exported,
timed, saved and reported is a `Delivery`, of which choosing and cutting know nothing.

In the order of reading:

- `options.py`: how to prune; `pruning.py`: `Pruning`, and what is checked before the work starts; `accept.py` checks
  the model on its rows.
- `stages.py`: `calibrate`, `score`, `select`, `cut`, `compare`, and the values between them.
- `choose.py`: what stays within the budget; `search.py`: the largest cut that keeps a promise; `trials.py`: alphas
  and criteria, by held-out rows.
- `prune.py`: `prune`, these stages in memory, with the `Pruning` that `in_memory.py` makes.
- `delivery.py`: `Delivery`, and `save`; `load_recipe.py`: the pruning and the delivery of a recipe.
- `run.py`: `run`, these stages with a folder; `deploy`, a run whose cut is searched for in all forms (`fastest.py`).
- `journal.py`: what a run ranked and refitted so far, kept on the disk until it ends, so that a killed one goes on.
- `price.py`: how many minutes and how much memory a run takes, said while it runs.
- `measure.py`: both models exported, judged and timed; `reporting.py`: everything as a `Report` and its files.
- `recipe.py`: the whole recipe, read from YAML or keywords; `propose.py`: a recipe for a model and a data set alone.
- `draw.py`: which rows are for what, and how many a promise needs.
- `push.py`: publish what a run wrote on the Hub. `bench.py`: `hies-export bench`, which times any two folders.
"""
