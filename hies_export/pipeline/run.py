"""Run a recipe: all of its stages, or its search for the fastest form to deploy."""

from __future__ import annotations

from .. import processes
from ..checkpoint.folders import refuse_existing
from ..measure.exports import check_exports, export_formats, require_exporters
from ..progress import SILENT, Progress
from ..recipe import PruningRecipe
from ..report.report import Report
from .deploy import deploy
from .resolve import resolve, runtimes_of
from .stages import output_folder, run_stages


def run(
    recipe: PruningRecipe, *, overwrite: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Report:
    """Run a recipe and write `recipe.output`: scores.json, plan.json, slim/, onnx/ (or gguf/), report.json, .md, .html.

    If the recipe compensates, the refitted layers are in `refit.safetensors` beside the plan. A recipe with a section
    `deploy` is run by `hies_export.deploy`.

    The folder appears only when all stages have succeeded. If the environment names several processes, as under
    accelerate, they share the work; the first one writes, and all return its report.

    Args:
        recipe: The recipe.
        overwrite: Replace an existing output folder, unless it is, holds or lies inside the model or the data.
        command: The command line, which the report records.
        progress: Shows stages and loops.

    Returns:
        The report that was written.

    Raises:
        RequestError: The recipe, the data or the model does not allow the run; raised before anything is computed.
        StepError: A stage failed; no output folder is left behind.
    """
    if recipe.deploy is not None:
        return deploy(recipe, overwrite=overwrite, command=command, progress=progress)
    with processes.together():
        refuse_existing(recipe.output, overwrite=overwrite, inputs=recipe.inputs)
        formats = export_formats(recipe.export.options, runtimes_of(recipe))
        require_exporters(formats)
        progress.stage("load the model and the data")
        resolved = resolve(recipe)
        prepared, constraints = resolved.prepared, resolved.options.constraints
        parts = constraints.parts(prepared.scored)
        uneven = bool(constraints.keep_layers) or not all(constraints.uniform(part) for part in parts)
        check_exports(formats, prepared.model, prepared.processor, uneven=uneven, quantize=recipe.export.quantize)
        with output_folder(recipe, overwrite=overwrite) as folder:
            return run_stages(resolved, recipe, folder, command, progress)
