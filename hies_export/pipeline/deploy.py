"""Answer what to deploy: the fastest form of a model that keeps a promise about its answers."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import processes
from ..checkpoint.folders import refuse_existing
from ..data.targets import samples_of
from ..errors import HiesError, MissingRuntimeError, PlanError, RecipeError, RequestError
from ..evaluate.interval import CONFIDENCE, rate_rows_needed, rows_needed
from ..evaluate.judge import Judge
from ..measure.compare import compare_forms
from ..measure.exports import Exported, Exporter, ExportOptions
from ..measure.on_rows import time_on_rows
from ..measure.timing import Timing
from ..onnx.export import OnnxExport
from ..onnx.quantize import Quantize, check_quantizable
from ..progress import SILENT, Progress
from ..recipe import FLOPS_TO_TRY, PruningRecipe
from ..report.details import DeployWay, KeepOutcome, SizeTried
from ..report.report import Report
from ..runtimes.base import RUNTIMES
from ..runtimes.registry import Served, check_runtime
from ..tasks import TASKS
from ..units import Selection
from .answer import Answer, DenseForms
from .cascade import answers_of, mixed, try_sizes
from .choose import Choice, Chooser
from .journal import CutJournal
from .options import Budget, CascadeOptions, KeepBudget, TimedBudget
from .prepare import Prepared
from .propose import with_held_out
from .quality import cut_beside
from .resolve import Resolved, export_options, options_of, resolve
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
# Runtimes that run a cascade.
CASCADED = ("onnxruntime-cpu", "onnxruntime-cpu-int8", "openvino")
# A cut is searched for in this many forms, the fastest of the dense model; the cut model is then tried in all forms.
SEARCHED = 2
# Enough to see which form is faster by more than a few percent.
QUICK = Timing(repeats=10)


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
    if export_options(recipe).unquantized != ExportOptions():
        raise RequestError(
            f"deploy exports what each runtime reads, got export: {recipe.export.format}, {recipe.export.provider}, "
            f"{recipe.export.dtype}; leave it out"
        )
    promise = KeepBudget(predictions=asked.keep)
    progress.stage("load the model and the data")
    recipe = with_held_out(recipe, rows_needed(asked.keep), f"{100 * asked.keep:g} %")
    options = replace(options_of(recipe), budget=Budget(keep=promise))
    resolved = resolve(recipe, options=options, runtimes=())
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
        dense = try_dense(resolved, Path(temporary), asked.runtimes, progress)
        limit = math.inf if asked.minutes is None else began + 60 * asked.minutes
        found = Search(resolved, promise, dense, journal, limit, progress).answer(Path(temporary), began)
        return run_stages(replace(resolved, options=found.options), recipe, folder, command, progress, answer=found)


def try_dense(resolved: Resolved, folder: Path, runtimes: Sequence[str], progress: Progress) -> DenseForms:
    """Judge the dense model in every form on the held-out rows, and time it; a form that fails keeps its reason."""
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
            wanted = exporter.options.read_by(runtime, bits)
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
        progress.stage("time all forms of the dense model")
        shape, batch = next(iter(prepared.measured.items()))
        (found,) = compare_forms(served, {shape: batch}, timing=QUICK, decode=False, progress=progress).values()
        times += [one.ratio.median for one in found]
    ratios = iter(times)
    ways = [way if way.problem else replace(way, dense_ratio=next(ratios)) for way in tried]
    return DenseForms(ways, judge, exports)


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


@dataclass(frozen=True)
class _Found:
    """A cut whose model, or whose cascade, keeps the promise in one way, and the share of the FLOPs that it leaves."""

    way: DeployWay
    budget: Budget
    choice: Choice
    flops: float
    cascade: CascadeOptions | None = None
    folder: Path | None = None  # of the cascade


class Search:
    """The search for the largest cuts that keep a promise, in the ways in which the dense model is fastest."""

    def __init__(
        self,
        resolved: Resolved,
        promise: KeepBudget,
        dense: DenseForms,
        journal: CutJournal,
        limit: float,  # of time.monotonic, after which no cut is judged
        progress: Progress,
    ):
        self._resolved, self._promise, self._dense = resolved, promise, dense
        self._journal, self._limit, self._progress = journal, limit, progress
        self._prepared, self._options = resolved.prepared, resolved.options
        self._chooser = Chooser(self._prepared, self._options, progress, resolved.source.dtype)
        self._best = math.inf

    def answer(self, folder: Path, began: float) -> Answer:
        """Return the cut whose model is fastest, or none if a dense form is; exports go into the folder."""
        tried, share = list(self._dense.ways), self._promise.predictions
        assert share is not None
        order = sorted(
            (way for way in tried if way.at_least is not None and way.at_least >= share),
            key=lambda way: way.dense_ratio or 0.0,
        )
        if not order:
            best = max((way for way in tried if way.at_least is not None), key=lambda way: way.at_least or 0.0)
            raise PlanError(
                f"keep asks for {100 * share:g} % of the predictions, and the dense model itself keeps at least "
                f"{100 * (best.at_least or 0.0):.2f} % in its best form ({best.runtime}, {best.bits}); ask for less, "
                "or give more held-out rows"
            )
        self._chooser.score()
        found: list[_Found] = []
        for way in order[:SEARCHED]:
            self._progress.stage(f"search for the largest cut that keeps the promise on {way.runtime} in {way.bits}")
            try:
                one = self._largest(way)
            except HiesError as error:
                logger.warning("no cut is deployed on %s in %s: %s", way.runtime, way.bits, error)
                tried[tried.index(way)] = replace(way, search=str(error))
                continue
            assert isinstance(one.choice.budget, KeepOutcome)
            tried[tried.index(way)] = replace(way, judged=one.choice.budget.judged, flops=one.flops)
            found.append(one)
        sizes = self._add_cascades(found, folder)
        quantize: Quantize | None = "int8" if any(way.bits == "int8" and not way.problem for way in tried) else None
        export = replace(self._options.export, quantize=quantize)
        if found:
            fastest = self._fastest(found, folder)
            budget, choice, how = fastest.budget, fastest.choice, self._options.compensation
            cascade = fastest.cascade
        else:
            self._progress.stage("nothing is cut: the fastest dense form that keeps the promise is the answer")
            asked = replace(self._promise, served=self._served(order[0]))
            budget, choice, how, cascade = Budget(keep=asked), self._chooser.nothing(asked), None, None
        options = replace(self._options, budget=budget, export=export, compensation=how)
        dense = replace(self._dense, ways=tried)
        return Answer(options, choice, share, dense, began, cascade, () if cascade is None else sizes[cascade])

    def _served(self, way: DeployWay) -> TimedBudget:
        batch, sequence = next(iter(self._prepared.measured))
        return TimedBudget(runtime=way.runtime, batch=batch, sequence=sequence, dtype=way.bits)

    def _largest(self, way: DeployWay) -> _Found:
        """Find the largest cut that keeps the promise in one way."""
        asked = replace(self._promise, served=self._served(way))
        share = self._promise.predictions

        def recall(
            selection: Selection, runtime: str | None, weights: float, judge: Callable[[], tuple[float, float]]
        ) -> tuple[float, float]:
            served, judged_now = runtime == way.runtime, []

            def judged() -> tuple[float, float]:
                judged_now.append(judge())
                return judged_now[0]

            found, low = self._journal.recall(selection, (runtime, way.bits if served else None, weights), judged)
            left = self._chooser.flops_left(selection)
            if served and share is not None and low >= share:
                self._best = min(self._best, (way.dense_ratio or 1.0) * left)
            if judged_now:  # and not for the way before this one, or before an interruption
                best = "" if self._best == math.inf else f"; best so far: about {self._best:.2f} of the time"
                shown = f"{100 * found:.2f} % of the answers stay, at least {100 * low:.2f} %"
                self._progress.stage(f"{left:.2f} of the FLOPs on {runtime}: {shown}{best}")
            return found, low

        choice = self._chooser.by_keep(asked, stop=lambda: time.monotonic() > self._limit, recall=recall)
        return _Found(way, Budget(keep=asked), choice, self._chooser.flops_left(choice.plan.kept))

    def _add_cascades(self, found: list[_Found], folder: Path) -> dict[CascadeOptions, tuple[SizeTried, ...]]:
        """Add the cascades of a classifier that keep the promise in the fastest forms; return the sizes tried for each.

        The dense model in 8 bits need not keep the promise by itself: the dense part is in float32.
        """
        prepared, share, tried = self._prepared, self._promise.predictions, {}
        assert share is not None
        like = found[0].choice if found else None
        plain = self._options.export.unquantized.read_by("onnxruntime-cpu", "float32")
        dense = self._dense.exports.get(plain)
        if prepared.judged.regression or prepared.task.generative or not isinstance(dense, OnnxExport):
            return {}
        able = [way for way in self._dense.ways if way.runtime in CASCADED and way.problem is None]
        ways = sorted(able, key=lambda way: way.dense_ratio or 0.0)[:SEARCHED]
        # Beside the dense model's own interval, whose end is that of a two-sided one.
        confidence = 1 - (1 - CONFIDENCE) / 2 / max(1, len(ways) * len(FLOPS_TO_TRY))
        if samples_of(prepared.rows.promised) < rate_rows_needed(1 - share, confidence):
            return {}
        exporter = Exporter(self._options.export, prepared.sample, prepared.processor)
        answers = answers_of(prepared)
        for way in ways:
            if time.monotonic() > self._limit:
                break
            asked = CascadeOptions(
                1 - share,
                FLOPS_TO_TRY,
                "int8" if way.bits == "int8" else None,
                way.runtime.removesuffix("-int8"),
                None if way.bits == "int8" else way.bits,
                confidence,
            )
            try:
                made, sizes = try_sizes(
                    prepared, self._chooser, exporter, dense, answers, asked, folder, self._progress, like
                )
            except HiesError as error:
                logger.warning("no cascade is deployed on %s in %s: %s", way.runtime, way.bits, error)
                continue
            tried[asked] = tuple(sizes)
            found += [
                _Found(way, Budget(flops=one.flops), one.choice, one.flops, asked, one.exported.folder) for one in made
            ]
        return tried

    def _fastest(self, found: Sequence[_Found], folder: Path) -> _Found:
        """Time the cuts, each in its own way, and return the fastest."""
        if len(found) == 1:
            return found[0]
        self._progress.stage("time the cuts that were found")
        exporter = Exporter(self._options.export, self._prepared.sample, self._prepared.processor)
        served = []
        for number, one in enumerate(found):
            if one.cascade is not None and one.folder is not None:
                served.append(Served(one.cascade.runtime, one.folder, one.cascade.dtype))
                continue
            slim = cut_beside(self._prepared.model, one.choice.plan.kept, self._prepared.modules, one.choice.refit)
            source = exporter.source(one.way.runtime, slim, folder / f"found-{number}", one.way.bits)
            served.append(Served(one.way.runtime, source, one.way.bits))
        shape, batch = next(iter(self._prepared.measured.items()))
        if any(one.cascade for one in found):
            # What a cascade takes depends on the rows.
            rows = {shape[0]: mixed(self._prepared.rows.promised, shape[0])}
            (on_rows,) = time_on_rows(served, rows, progress=self._progress).values()
            times = [1.0, *(one.ratio.median for one in on_rows[1:])]
        else:
            how: dict[str, Any] = {"timing": QUICK, "decode": False, "progress": self._progress}
            (timed,) = compare_forms(served, {shape: batch}, **how).values()
            times = [1.0, *(one.ratio.median for one in timed)]
        return min(zip(times, found, strict=True), key=lambda pair: pair[0])[1]
