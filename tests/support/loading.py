"""What a recipe prunes, after all checks that come before the first computation."""

from pathlib import Path
from typing import Any

from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.pruning import Pruning
from hies_export.pipeline.recipe import PruningRecipe


def load_pruning(recipe: PruningRecipe) -> Pruning:
    """Return the pruning of a recipe, without its delivery."""
    return load_recipe(recipe)[0]


def recipe_of(folder: Path, **fields: Any) -> PruningRecipe:
    """Return the recipe in a folder with some fields changed: `prune__alpha` is `prune.alpha`."""
    return PruningRecipe.from_yaml(folder / "recipe.yaml", {k.replace("__", "."): v for k, v in fields.items()})
