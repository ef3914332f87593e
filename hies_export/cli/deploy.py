"""Find the fastest form of a model on this machine that keeps a share of its answers."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from .arguments import Options, a_number, add_request, read_recipe
from .run import run_and_print


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe, or the model and its data, the share of answers to keep, and the runtimes to choose from."""
    add = parser.add_argument
    add_request(parser)
    share = "share of the dense model's predictions on held-out rows that must stay (default: deploy.keep, or 0.99)"
    add("--keep", metavar="SHARE", type=a_number(float, 0, 1), help=share)
    choice = "runtime to choose from (default: the recipe's, or all that are installed); may be repeated"
    add("--runtime", metavar="RUNTIME", dest="runtimes", action="append", help=choice)


def run(options: Options) -> dict[str, Any]:
    """Find the fastest form, print the report and which file to deploy, and return the report's summary."""
    recipe = read_recipe(options, deploys=True)
    return run_and_print(recipe.to_deploy(keep=options.keep, runtimes=options.runtimes), options)
