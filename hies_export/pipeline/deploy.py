"""Answer what to deploy: the fastest form of a model that keeps a promise about its answers."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ..checkpoint.folders import refuse_existing
from ..errors import HiesError, MissingRuntimeError, PlanError, RecipeError, RequestError
from ..evaluate.judge import Judge
from ..measure.compare import Served, compare_forms
from ..measure.exports import Exported, Exporter, ExportOptions
from ..measure.timing import Timing
from ..onnx.quantize import Quantize, check_quantizable
from ..progress import SILENT, Progress
from ..recipe import PruningRecipe
from ..report.details import DeployWay, KeepOutcome
from ..report.report import Report
from ..runtimes.base import RUNTIMES
from ..runtimes.registry import check_runtime
from ..tasks import TASKS
from .answer import Answer, DenseForms
from .choose import Choice, Chooser
from .options import Budget, KeepBudget, TimedBudget
from .prepare import Prepared
from .resolve import Resolved, export_options, options_of, resolve
from .run import output_folder, run_resolved
from .serving import predict_served

logger = logging.getLogger(__name__)

# What is tried on a machine that has it, by runtime.
WAYS = {
    "onnxruntime-cpu": ("float32",),
    "onnxruntime-cpu-int8": ("int8",),
    "openvino": ("float32", "bfloat16"),
    "onnxruntime-cuda": ("float32", "float16"),
    "onnxruntime-tensorrt": ("float16",),
    "llamacpp": ("q8_0", "q4_0"),
}
# A cut is searched for in so many ways, those in which the dense model is fastest; its model is then tried in all.
SEARCHED = 2
# Enough to tell which way is faster by more than a few percent.
QUICK = Timing(repeats=10)


def deploy(
    recipe: PruningRecipe,
    *,
    keep: float = 0.99,
    runtimes: Sequence[str] = (),
    minutes: float | None = None,
    overwrite: bool = False,
    command: str | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Find the fastest form of a model that keeps its answers, and write it with its report to `recipe.output`.

    Every runtime of this machine is tried with the dense model, in the bits that it can compute in: judged on the
    held-out rows, and timed. In the fastest ones, the largest cut is searched for whose file keeps the promise there,
    by the lower end of a 95 % interval. The model of the fastest is then judged and timed in all ways beside the dense
    one. Statistics, moments and orders are computed once.

    Args:
        recipe: Model, data, and how units are scored and refitted; its budget is not used.
        keep: Share of the dense model's predictions on held-out rows that must stay, in (0, 1).
        runtimes: What may be deployed on; by default all that is installed.
        minutes: After so many, no further cut is judged. Timing and writing the result come on top.
        overwrite: Replace an existing output folder.
        command: The command line, which the report records.
        progress: Shows stages and loops.

    Returns:
        The report, whose `details.deployment` names the form to deploy.

    Raises:
        RequestError: The recipe, the data or the model does not allow it; raised before anything is computed.
        PlanError: No cut keeps the promise; the message names the fastest dense form that does.
        StepError: A stage failed; no output folder is left behind.
    """
    began = time.monotonic()
    if not 0 < keep < 1:
        raise RecipeError([f"keep must be in (0, 1), a share of the predictions, got {keep:g}"])
    if TASKS[recipe.task].in_parts:
        raise RequestError(
            f"deploy compares models that are one graph, got task: {recipe.task}, which is exported as several; prune "
            "it with hies-export run, and a budget of keep"
        )
    refuse_existing(recipe.output, overwrite=overwrite, inputs=recipe.inputs)
    if export_options(recipe).unquantized != ExportOptions():
        raise RequestError(
            f"deploy exports what each runtime reads, got export: {recipe.export.format}, {recipe.export.provider}, "
            f"{recipe.export.dtype}; leave it out"
        )
    # What the report records; the runtimes tried are in `details.deployment`.
    recipe = recipe.with_overrides({"prune.budget": {"keep": keep}})
    promise = KeepBudget(predictions=keep)
    progress.stage("load the model and the data")
    options = replace(options_of(recipe), budget=Budget(keep=promise))
    resolved = resolve(recipe, options=options, runtimes=())
    with output_folder(recipe, overwrite=overwrite) as folder, tempfile.TemporaryDirectory(dir=folder) as temporary:
        dense = try_dense(resolved, Path(temporary), runtimes, progress)
        answer = search(resolved, promise, dense, began, minutes, progress)
        resolved = replace(resolved, options=answer.options)
        return run_resolved(resolved, recipe, folder, command, progress, answer=answer)


