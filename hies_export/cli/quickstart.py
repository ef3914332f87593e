"""Train a small model on bundled data and prune it, without a network."""

from __future__ import annotations

import shlex
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from ..checkpoint.folders import new_folder, refuse_existing, set_aside
from .arguments import Options, add_output


def add_arguments(parser: ArgumentParser) -> None:
    """Add the folder."""
    add_output(parser, help="folder to write (default: runs/quickstart)", default=Path("runs/quickstart"))


def run(options: Options) -> dict[str, Any]:
    """Train, run a recipe on the trained model, say what to try next, and return the report's summary."""
    refuse_existing(options.output, overwrite=options.overwrite)
    from ..pipeline.recipe import PruningRecipe
    from ..pipeline.run import run as run_recipe  # after the refusal, because it takes seconds
    from ..report.tables import print_report
    from ..report.words import removed_text
    from .digits import MODEL, prepare_quickstart

    # The recipe runs where it stays, as its report names the model by its path.
    with set_aside(options.output):
        with new_folder(options.output) as folder:
            prepare_quickstart(folder, progress=options.progress)
        try:
            recipe = PruningRecipe.from_yaml(options.output / "recipe.yaml")
            report = run_recipe(recipe, command=options.command_line, progress=options.progress)
        except BaseException:  # an interrupt too
            shutil.rmtree(options.output)
            raise
    print_report(report, options.console)
    output = options.output
    names = ("recipe.yaml", "run/slim", MODEL, "larger")
    recipe_file, slim, dense, larger = (shlex.quote(str(output / name)) for name in names)
    options.console.print(
        f"\nA ViT was trained on handwritten digits, then pruned: {removed_text(report.units)}. In {output}:\n"
        f"  {output}/run/slim    the slim checkpoint: hies_export.load({str(output / 'run' / 'slim')!r})\n"
        f"  {output}/run/onnx    the same for ONNX Runtime\n"
        f"  {output}/run/report.html\n"
        "Try next:\n"
        f"  hies-export run {recipe_file} --set prune.budget.flops=0.7 -o {larger}\n"
        f"  hies-export inspect {slim}\n"
        f"  hies-export bench {dense} {slim} --runtime onnxruntime-cpu --shape 64\n"
        "and then a recipe for your own model: see recipes/bert-sst2.yaml",
        soft_wrap=True,
    )
    return report.summary()
