"""Find the fastest form of a model on this machine that keeps a share of its answers."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import quoted
from .arguments import Options, a_number, add_request, read_recipe, refuse_output

if TYPE_CHECKING:
    from ..pipeline.recipe import PruningRecipe
    from ..report.report import Report


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe, or the model and its data, the promise, and the limits of runtimes and time."""
    add = parser.add_argument
    add_request(parser)
    share = "share of the dense model's predictions on held-out rows that must stay (default: deploy.keep, or 0.99)"
    add("--keep", metavar="SHARE", type=a_number(float, 0, 1), help=share)
    choice = "runtime to choose from (default: the recipe's, or all that are installed); may be repeated"
    add("--runtime", metavar="RUNTIME", dest="runtimes", action="append", help=choice)
    limit = "answer within this time, such as 30m or 2h; the search ends early enough to write what it found"
    add("--within", metavar="TIME", type=minutes, help=limit)


def minutes(text: str) -> float:
    """Read a time such as 90s, 30m or 2h in minutes; a number without a unit is minutes."""
    per_unit = {"s": 1 / 60, "m": 1.0, "h": 60.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in per_unit else (text, "m")
    try:
        return a_number(float, 0)(number) * per_unit[unit]
    except ArgumentTypeError:
        raise ArgumentTypeError(f"must be a time such as 90s, 30m or 2h, got {quoted(text)}") from None


def run(options: Options) -> dict[str, Any]:
    """Search, print the report, say which file to deploy, and return the report's summary."""
    recipe = read_recipe(options, deploys=True)
    recipe = recipe.to_deploy(keep=options.keep, runtimes=options.runtimes, minutes=options.within)
    refuse_output(options, recipe)
    from ..pipeline.run import run as run_recipe  # after the refusals, because it takes seconds
    from ..report.tables import print_report

    report = run_recipe(recipe, overwrite=options.overwrite, command=options.command_line, progress=options.progress)
    print_report(report, options.console)
    print_answer(report, recipe, options)
    return report.summary()


def print_answer(report: Report, recipe: PruningRecipe, options: Options) -> None:
    """Print which file to deploy, and what else was written."""
    found = report.details.deployment
    if found is not None and found.file is not None:
        options.console.print(f"\ndeploy {Path(recipe.output) / found.file}")
    served = ", served/ (for sentence-transformers)" if (Path(recipe.output) / "served").is_dir() else ""
    options.console.print(
        f"written to {recipe.output}: slim/ (checkpoint), its exports{served}, report.html, report.md, report.json"
    )
