"""Find the cut, or the cascade, that keeps a promise in the least time."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import processes
from ..data.batches import samples_of
from ..errors import HiesError, PlanError
from ..evaluate.judge import Judge
from ..evaluate.predict import predict
from ..evaluate.ranking import kind_of_rows
from ..forms.cascade.export import CascadeOptions
from ..forms.cascade.facts import SizeTried
from ..forms.deployment import SEARCHED, DenseForms, DeployWay, find_ways, try_dense
from ..forms.exports import Exporter
from ..forms.form import Form, Forms
from ..forms.onnx.quantize import Quantize
from ..forms.runtimes.base import RUNTIMES
from ..forms.sizes import cut_sizes, join_sizes
from ..forms.time import Timed, in_mixed_order, ratios, rows_by_shape
from ..forms.time import time as time_forms
from ..progress import Progress
from ..recipe.budget import Budget, Found, KeepBudget, TimedSection
from ..recipe.sections import DeploySection
from ..report.outcomes import asked_words, stays_words
from .choose import Chooser
from .draw import Looks, all_looks
from .prepare import Prepared
from .recipe import FLOPS_TO_TRY, PruneSection
from .resolve import Resolved
from .search import Trial, Watch
from .stages import Choice, cut_beside

logger = logging.getLogger(__name__)

# Runtimes that run a cascade.
CASCADED = ("onnxruntime-cpu", "onnxruntime-cpu-int8", "openvino")
# A cut whose time is predicted from its FLOPs may turn out to be faster than another by this factor.
UNSURE = 1.1
# Rows that are timed one at a time where cuts, or forms of the dense model, are compared.
QUICK_ROWS = 128
# Rows in a batch where the times of cascades of several sizes are compared.
BATCH = 8


def looks_of(prepared: Prepared, promise: KeepBudget) -> Looks:
    """Return in how many forms a deployment searches, and whether it tries cascades, by the number of held-out rows."""
    share, rows = promise.predictions, prepared.rows.held_out
    assert share is not None
    kind = kind_of_rows(rows, embeds=prepared.task.embeds)
    metric = prepared.judged.promised(promise.metric, kind)
    classifies = prepared.task.cascades and prepared.judged.task.predicts == "classes"
    able = all_looks(classifies=classifies and metric is None)
    return next((one for one in able if samples_of(rows) >= one.rows(share, metric)), able[-1])


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What was decided before a run's own stages.

    Attributes:
        choice: The cut; None leaves it to the stages.
        cascade: How to join both models; None for no cascade.
        sizes: The sizes of cascades that were tried.
        served: What the cut was judged on; None for what its budget says.
    """

    choice: Choice | None = None
    cascade: CascadeOptions | None = None
    sizes: tuple[SizeTried, ...] = ()
    served: TimedSection | None = None


@dataclass(frozen=True, kw_only=True)
class Answer(Decided):
    """The largest cut that keeps the promise in one form, and the results of all forms.

    If no cut does, `choice` removes nothing. `options` are those that the cut was chosen by, and `exporter` writes it;
    `dense` also records the cuts that were searched for.
    """

    options: PruneSection
    exporter: Exporter
    promise: float
    dense: DenseForms
    began: float  # by time.monotonic

    @property
    def ways(self) -> list[tuple[str, str]]:
        """The ways that work, the dense float32 graph first."""
        return [(way.runtime, way.bits) for way in self.dense.ways if way.problem is None]


class _TooSlow(Exception):
    """No further cut in a way can be the fastest."""


@dataclass(frozen=True)
class _Found:
    """A cut whose model, or whose cascade, keeps the promise in one way, and the share of the FLOPs that it leaves."""

    way: DeployWay
    budget: Budget
    choice: Choice
    flops: float
    cascade: CascadeOptions | None = None
    form: Form | None = None  # of the cascade


