"""Run a recipe: score, cut, save, evaluate, export and measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import Options, add_budgeted, read_recipe, refuse_output

if TYPE_CHECKING:
    from ..pipeline.recipe import PruningRecipe

add_arguments = add_budgeted


def run(options: Options) -> dict[str, Any]:
    """Run the recipe, print its report, and return the report's summary."""
    return run_and_print(read_recipe(options), options)


def run_and_print(recipe: PruningRecipe, options: Options) -> dict[str, Any]:
    """Run a recipe, print its report, the file to deploy if it names one, and what was written; return the summary."""
    refuse_output(options, recipe)
    from ..pipeline.run import run as run_recipe  # after the refusals, because it takes seconds
    from ..report.tables import print_report

    report = run_recipe(recipe, overwrite=options.overwrite, command=options.command_line, progress=options.progress)
    print_report(report, options.console)
    deployment, folder = report.details.deployment, Path(recipe.output)
    if deployment is not None and deployment.file is not None:
        options.console.print(f"\ndeploy {folder / deployment.file}")
    written = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    options.console.print(f"\nwritten to {folder}: {', '.join(written)}")
    return report.summary()
