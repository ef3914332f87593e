"""The options of a run. Every stage may import them, because they import no stage.

`pipeline/recipe.py` makes a whole recipe of them, and checks the names of tasks, criteria, metrics and runtimes.
"""