def find_answer(resolved: Resolved, asked: DeploySection, folder: Path, began: float, progress: Progress) -> Answer:
    """Try the dense model in all forms, and search for a cut in the fastest; exports are written to a folder.

    The time of the search counts from `began`, of `time.monotonic`. The options of `resolved` have the promise.
    """
    prepared, promise = resolved.prepared, resolved.options.goal.keep
    assert promise is not None
    looks = looks_of(prepared, promise)
    judge = Judge.on(prepared.model, prepared.rows.held_out, confidence=looks.confidence, **vars(prepared.judged))
    forms = Forms({"dense": prepared.model}, prepared.exporter, folder, progress)
    dense = try_dense(
        forms, judge, find_ways(type(prepared.task), asked.runtimes), partial(_quick_times, resolved, progress)
    )
    limit = math.inf if asked.minutes is None else began + 60 * asked.minutes
    return Search(resolved, promise, dense, limit, progress).answer(began, looks)


def _quick_times(
    resolved: Resolved, progress: Progress, forms: Sequence[Form], *, cascades: bool = False
) -> list[Timed]:
    """Time forms beside each other as a deployment is timed, at the first of its shapes and without many repeats."""
    prepared = resolved.prepared
    shape, batch = next(iter(prepared.measured.items()))
    if prepared.on_rows:
        rows = resolved.in_order(1)[:QUICK_ROWS]
    elif cascades:  # what a cascade takes depends on the rows
        rows = in_mixed_order(prepared.rows.promised, shape[0])
    else:
        return time_forms(forms, {shape: [batch]}, progress=progress)
    return time_forms(forms, rows_by_shape({shape[0]: rows}), progress=progress)


