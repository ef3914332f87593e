"""Score heads, and neurons if the recipe prunes them, and write scores.json and plan.json."""

from __future__ import annotations

from argparse import ArgumentParser

from .. import processes
from .arguments import Options, add_budget, add_request, read_recipe, refuse_output


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe, or the model and its data, and how much is removed."""
    add_request(parser)
    add_budget(parser)


def run(options: Options) -> None:
    """Score, select, and write scores.json and plan.json."""
    from ..pipeline.choose import choose
    from ..pipeline.load_job import load_job
    from ..pipeline.run import output_folder
    from ..pipeline.stages import calibrate
    from .terminal import plan_text, print_plan

    recipe = read_recipe(options)
    refuse_output(options, recipe)
    with output_folder(recipe.output, overwrite=options.overwrite) as folder:
        job = load_job(recipe, progress=options.progress)
        choice = choose(job, calibrate(job))
        if processes.is_first():
            (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
            choice.write(folder)
    print_plan(choice.plan, options.console)
    options.console.print(
        f"\n{plan_text(choice.plan)} by this plan; written to {recipe.output}: scores.json, plan.json"
    )
