"""Find the cut or the cascade that keeps a promise in the least time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cascade.export import CascadeOptions
from ..data.targets import samples_of
from ..errors import HiesError, PlanError
from ..evaluate.interval import CONFIDENCE, rate_rows_needed
from ..measure.compare import compare_forms
from ..measure.on_rows import time_on_rows
from ..measure.timing import Timing
from ..onnx.export import OnnxExport
from ..onnx.quantize import Quantize
from ..progress import Progress
from ..recipe import FLOPS_TO_TRY, BudgetSection, KeepBudget, TimedSection
from ..report.details import DeployWay, KeepOutcome, SizeTried
from ..runtimes.registry import Served
from ..units import Selection
from .answer import Answer, DenseForms
from .cascade import answers_of, cut_sizes, join_sizes, mixed
from .choice import Choice
from .choose import Chooser
from .journal import CutJournal
from .quality import cut_beside
from .resolve import Resolved

logger = logging.getLogger(__name__)

# Runtimes that run a cascade.
CASCADED = ("onnxruntime-cpu", "onnxruntime-cpu-int8", "openvino")
# A cut is searched for in this many forms, the fastest of the dense model; the cut model is then tried in all forms.
SEARCHED = 2
# Enough to see which form is faster by more than a few percent.
QUICK = Timing(repeats=10)


@dataclass(frozen=True)
class _Found:
    """A cut whose model, or whose cascade, keeps the promise in one way, and the share of the FLOPs that it leaves."""

    way: DeployWay
    budget: BudgetSection
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

    def answer(self, began: float) -> Answer:
        """Return the cut whose model is fastest, or none if a dense form is."""
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
        sizes = self._add_cascades(found)
        quantize: Quantize | None = "int8" if any(way.bits == "int8" and not way.problem for way in tried) else None
        exporter = self._prepared.exporter
        exporter = replace(exporter, options=replace(exporter.options, quantize=quantize))
        if found:
            fastest = self._fastest(found)
            budget, choice, how = fastest.budget, fastest.choice, self._options.compensation
            cascade, way = fastest.cascade, fastest.way
        else:
            self._progress.stage("nothing is cut: the fastest dense form that keeps the promise is the answer")
            budget, choice, how = BudgetSection(keep=self._promise), self._chooser.nothing(self._promise), None
            cascade, way = None, order[0]
        options = self._options.model_copy(update={"budget": budget, "compensation": how})
        dense = replace(self._dense, ways=tried)
        return Answer(
            choice=choice,
            cascade=cascade,
            sizes=() if cascade is None else sizes[cascade],
            served=self._served(way),
            options=options,
            exporter=exporter,
            promise=share,
            dense=dense,
            began=began,
        )

    def _served(self, way: DeployWay) -> TimedSection:
        batch, sequence = next(iter(self._prepared.measured))
        return TimedSection.model_validate(
            {"runtime": way.runtime, "batch": batch, "sequence": sequence, "dtype": way.bits}
        )

    def _largest(self, way: DeployWay) -> _Found:
        """Find the largest cut that keeps the promise in one way."""
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

        choice = self._chooser.by_keep(
            self._promise, served=self._served(way), stop=lambda: time.monotonic() > self._limit, recall=recall
        )
        return _Found(way, BudgetSection(keep=self._promise), choice, self._chooser.flops_left(choice.plan.kept))

    def _add_cascades(self, found: list[_Found]) -> dict[CascadeOptions, tuple[SizeTried, ...]]:
        """Add the cascades of a classifier that keep the promise in the fastest forms; return the sizes tried for each.

        The dense model in 8 bits need not keep the promise by itself: the dense part is in float32.
        """
        prepared, share, tried = self._prepared, self._promise.predictions, {}
        assert share is not None
        like = found[0].choice if found else None
        plain = self._prepared.exporter.options.unquantized.read_by("onnxruntime-cpu", "float32")
        dense = self._dense.forms.exports_of("dense").get(plain)
        if prepared.judged.regression or prepared.task.generative or not isinstance(dense, OnnxExport):
            return {}
        able = [way for way in self._dense.ways if way.runtime in CASCADED and way.problem is None]
        ways = sorted(able, key=lambda way: way.dense_ratio or 0.0)[:SEARCHED]
        # Beside the dense model's own interval, whose end is that of a two-sided one.
        confidence = 1 - (1 - CONFIDENCE) / 2 / max(1, len(ways) * len(FLOPS_TO_TRY))
        if samples_of(prepared.rows.promised) < rate_rows_needed(1 - share, confidence):
            return {}
        if time.monotonic() > self._limit:
            return {}
        answers, folder = answers_of(prepared), self._dense.forms.folder
        cuts = cut_sizes(prepared, self._chooser, self._dense.forms, FLOPS_TO_TRY, like=like)
        for way in ways:
            asked = CascadeOptions(
                disagreement=1 - share,
                confidence=confidence,
                quantize="int8" if way.bits == "int8" else None,
                runtime=way.runtime.removesuffix("-int8"),
                dtype=None if way.bits == "int8" else way.bits,
            )
            try:
                made, sizes = join_sizes(prepared, cuts, dense, answers, asked, folder, self._progress)
            except HiesError as error:
                logger.warning("no cascade is deployed on %s in %s: %s", way.runtime, way.bits, error)
                continue
            tried[asked] = tuple(sizes)
            found += [
                _Found(way, BudgetSection(flops=one.flops), one.choice, one.flops, asked, one.exported.folder)
                for one in made
            ]
        return tried

    def _fastest(self, found: Sequence[_Found]) -> _Found:
        """Time the cuts, each in its own way, and return the fastest."""
        if len(found) == 1:
            return found[0]
        self._progress.stage("time the cuts that were found")
        served, forms = [], self._dense.forms
        for number, one in enumerate(found):
            if one.cascade is not None and one.folder is not None:
                served.append(Served(one.cascade.runtime, one.folder, one.cascade.dtype))
                continue
            slim = cut_beside(self._prepared.model, one.choice.plan.kept, self._prepared.modules, one.choice.refit)
            forms.add(name := f"found-{number}", slim)
            served.append(forms.served(name, one.way.runtime, one.way.bits))
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
