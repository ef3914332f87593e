"""Options that several commands share, and the recipe they describe."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..checkpoint.folders import Contents, contents, refuse_existing, refuse_other
from ..errors import PlanError, RecipeError, RequestError, quoted
from ..progress import Progress

if TYPE_CHECKING:
    from ..pipeline.recipe import PruningRecipe


class Options(Namespace):
    """The parsed options of a command, and where it shows results and progress."""

    console: Console
    progress: Progress


def a_number(kind: type[int] | type[float], least: int, most: int = 2**31 - 1) -> Callable[[str], int | float]:
    """Return a `type` of argparse that reads a whole number (int) or any (float) between two, both included."""

    def read(text: str) -> int | float:
        with suppress(ValueError):
            number = kind(text)
            if least <= number <= most:
                return number
        expected = "a whole number" if kind is int else "a number"
        raise ArgumentTypeError(f"must be {expected} from {least} to {most}, got {quoted(text)}")

    return read


# Budgets with an option of their own.
BUDGETS = {
    "flops": "share of the dense model's FLOPs that may be left: heads and neurons go",
    "keep": "share of the dense model's predictions that must stay: heads and neurons go",
    "heads": "share of the heads to remove, by HIES",
}
# Settings of an option that may be repeated.
REPEATED: dict[str, Any] = {"action": "append", "default": []}


def add_recipe(parser: ArgumentParser, metavar: str, help: str) -> None:
    """Add a recipe, and the options that change it."""
    parser.add_argument("recipe", metavar=metavar, type=Path, help=help)
    _add_changes(parser)


def add_request(parser: ArgumentParser) -> None:
    """Add RECIPE or MODEL, the data that a MODEL reads, and the options that change a recipe."""
    given = "a recipe, YAML, or with --data a checkpoint folder or Hub id"
    parser.add_argument("recipe", metavar="RECIPE|MODEL", help=given)
    add_data(parser, "rows for MODEL: SPLIT=FILE, repeated for each split, or the name of a Hub data set")
    _add_changes(parser)


def add_budgeted(parser: ArgumentParser) -> None:
    """Add the options of `add_request`, and of how much is removed, short for `--set prune.budget.KEY=SHARE`."""
    add_request(parser)
    group = parser.add_mutually_exclusive_group()
    for key, text in BUDGETS.items():
        group.add_argument(f"--{key}", dest=f"budget_{key}", metavar="SHARE", type=a_number(float, 0, 1), help=text)


def _add_changes(parser: ArgumentParser) -> None:
    """Add the options that change a recipe."""
    change = "override a field of the recipe, e.g. prune.budget.heads=0.5; may be repeated"
    parser.add_argument("--set", metavar="KEY=VALUE", dest="overrides", help=change, **REPEATED)
    add_output(parser, help="folder to write (default: the recipe's)")


def add_model(parser: ArgumentParser) -> None:
    """Add MODEL."""
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, run or Hub id")


def add_output(parser: ArgumentParser, *, help: str = "folder to write", **settings: Any) -> None:
    """Add the output folder, `--output`, and `--overwrite`."""
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help=help, **settings)
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder, if hies-export wrote it")


def add_data(parser: ArgumentParser, help: str) -> None:
    """Add the data that a command reads, and its columns of texts."""
    columns = "column of texts, if there is a choice; may be repeated for pairs"
    parser.add_argument("--data", metavar="[SPLIT=]DATA", help=help, **REPEATED)
    parser.add_argument("--text", metavar="COLUMN", help=columns, **REPEATED)


def read_data(data: Sequence[str]) -> dict[str, Any]:
    """Return what `--data` names, as keywords of `propose_recipe`: `name` (a Hub data set), or `files` by split."""
    given = ", ".join(data)
    names = [text for text in data if "=" not in text]
    if local := [name for name in names if Path(name).expanduser().exists()]:
        raise RequestError(
            f"--data must name the split of a file or an image folder, got {local[0]}; give --data train={local[0]}"
        )
    if names and len(data) > 1:
        raise RequestError(f"--data takes one Hub data set, or SPLIT=FILE once or more, got {given}; name the splits")
    if names:
        return {"name": names[0]}
    files = {split: file for split, _, file in (text.partition("=") for text in data)}
    if len(files) < len(data) or not all(files) or not all(files.values()):
        raise RequestError(f"--data takes SPLIT=FILE, each split once, got {given}; name one file for each split")
    return {"files": {split: Path(file) for split, file in files.items()}}


def read_recipe(options: Options, *, deploys: bool = False) -> PruningRecipe:
    """Return the recipe in a file, or print and return one that is proposed for a MODEL, with all options applied.

    With a file, options about data are refused. A command that `deploys` finds the budget, and refuses a given one.
    """
    from ..pipeline.recipe import PruningRecipe

    overrides = read_overrides(options.overrides)
    for key in BUDGETS:
        if (share := getattr(options, f"budget_{key}", None)) is not None:
            overrides["prune.budget"] = {key: share}
    if options.output is not None:
        overrides["output"] = options.output
    # What was given for prune.budget as a whole, or for fields such as prune.budget.flops.
    budget = {key: value for key, value in overrides.items() if f"{key}.".startswith("prune.budget.")}
    if deploys and budget:
        raise RequestError(
            f"deploy finds how much may go, got {next(iter(budget))}; give --keep SHARE, or use hies-export run"
        )
    if "data" in options and not options.recipe.endswith((".yaml", ".yml")) and not Path(options.recipe).is_file():
        return _propose(options, overrides, budget, deploys=deploys)
    if "data" in options and (options.data or options.text):
        raise RequestError(
            f"--data and --text are about a MODEL, and {options.recipe} is a recipe, which names its own data; leave "
            "them out, or change the recipe by --set data.KEY=VALUE"
        )
    return PruningRecipe.from_yaml(options.recipe, overrides)


def _propose(options: Options, overrides: dict[str, Any], budget: dict[str, Any], *, deploys: bool) -> PruningRecipe:
    """Print and return the recipe that is proposed for a MODEL, its data and a budget, with all `overrides` applied."""
    if not options.data:
        raise RequestError(
            f"a recipe must be a YAML file, and a model needs --data; got {options.recipe} alone; give --data "
            "train=FILE --data validation=FILE, or --data with the name of a Hub data set"
        )
    vocabulary = {key: value for key, value in overrides.items() if key.partition(".")[0] == "vocabulary"}
    if not deploys and not budget and not vocabulary:
        raise RequestError(
            "a model needs to know how much may go: give --flops 0.6, --keep 0.99 or --heads 0.3; hies-export deploy "
            "finds the fastest form that keeps 99 % of the answers"
        )
    source = read_data(options.data)
    from ..pipeline.propose import propose_recipe  # after the refusals, because it takes seconds
    from ..pipeline.recipe import overridden
    from ..tasks import COLUMNS

    columns = {name: overrides[f"data.{name}"] for name in COLUMNS if f"data.{name}" in overrides}
    recipe = propose_recipe(
        options.recipe,
        **source,
        **{"text": options.text, **columns},
        budget=overridden({}, budget)["prune"]["budget"] if budget else None,
        sections={} if deploys else overridden({}, vocabulary),
        output=options.output or Path("runs") / options.command.__name__.rpartition(".")[2],  # such as runs/prune
    ).with_overrides({key: value for key, value in overrides.items() if key not in budget})
    options.console.print(recipe.to_yaml(), style="dim", soft_wrap=True)
    return recipe


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return dotted field -> value of `--set KEY=VALUE`, values read as YAML; a RecipeError refuses other texts."""
    from ..pipeline.recipe import parse_yaml

    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")) or not key.isprintable():
            raise RecipeError(f"--set takes KEY=VALUE, got {quoted(text)}")
        overrides[key] = parse_yaml(value, source=f"--set {key}")
    return overrides


