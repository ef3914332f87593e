"""Answer what to deploy: the fastest form of a model that keeps a promise about its answers."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from .. import processes
from ..checkpoint.folders import refuse_existing
from ..errors import HiesError, MissingRuntimeError, PlanError, RecipeError, RequestError
from ..evaluate.interval import confidence_of_each, rows_needed
from ..evaluate.judge import Judge
from ..measure.compare import compare_forms
from ..measure.exports import ExportOptions
from ..measure.forms import Forms
from ..onnx.quantize import check_quantizable
from ..progress import SILENT, Progress
from ..recipe import KeepBudget, PruningRecipe
from ..report.details import DeployWay
from ..report.report import Report
from ..runtimes.base import RUNTIMES
from ..runtimes.registry import Served, check_runtime
from ..tasks import TASKS
from .answer import DenseForms
from .fastest import LOOKS, QUICK, Search, confidence_for
from .journal import CutJournal
from .prepare import Prepared
from .propose import with_held_out
from .resolve import Resolved, resolve
from .serving import predict_served
from .stages import output_folder, run_stages

logger = logging.getLogger(__name__)

# The bits that are tried on each installed runtime.
WAYS = {
    "onnxruntime-cpu": ("float32",),
    "onnxruntime-cpu-int8": ("int8",),
    "openvino": ("float32", "bfloat16"),
    "onnxruntime-cuda": ("float32", "float16"),
    "onnxruntime-tensorrt": ("float16",),
    "llamacpp": ("q8_0", "q4_0"),
}


def deploy(
    recipe: PruningRecipe,
    *,
    keep: float | None = None,
    runtimes: Sequence[str] | None = None,
    minutes: float | None = None,
    overwrite: bool = False,
    command: str | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Find the fastest form of a model that keeps its answers, and write it with its report to `recipe.output`.

    The dense model is tried on every runtime of this machine, in all bits that the runtime computes in: it is judged on
    the held-out rows, and timed. In the fastest forms, the search finds the largest cut whose file keeps the promise,
    by the lower end of a 95 % interval. For a classifier, cascades of deeper cuts are tried too: the dense model
    answers the rows that the slim one is unsure of. The fastest of all these is then judged and timed in all forms
    beside the dense model; a cascade is timed on the evaluation rows. Statistics, moments and orders are computed once.
    If no cut keeps the promise, nothing is cut, and the answer is the fastest dense form that keeps it.

    After an interruption, the same call judges no cut again: see `CutJournal`.

    Args:
        recipe: Model, data, and how units are scored and refitted; its budget is ignored. If it holds out no rows, the
            promise is made on part of the evaluated split, see `with_held_out`.
        keep: Share of the dense model's predictions on held-out rows that must stay, in (0, 1); by default that of the
            recipe's section `deploy`, or 0.99.
        runtimes: Runtimes that may be deployed on; by default the section's, or all that are installed.
        minutes: After this many minutes, no further cut is judged; by default the section's, or no limit. Timing and
            writing the result take extra time.
        overwrite: Replace an existing output folder.
        command: The command line, which the report records.
        progress: Shows stages and loops.

    Returns:
        The report, whose `details.deployment` names the form to deploy and its file.

    Raises:
        RequestError: The recipe, the data or the model does not allow it; raised before anything is computed.
        PlanError: Not even the dense model keeps the promise, in any form.
        StepError: A stage failed; no output folder is left behind.
    """
    began = time.monotonic()
    processes.refuse_several("deploy")
    given = {"keep": keep, "runtimes": runtimes, "minutes": minutes}
    section = {} if recipe.deploy is None else recipe.deploy.model_dump(exclude_unset=True)
    recipe = recipe.with_overrides(
        {"prune.budget": None, "deploy": section | {name: value for name, value in given.items() if value is not None}}
    )
    asked = recipe.deploy
    assert asked is not None
    if recipe.cascade is not None:
        raise RequestError("deploy tries cascades by itself, got a section cascade; leave it out")
    if TASKS[recipe.task].in_parts:
        raise RequestError(
            f"deploy compares models that are one graph, got task: {recipe.task}, which is exported as several; prune "
            "it with hies-export run, and a budget of keep"
        )
    refuse_existing(recipe.output, overwrite=overwrite, inputs=recipe.inputs)
    if recipe.export.options.unquantized != ExportOptions():
        raise RequestError(
            f"deploy exports what each runtime reads, got export: {recipe.export.format}, {recipe.export.provider}, "
            f"{recipe.export.dtype}; leave it out"
        )
    promise = KeepBudget(predictions=asked.keep)
    progress.stage("load the model and the data")
    recipe = with_held_out(recipe, rows_needed(asked.keep, confidence_of_each(LOOKS)), f"{100 * asked.keep:g} %")
    resolved = resolve(recipe, runtimes=())
    rows = resolved.prepared.rows
    resolved = replace(resolved, prepared=replace(resolved.prepared, rows=replace(rows, promised=rows.held_out)))
    commit = getattr(resolved.prepared.model.config, "_commit_hash", None)
    with (
        output_folder(recipe, overwrite=overwrite) as folder,
        tempfile.TemporaryDirectory(dir=folder) as temporary,
        CutJournal(recipe, commit) as journal,
    ):
        if journal.found:
            progress.stage(f"resume: {journal.found} cuts were judged before; their results are in {journal.path}")
        dense = try_dense(resolved, asked.keep, Path(temporary), asked.runtimes, progress)
        limit = math.inf if asked.minutes is None else began + 60 * asked.minutes
        found = Search(resolved, promise, dense, journal, limit, progress).answer(began)
        prepared = replace(resolved.prepared, exporter=found.exporter)
        resolved = replace(resolved, prepared=prepared, options=found.options)
        return run_stages(resolved, recipe, folder, command, progress, answer=found)


def try_dense(resolved: Resolved, keep: float, folder: Path, runtimes: Sequence[str], progress: Progress) -> DenseForms:
    """Judge the dense model in every form on the held-out rows, and time it; a form that fails keeps its reason."""
    prepared = resolved.prepared
    forms = Forms({"dense": prepared.model}, prepared.exporter, folder, progress)
    confidence = confidence_for(prepared, keep)
    judge = Judge.on(prepared.model, prepared.rows.held_out, confidence=confidence, **asdict(prepared.judged))
    tried: list[DeployWay] = []
    served: list[Served] = []
    for runtime, bits in find_ways(prepared, runtimes):
        progress.stage(f"try the dense model on {runtime} in {bits}")
        try:
            if bits == "int8":
                check_quantizable(prepared.model, "int8")
            form = forms.served("dense", runtime, bits)
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
        progress.stage("time all forms of the dense model")
        shape, batch = next(iter(prepared.measured.items()))
        (found,) = compare_forms(served, {shape: batch}, timing=QUICK, decode=False, progress=progress).values()
        times += [one.ratio.median for one in found]
    ratios = iter(times)
    ways = [way if way.problem else replace(way, dense_ratio=next(ratios)) for way in tried]
    return DenseForms(ways, judge, forms)


def find_ways(prepared: Prepared, runtimes: Sequence[str]) -> list[tuple[str, str]]:
    """Return the runtimes that are installed, or those asked for, each with the bits to try."""
    if unknown := [name for name in runtimes if name in RUNTIMES and name not in WAYS]:
        raise RecipeError([f"runtimes to deploy on must be among {', '.join(WAYS)}, got {', '.join(unknown)}"])
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
