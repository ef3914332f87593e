"""Prune a model in memory, or run a recipe from start to end.

The input is a model with batches, or a recipe; the output is a `PruneResult`, or the folder of a run and its `Report`.
A recipe is resolved once; the stages see what is loaded, and their own sections of it.

In the order of reading:

- `prune.py`: `prune`, which chooses, cuts, compensates and judges.
- `run.py`: `run`, which loads, prunes, saves, exports, measures and reports; `deploy`, a run whose cut is searched for.
- `recipe.py`: the whole recipe, read from YAML or keywords; `propose.py`: a recipe for a model and a data set alone.
- `resolve.py`: a recipe with its loaded model and rows; `draw.py`: which rows are for what.
- `prepare.py`: find the units that a model can lose, and check the request; `accept.py`: check the model on its rows.
- `choose.py`: calibrate, score (`candidates.py`) and select within the budget (`targets.py`), which gives the plan.
- `search.py`: judge pruned models, and find the largest cut that keeps a promise.
- `cut.py`: cut by a plan or a choice, compensate, check and save.
- `fastest.py`: find the fastest form that keeps a promise.
- `reporting.py`: the results of all stages, as a `Report` and its files.
- `push.py`: publish what a run wrote on the Hub.
- `bench.py`: `hies-export bench`, which times any two folders.
"""