def refuse_output(options: Options, recipe: PruningRecipe) -> None:
    """Refuse a recipe's output folder if it exists without --overwrite, or if replacing it would delete an input."""
    refuse_existing(recipe.output, overwrite=options.overwrite, inputs={"recipe": options.recipe, **recipe.inputs})


def checkpoint_in(path: str, *welcome: Contents, progress: Progress) -> str:
    """Return the checkpoint that a path stands for: itself, or `slim/` of a run.

    `welcome` are the contents that are accepted besides these; all else is refused.
    """
    slim = Path(path) / "slim"
    if contents(path) is not Contents.RUN:
        wanted = ", ".join(("a checkpoint", *(kind.value for kind in welcome)))
        refuse_other(path, *welcome, must=f"the model must be {wanted} or the folder of a run")
        return path
    if not (slim / "config.json").is_file():
        kind = Contents.RUN.value
        raise RequestError(f"a run must have slim/config.json, but {path} is {kind} without it; give another")
    progress.stage(f"{path} is {Contents.RUN.value}: using its slim/")
    return str(slim)


def plan_in(path: Path, *, progress: Progress) -> Path:
    """Return the plan file that a path stands for: the path itself, or the plan in a run or slim checkpoint."""
    for name in ("plan.json", "hies_plan.json"):
        if (path / name).is_file():
            progress.stage(f"{path} is {contents(path).value}: using its {name}")
            return path / name
    if not path.is_file():
        raise PlanError(f"a plan must be a plan.json or the folder of a run, but {path} is {contents(path).value}")
    return path


def refuse_other_than_run(path: Path, *, needs: str) -> None:
    """Raise a RequestError, which begins with `needs` and names a run nearby, if a path is not the folder of a run."""
    if (kind := contents(path)) is not Contents.RUN:
        nearby = next((folder for folder in (path.parent, path / "run") if contents(folder) is Contents.RUN), None)
        raise RequestError(f"{needs}, but {path} is {kind.value}" + (f"; give {nearby}" if nearby else ""))
