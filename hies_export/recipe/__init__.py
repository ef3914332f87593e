"""The recipe: everything a run is asked to do, checked before any work starts.

The input is the fields of a YAML file, or the same as keyword arguments. The output is a `PruningRecipe`, frozen and
consistent, or one `RecipeError` that names all problems at once. Nothing is loaded: `pipeline.resolve` finds out
whether model, data and recipe fit together.

- `sections.py`: the fields and their defaults, section by section.
- `recipe.py`: the whole, and what one section demands of another.
- `reading.py`: YAML files, overrides from the command line, and pydantic's errors in our words.
- `draws.py`: the rows that a recipe names, each use from separate rows.
- `promise.py`: which rows a promise is made on.
- `propose.py`: a recipe for a model and a data set alone.
"""

from .reading import sentences
from .recipe import FLOPS_TO_TRY, PruningRecipe
from .sections import (
    MOST,
    Allocation,
    BudgetSection,
    CalibrationSection,
    ComparisonSection,
    CompensationSection,
    DataSection,
    DeploySection,
    DropBudget,
    EvaluationSection,
    HeldOutSection,
    KeepBudget,
    MultipleOf,
    PruneSection,
    TimedSection,
)

__all__ = [
    "FLOPS_TO_TRY",
    "MOST",
    "Allocation",
    "BudgetSection",
    "CalibrationSection",
    "ComparisonSection",
    "CompensationSection",
    "DataSection",
    "DeploySection",
    "DropBudget",
    "EvaluationSection",
    "HeldOutSection",
    "KeepBudget",
    "MultipleOf",
    "PruneSection",
    "PruningRecipe",
    "TimedSection",
    "sentences",
]