def try_dense(resolved: Resolved, folder: Path, runtimes: Sequence[str], progress: Progress) -> DenseForms:
    """Judge the dense model in every way on the held-out rows, and time it; a way that fails keeps its reason."""
    prepared = resolved.prepared
    exporter = Exporter(resolved.options.export, prepared.sample, prepared.processor)
    judge = Judge.on(prepared.model, prepared.rows.held_out, **asdict(prepared.judged))
    tried: list[DeployWay] = []
    served: list[Served] = []
    exports: dict[ExportOptions, Exported] = {}
    for runtime, bits in find_ways(prepared, runtimes):
        progress.stage(f"try the dense model on {runtime} in {bits}")
        try:
            if bits == "int8":
                check_quantizable(prepared.model, "int8")
            wanted = exporter.options.read_by(runtime, None if bits == "int8" else bits)
            if wanted not in exports:
                exports[wanted] = exporter.export(prepared.model, folder / f"dense-{len(exports)}", wanted)
            form = Served(runtime, exports[wanted].folder, bits)
            kept, low = judge.kept(predict_served(form, judge.batches))
        except HiesError as error:
            logger.warning("%s in %s is left out: %s", runtime, bits, error)
            tried.append(DeployWay(runtime, bits, problem=str(error)))
            continue
        served.append(form)
        tried.append(DeployWay(runtime, bits, kept=kept, at_least=low))
    if not served:
        reasons = "; ".join(str(way.problem) for way in tried)
        raise PlanError(f"no runtime here serves the dense model: {reasons or 'none is installed, see the extra cpu'}")
    times = [1.0]
    if len(served) > 1:
        progress.stage("time the dense model in all ways")
        shape, batch = next(iter(prepared.measured.items()))
        (found,) = compare_forms(served, {shape: batch}, timing=QUICK, decode=False, progress=progress).values()
        times += [one.ratio.median for one in found]
    ratios = iter(times)
    ways = [way if way.problem else replace(way, dense_ratio=next(ratios)) for way in tried]
    return DenseForms(ways, judge, exports)


def find_ways(prepared: Prepared, runtimes: Sequence[str]) -> list[tuple[str, str]]:
    """Return the runtimes that are installed, or those asked for, each with the bits to try."""
    if unknown := [name for name in runtimes if name in RUNTIMES and name not in WAYS]:
        raise RecipeError([f"runtimes to deploy on are {', '.join(WAYS)}, got {', '.join(unknown)}"])
    found = []
    for name in runtimes or WAYS:
        try:
            check_runtime(name, task=prepared.task.name)
        except (MissingRuntimeError, RecipeError):
            if runtimes:
                raise
            continue
        found += [(name, bits) for bits in WAYS[name]]
    return found


def search(
    resolved: Resolved,
    promise: KeepBudget,
    dense: DenseForms,
    began: float,
    minutes: float | None,
    progress: Progress,
) -> Answer:
    """Search for the largest cut in the fastest ways, and return the one whose model is fastest there."""
    prepared, share, tried = resolved.prepared, promise.predictions, list(dense.ways)
    assert share is not None
    chooser = Chooser(prepared, resolved.options, progress, resolved.source.dtype)
    order = sorted(
        (way for way in tried if way.at_least is not None and way.at_least >= share),
        key=lambda way: way.dense_ratio or 0.0,
    )
    found: list[tuple[float, DeployWay, KeepBudget, Choice]] = []
    batch, sequence = next(iter(prepared.measured))

    def stop() -> bool:
        return minutes is not None and time.monotonic() - began > 60 * minutes

    for way in order[:SEARCHED]:
        progress.stage(f"search for the largest cut that keeps the promise on {way.runtime} in {way.bits}")
        served = TimedBudget(runtime=way.runtime, batch=batch, sequence=sequence, dtype=way.bits)
        asked = replace(promise, served=served)
        try:
            choice = chooser.by_keep(asked, stop=stop)
        except HiesError as error:
            logger.warning("no cut is deployed on %s in %s: %s", way.runtime, way.bits, error)
            tried[tried.index(way)] = replace(way, search=str(error))
            continue
        assert isinstance(choice.budget, KeepOutcome)
        left = chooser.flops_left(choice.plan.kept)
        tried[tried.index(way)] = replace(way, judged=choice.budget.judged, flops=left)
        # A guess of the slim model's time, by which its way is chosen; it is measured in all ways afterwards.
        found.append(((way.dense_ratio or 1.0) * left, way, asked, choice))
    if not found:
        raise PlanError(_no_cut(order, tried, share))
    _, _, asked, choice = min(found, key=lambda one: one[0])
    quantize: Quantize | None = "int8" if any(way.bits == "int8" and not way.problem for way in tried) else None
    export = replace(resolved.options.export, quantize=quantize)
    options = replace(resolved.options, budget=Budget(keep=asked), export=export)
    return Answer(options, choice, share, replace(dense, ways=tried), began)


def _no_cut(order: Sequence[DeployWay], tried: Sequence[DeployWay], promise: float) -> str:
    """Return that no cut keeps the promise, and which dense form does."""
    if not order:
        best = max((way for way in tried if way.at_least is not None), key=lambda way: way.at_least or 0.0)
        return (
            f"keep asks for {100 * promise:g} % of the predictions, and the dense model itself keeps at least "
            f"{100 * (best.at_least or 0.0):.2f} % in its best form ({best.runtime}, {best.bits}); ask for less, or "
            "give more held-out rows"
        )
    way = order[0]
    reasons = "; ".join(dict.fromkeys(one.search for one in tried if one.search))
    flags = " --quantize int8" if way.bits == "int8" else ""
    return (
        f"deploy the dense model on {way.runtime} in {way.bits}, which takes {way.dense_ratio:.2f} of the time "
        f"(hies-export export MODEL{flags} -o DIR): {reasons}"
    )
