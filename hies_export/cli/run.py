"""Run a recipe: score, cut, save, evaluate, export and measure."""

from __future__ import annotations

from typing import Any

from ..tasks import TASKS
from .arguments import Options, add_budgeted, read_recipe, refuse_output
from .deploy import print_answer

add_arguments = add_budgeted


def run(options: Options) -> dict[str, Any]:
    """Run the recipe, print its report, and return the report's summary."""
    recipe = read_recipe(options)
    refuse_output(options, recipe)
    from ..pipeline.run import run as run_recipe  # after the refusals, because it takes seconds
    from ..report.tables import print_report

    report = run_recipe(recipe, overwrite=options.overwrite, command=options.command_line, progress=options.progress)
    print_report(report, options.console)
    if recipe.deploy is not None:
        print_answer(report, recipe, options)
        return report.summary()
    written = f"{recipe.export.format}-{recipe.export.quantize}"
    exports = f"{recipe.export.unquantized.format}/" + (f", {written}/" if recipe.export.quantize else "")
    exports += f", onnx-{recipe.compound.name}/" if recipe.compound else ""
    refit = "" if recipe.options.compensation is None else ", refit.safetensors"
    if TASKS[recipe.task].embeds:
        exports += ", served/ (for sentence-transformers)"
    options.console.print(
        f"\nwritten to {recipe.output}: slim/ (checkpoint), {exports}, report.html, report.md, "
        f"report.json, plan.json{refit}"
    )
    return report.summary()
