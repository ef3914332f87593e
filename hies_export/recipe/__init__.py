"""What may be asked of a run: values that every stage may know, because they know nothing themselves.

- `sections.py`: the sections of a recipe, which are the options of the stages as well.
- `budget.py`: how much a model may lose, and whether a model keeps to it.

`pipeline/recipe.py` puts them together, and knows what there is to name in them.
"""
