"""Score heads, and neurons if the recipe prunes them, and write scores.json and plan.json."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from .. import processes
from ..progress import Progress
from .arguments import add_recipe, read_recipe, refuse_output


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe."""
    add_recipe(parser)


def run(options: Namespace, console: Console, progress: Progress) -> None:
    """Score, select, and write scores.json and plan.json."""
    from ..pipeline.choose import choose
    from ..pipeline.resolve import resolve
    from ..pipeline.run import output_folder
    from .terminal import plan_text, print_plan

    recipe = read_recipe(options)
    refuse_output(options, recipe)
    with output_folder(recipe, overwrite=options.overwrite) as folder:
        progress.stage("load the model and the data")
        resolved = resolve(recipe)
        choice = choose(resolved.prepared, resolved.options, progress=progress)
        if processes.rank() == 0:
            choice.write(folder)
    print_plan(choice.plan, console)
    console.print(f"\n{plan_text(choice.plan)} by this plan; written to {recipe.output}: scores.json, plan.json")
