"""The options of a run. Every stage may import them, because they import no stage.

- `sections.py`: the sections of a recipe, which are the options of the stages as well.
- `budget.py`: how much a model may lose, and whether a model keeps to it;
- `gone.py`: what went, and what to use in its place.

`pipeline/recipe.py` makes a whole recipe of them, and checks the names of tasks, criteria, metrics and runtimes.
"""
