"""Options that several commands share, and the recipe they describe."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RecipeError

if TYPE_CHECKING:
    from ..recipe import PruningRecipe


def add_recipe(parser: ArgumentParser) -> None:
    """Add RECIPE and the options that change it."""
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, YAML")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="override a field of the recipe, e.g. prune.budget.heads=0.5; may be repeated",
    )
    add_output(parser, help="folder to write (default: the recipe's)")


def add_output(parser: ArgumentParser, *flags: str, help: str = "folder to write", **settings: Any) -> None:
    """Add the output folder and `--overwrite`.

    Args:
        parser: Of a command.
        flags: How the folder is given; `-o` and `--output` by default.
        help: What the folder is.
        settings: Passed on to `add_argument`, e.g. `required` or `default`.
    """
    parser.add_argument(*(flags or ("-o", "--output")), metavar="DIR", type=Path, help=help, **settings)
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder, if hies-export wrote it")


def add_json(parser: ArgumentParser) -> None:
    """Add `--json`, for a command whose `run` returns a result."""
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON, last on stdout")


def read_recipe(options: Namespace) -> PruningRecipe:
    """Return the recipe that `add_recipe`'s options name, with `--set` and `--output` applied.

    Raises:
        RecipeError: A `--set` has no value, or the recipe is impossible.
    """
    import yaml

    from ..recipe import PruningRecipe

    overrides = {}
    for text in options.overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise RecipeError([f"--set takes KEY=VALUE, got {text!r}"])
        overrides[key] = yaml.safe_load(value)
    if options.output is not None:
        overrides["output"] = options.output
    return PruningRecipe.from_yaml(options.recipe, overrides)


def refuse_output(options: Namespace, recipe: PruningRecipe, **inputs: Path) -> None:
    """Refuse an output folder of a recipe that exists, or whose replacement would delete what is read.

    Args:
        options: Those of `add_recipe`.
        recipe: From `read_recipe`.
        inputs: What the command reads besides, by name.

    Raises:
        OutputExistsError: See `refuse_existing`.
    """
    from ..checkpoint.folders import refuse_existing

    read = {"recipe": options.recipe, **recipe.inputs, **inputs}
    refuse_existing(recipe.output, overwrite=options.overwrite, inputs=read)