class Search:
    """The search for the largest cuts that keep a promise, in the ways in which the dense model is fastest."""

    def __init__(
        self,
        resolved: Resolved,
        promise: KeepBudget,
        dense: DenseForms,
        limit: float,  # of time.monotonic, after which no cut is judged
        progress: Progress,
    ):
        self._promise, self._dense = promise, dense
        self._limit, self._progress = limit, progress
        self._judged: dict[Any, Found] = {}
        self._resolved, self._prepared, self._options = resolved, resolved.prepared, resolved.options
        self._chooser = Chooser(self._prepared, self._options, progress, resolved.source.dtype)
        self._confidence = dense.judge.confidence
        self._best = math.inf

    def answer(self, began: float, looks: Looks) -> Answer:
        """Return the cut whose model, or if cascades are tried, whose cascade is fastest; none if a dense form is."""
        tried, share = list(self._dense.ways), self._promise.predictions
        assert share is not None
        order = sorted(
            (way for way in tried if way.at_least is not None and way.at_least >= share),
            key=lambda way: way.dense_ratio or 0.0,
        )
        if not order:
            best = max((way for way in tried if way.at_least is not None), key=lambda way: way.at_least or 0.0)
            asked = asked_words(self._chooser.promise(self._promise))
            raise PlanError(
                f"keep asks for {asked}, and the dense model itself keeps at least "
                f"{100 * (best.at_least or 0.0):.2f} % in its best form ({best.runtime}, {best.bits}); ask for less, "
                "or give more held-out rows"
            )
        self._chooser.score()
        found: list[_Found] = []
        for way in order[: looks.forms]:
            self._progress.stage(f"search for the largest cut that keeps the promise on {way.runtime} in {way.bits}")
            try:
                one = self._largest(way)
            except _TooSlow as reason:
                self._progress.stage(f"stop the search on {way.runtime} in {way.bits}: {reason}")
                tried[tried.index(way)] = replace(way, search=str(reason))
                continue
            except HiesError as error:
                logger.warning("no cut is deployed on %s in %s: %s", way.runtime, way.bits, error)
                tried[tried.index(way)] = replace(way, search=str(error))
                continue
            tried[tried.index(way)] = replace(way, judged=one.choice.outcome.judged, flops=one.flops)
            found.append(one)
        sizes = self._add_cascades(found) if looks.cascades else {}
        quantize: Quantize | None = "int8" if any(_in_onnx_int8(way) and not way.problem for way in tried) else None
        exporter = self._prepared.exporter
        exporter = replace(exporter, options=exporter.options.model_copy(update={"quantize": quantize}))
        if found:
            fastest = self._fastest(found)
            budget, choice, how = fastest.budget, fastest.choice, self._options.compensation
            cascade, way = fastest.cascade, fastest.way
        else:
            self._progress.stage("nothing is cut: the fastest dense form that keeps the promise is the answer")
            budget, how, cascade, way = Budget(keep=self._promise), None, None, order[0]
            choice = self._chooser.nothing(self._promise, confidence=self._confidence)
        return Answer(
            choice=choice,
            cascade=cascade,
            sizes=() if cascade is None else sizes[cascade],
            served=self._served(way),
            options=self._options.model_copy(update={"budget": budget, "compensation": how}),
            exporter=exporter,
            promise=share,
            dense=replace(self._dense, ways=tried),
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
        return _Found(way, Budget(keep=self._promise), choice, self._chooser.flops_left(choice.plan.kept))

    def judge(self, trial: Trial, way: DeployWay) -> Found:
        """Return what a cut keeps in one way; what is new is told of.

        Raises _TooSlow if the cut breaks the promise, and a smaller one would take longer than one that was found.
        """
        served, kept = not trial.guess, tuple(kept.units for kept in trial.selection.values())
        key = kept, trial.runtime, way.bits if served else None, trial.token_weights
        if new := key not in self._judged:
            self._judged[key] = trial.judge()
        found = self._judged[key]
        left = self._chooser.flops_left(trial.selection)
        takes, met = (way.dense_ratio or 1.0) * left, trial.promise.budget.met(found)
        if served and met:
            self._best = min(self._best, takes)
        if new:  # and not for the way before this one
            best = "" if self._best == math.inf else f"; best so far: about {self._best:.2f} of the time"
            shown = f"{100 * found.value:.2f} % {stays_words(trial.promise)}, at least {100 * found.decides:.2f} %"
            self._progress.stage(f"{left:.2f} of the FLOPs on {trial.runtime}: {shown}{best}")
        if served and not met and takes > UNSURE * self._best:
            raise _TooSlow(f"with {left:.2f} of the FLOPs it breaks the promise, and with more it takes too long")
        return found

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
        forms = self._dense.forms
        exported = forms.exporter.options.unquantized in forms.exports_of("dense")
        if not exported or self.late:
            return {}
        able = [
            way
            for way in self._dense.ways
            if way.runtime in CASCADED and way.problem is None and way.bits not in RUNTIMES[way.runtime].calibrated
        ]
        ways = sorted(able, key=lambda way: way.dense_ratio or 0.0)[:SEARCHED]
        rows, answers = prepared.rows.promised, answers_of(prepared)
        cuts = cut_sizes(forms, FLOPS_TO_TRY, _cuts(prepared, self._chooser, found[0].choice if found else None))
        for way in ways:
            asked = CascadeOptions(
                disagreement=1 - share,
                confidence=(1 + self._confidence) / 2,  # its interval is one-sided
                quantize="int8" if way.bits == "int8" else None,
                runtime=way.runtime.removesuffix("-int8"),
                dtype=None if way.bits == "int8" else way.bits,
            )
            try:
                joined = join_sizes(forms, cuts, asked, batches=rows, answers=answers)
            except HiesError as error:
                logger.warning("no cascade is deployed on %s in %s: %s", way.runtime, way.bits, error)
                continue
            tried[asked] = tuple(one.tried for one in joined)
            for one in joined:
                if one.cut is not None and one.form is not None:
                    left = one.tried.flops
                    found.append(_Found(way, Budget(flops=left), one.cut, left, asked, one.form))
        return tried

    def _fastest(self, found: Sequence[_Found]) -> _Found:
        """Time the cuts, each in its own way, and return the fastest."""
        if len(found) == 1:
            return found[0]
        self._progress.stage("time the cuts that were found")
        forms, running = self._dense.forms, []
        for number, one in enumerate(found):
            if one.form is None:
                slim = cut_beside(self._prepared.model, one.choice.plan.kept, self._prepared.modules, one.choice.refit)
                forms.add(name := f"found-{number}", slim)
                running.append(forms.form(name, one.way.runtime, one.way.bits))
            else:
                running.append(one.form)
        cascades = any(one.cascade for one in found)
        times = _quick_times(self._resolved, self._progress, running, cascades=cascades)
        return min(zip(ratios(times), found, strict=True), key=lambda pair: pair[0])[1]


class _Follow(Watch):
    """Follows the search for the largest cut in one way."""

    def __init__(self, search: Search, way: DeployWay):
        self._search, self._way = search, way

    def judge(self, trial: Trial) -> Found:
        """Return what a cut keeps; see `Search.judge`."""
        return self._search.judge(trial, self._way)

    def stops(self) -> bool:
        """Tell whether the time is over."""
        return self._search.late


def choose_size(
    prepared: Prepared,
    options: PruneSection,
    asked: CascadeOptions,
    shares: Sequence[float],
    dtype: torch.dtype | None,
    progress: Progress,
) -> Decided:
    """Choose which of some shares of the FLOPs to leave: the one whose cascade answers the held-out rows fastest.

    Statistics are computed once. Raises PlanError if no share has a cascade that keeps the promise.
    """
    processes.refuse_several("a cascade that chooses its size")
    cut = _cuts(prepared, Chooser(prepared, options, progress, dtype))
    exporter = replace(prepared.exporter, options=prepared.exporter.options.unquantized)
    with tempfile.TemporaryDirectory(prefix="hies-sizes-") as temporary:
        forms = Forms({"dense": prepared.model}, exporter, Path(temporary), progress)
        dense = forms.form("dense", asked.runtime)
        cuts = cut_sizes(forms, shares, cut)
        rows = prepared.rows.promised
        joined = join_sizes(forms, cuts, asked, batches=rows, answers=answers_of(prepared))
        running = [one.form for one in joined if one.form is not None]
        if not running:
            tried = [one.tried for one in joined]
            problems = "; ".join(f"with {size.flops:.2f} of the FLOPs, {size.problem}" for size in tried)
            raise PlanError(f"no cascade keeps the promise: {problems}")
        progress.stage("time the cascades on the held-out rows")
        in_batches = rows_by_shape({BATCH: in_mixed_order(rows, BATCH)})
        timed = time_forms([dense, *running], in_batches, progress=progress)
    times = iter(ratios(timed)[1:])
    sizes = [one.tried if one.form is None else replace(one.tried, time=next(times)) for one in joined]
    _, best = min((size.time, number) for number, size in enumerate(sizes) if size.time is not None)
    return Decided(choice=joined[best].cut, cascade=asked, sizes=tuple(sizes))


def _in_onnx_int8(way: DeployWay) -> bool:
    """Return whether a way runs an ONNX file in 8 bits."""
    return way.bits == "int8" and way.bits not in RUNTIMES[way.runtime].calibrated


def answers_of(prepared: Prepared) -> torch.Tensor:
    """Return the dense model's logits on the rows that a promise is made on, (rows, classes)."""
    return predict(prepared.model, prepared.rows.promised).values


def _cuts(
    prepared: Prepared, chooser: Chooser, like: Choice | None = None
) -> Callable[[float], tuple[Choice, PreTrainedModel, float]]:
    """Return what cuts the dense model to a share of its FLOPs; `like` is as for `Chooser.at`."""

    def cut(share: float) -> tuple[Choice, PreTrainedModel, float]:
        choice = chooser.at(share, like)
        kept = choice.plan.kept
        return choice, cut_beside(prepared.model, kept, prepared.modules, choice.refit), chooser.flops_left(kept)

    return cut
