"""What a recipe prunes, after all checks that come before the first computation."""

from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.pruning import Pruning
from hies_export.pipeline.recipe import PruningRecipe


def load_pruning(recipe: PruningRecipe) -> Pruning:
    """Return the pruning of a recipe, without its delivery."""
    return load_recipe(recipe)[0]
