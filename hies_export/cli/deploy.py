"""Find the fastest form of a model on this machine that keeps a share of its answers."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

from ..errors import quoted
from .arguments import Options, a_number, add_request, read_recipe
from .run import run_and_print


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
    """Return the minutes of a time such as 90s, 30m or 2h, by default in minutes, as a `type` of argparse."""
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
    return run_and_print(recipe, options)
