"""Run every stage of a recipe: score, cut, save, evaluate, export and measure."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from rich.console import Console

from ..progress import Progress
from .arguments import add_recipe, read_recipe, refuse_output
from .deploy import print_answer


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe and `--json`."""
    add_recipe(parser)


def run(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    """Run the recipe, print its report, and return the report's summary."""
    from ..pipeline.run import run as run_recipe
    from ..report.terminal import print_report

    recipe = read_recipe(options)
    refuse_output(options, recipe)
    report = run_recipe(recipe, overwrite=options.overwrite, command=options.command_line, progress=progress)
    print_report(report, console)
    if recipe.deploy is not None:
        print_answer(report, recipe, console)
        return report.summary()
    exports = f"{recipe.export.format}/" + (f", onnx-{recipe.export.quantize}/" if recipe.export.quantize else "")
    exports += ", onnx-cascade/" if recipe.cascade else ""
    refit = "" if recipe.prune.compensation is None else ", refit.safetensors"
    console.print(
        f"\nwritten to {recipe.output}: slim/ (checkpoint), {exports}, report.html, report.md, "
        f"report.json, plan.json{refit}"
    )
    return report.summary()
