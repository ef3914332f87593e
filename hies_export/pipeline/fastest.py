"""Find the cut or the cascade that keeps a promise in the least time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cascade.export import CascadeOptions
from ..data.targets import samples_of
from ..errors import HiesError, PlanError
from ..evaluate.interval import FAILURES, confidence_of_each, rows_needed
from ..measure.compare import compare_forms
from ..measure.on_rows import time_on_rows
from ..measure.timing import Timing
from ..onnx.export import OnnxExport
from ..onnx.quantize import Quantize
from ..outcomes import KeepOutcome
from ..progress import Progress
from ..recipe import FLOPS_TO_TRY, BudgetSection, KeepBudget, TimedSection
from ..report.details import DeployWay, SizeTried
from ..runtimes.registry import Served
from .answer import Answer, DenseForms
from .cascade import answers_of, cut_sizes, join_sizes, mixed
from .choose import Chooser
from .cut import Choice, cut_beside
from .journal import CutJournal
from .prepare import Prepared
from .resolve import Resolved
from .search import Trial, Watch

logger = logging.getLogger(__name__)

# Runtimes that run a cascade.
CASCADED = ("onnxruntime-cpu", "onnxruntime-cpu-int8", "openvino")
# A cut is searched for in this many forms, the fastest of the dense model; the cut model is then tried in all forms.
SEARCHED = 2
# Enough to see which form is faster by more than a few percent.
QUICK = Timing(repeats=10)
# Cuts that may fail to keep the promise in these searches; see `confidence_of_each`.
LOOKS = FAILURES * SEARCHED


def confidence_for(prepared: Prepared, share: float) -> float:
    """Return the confidence that each interval of a deployment needs, on the held-out rows of a prepared run.

    Cascades count if they are tried: for a classifier, with enough rows to promise a share at that confidence.
    """
    if prepared.judged.regression or prepared.task.generative:
        return confidence_of_each(LOOKS)
    with_cascades = confidence_of_each(LOOKS + SEARCHED * len(FLOPS_TO_TRY))
    enough = samples_of(prepared.rows.held_out) >= rows_needed(share, with_cascades)
    return with_cascades if enough else confidence_of_each(LOOKS)


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
        self._confidence = dense.judge.confidence
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
            budget, how, cascade, way = BudgetSection(keep=self._promise), None, None, order[0]
            choice = self._chooser.nothing(self._promise, confidence=self._confidence)
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
        how: dict[str, Any] = {"served": self._served(way), "confidence": self._confidence, "watch": _Follow(self, way)}
        choice = self._chooser.by_keep(self._promise, **how)
        return _Found(way, BudgetSection(keep=self._promise), choice, self._chooser.flops_left(choice.plan.kept))

    def judge(self, trial: Trial, way: DeployWay) -> tuple[float, float]:
        """Return the numbers of a cut in one way; the journal may know them, and those that are new are told of."""
        served, known = not trial.guess, len(self._journal)
        how = trial.runtime, way.bits if served else None, trial.token_weights, self._confidence
        found, low = self._journal.recall(trial.selection, how, trial.judge)
        left = self._chooser.flops_left(trial.selection)
        if served and trial.promise.having(found, low).met:
            self._best = min(self._best, (way.dense_ratio or 1.0) * left)
        if len(self._journal) > known:  # and not for the way before this one, or before an interruption
            best = "" if self._best == math.inf else f"; best so far: about {self._best:.2f} of the time"
            shown = f"{100 * found:.2f} % of the answers stay, at least {100 * low:.2f} %"
            self._progress.stage(f"{left:.2f} of the FLOPs on {trial.runtime}: {shown}{best}")
        return found, low

    @property
    def late(self) -> bool:
        """Whether the time for judging cuts is over."""
        return time.monotonic() > self._limit

    def _add_cascades(self, found: list[_Found]) -> dict[CascadeOptions, tuple[SizeTried, ...]]:
        """Add the cascades of a classifier that keep the promise in the fastest forms; return the sizes tried for each.

        The dense model in 8 bits need not keep the promise by itself: the dense part is in float32.
        """
        prepared, share, tried = self._prepared, self._promise.predictions, {}
        assert share is not None
        like = found[0].choice if found else None
        plain = self._prepared.exporter.options.unquantized.read_by("onnxruntime-cpu", "float32")
        dense = self._dense.forms.exports_of("dense").get(plain)
        if self._confidence == confidence_of_each(LOOKS) or not isinstance(dense, OnnxExport) or self.late:
            return {}
        able = [way for way in self._dense.ways if way.runtime in CASCADED and way.problem is None]
        ways = sorted(able, key=lambda way: way.dense_ratio or 0.0)[:SEARCHED]
        answers, folder = answers_of(prepared), self._dense.forms.folder
        cuts = cut_sizes(prepared, self._chooser, self._dense.forms, FLOPS_TO_TRY, like=like)
        for way in ways:
            asked = CascadeOptions(
                disagreement=1 - share,
                confidence=(1 + self._confidence) / 2,  # its interval is one-sided
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


class _Follow(Watch):
    """Follows the search for the largest cut in one way."""

    def __init__(self, search: Search, way: DeployWay):
        self._search, self._way = search, way

    def judge(self, trial: Trial) -> tuple[float, ...]:
        """Return the numbers of a cut; see `Search.judge`."""
        return self._search.judge(trial, self._way)

    def stops(self) -> bool:
        """Tell whether the time is over."""
        return self._search.late
