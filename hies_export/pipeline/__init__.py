"""Run a recipe from start to end: load, score, select, cut, save, export, measure, report.

In goes a `PruningRecipe`; out comes the folder of a run (scores.json, plan.json, slim/, onnx/ or gguf/, report.*) and
its `Report`. Only these files read the recipe; the functions that they call take plain arguments.

In the order of reading:

- `run.py`: `run`, all stages in order.
- `prepare.py`: load model and data, and check the request; `load.py`: load the model itself.
- `choose.py`: calibrate, score and select, which gives the plan.
- `search.py`: find alpha or the largest allowed cut on held-out rows; `quality.py`: evaluate pruned models.
- `budgets.py`: the budget in the report: what was asked for, predicted and measured.
- `prune.py`: cut by a plan, compensate, save and check; `refitting.py`: how to compensate.
- `measure.py`: export the dense model too, and count and time both.
- `reporting.py`: what all of them found, as a `Report` and its files.
- `bench.py`: `hies-export bench`, which times any two folders.
- `quickstart.py`: train the small model of `hies-export quickstart`.
"""
