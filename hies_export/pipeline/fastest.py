"""Find the cut, or the compound of it and the dense model, that keeps a promise in the least time."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from .. import processes
from ..calibrate.statistics import Statistics
from ..data.batches import samples_of
from ..errors import HiesError, PlanError
from ..evaluate.interval import Looks
from ..evaluate.judge import Judge
from ..evaluate.promise import asked_words
from ..forms.deployment import DeployWay, Joined, SizeTried, Way, find_ways, join_sizes, try_dense
from ..forms.form import COMPOUNDS, Compound, Form, Forms
from ..forms.runtimes.base import RUNTIMES
from ..forms.time import Timed, in_mixed_order, ratios, rows_by_shape
from ..forms.time import time as time_forms
from ..progress import OutOfTime, Until
from ..recipe.budget import Budget, Found, Outcome, TimedSection
from ..score.criteria import Scores
from ..select.constraints import bundle_count
from ..select.cost import Goal
from ..slim.bundles import cut_bundles
from .choose import choose, choose_within, sizes_of
from .delivery import Delivery, on_rows
from .draw import all_looks
from .pruning import Pruning, check_pruning
from .recipe import FLOPS_TO_TRY
from .search import TriedCut, guess, largest, nothing, promise_of, search_near
from .stages import Choice, judging, score, select, trial_model
from .trials import Key

logger = logging.getLogger(__name__)

# A cut whose time is predicted from its FLOPs may turn out to be faster than another by this factor.
UNSURE = 1.1
# Rows that are timed one at a time where cuts, or forms of the dense model, are compared.
QUICK_ROWS = 128
# How often each is loaded for that. Loading and warming up take longer than the timed runs.
QUICK_LOADS = 2
# Rows in a batch where the times of compounds of several sizes are compared.
BATCH = 8


def looks_of(pruning: Pruning, delivery: Delivery) -> Looks:
    """Return what a deployment looks at, by the number of held-out rows."""
    share, rows = pruning.budget.share, pruning.rows.held_out
    assert share is not None
    metric = pruning.promised_metric
    classifies = pruning.task.classifies and pruning.task.predicts == "classes" and pruning.trimming is None
    able = all_looks(type(pruning.task), delivery.deploy, classifies=classifies and metric is None)
    return next((one for one in able if samples_of(rows) >= one.rows(share, metric)), able[-1])


def quick_times(pruning: Pruning, delivery: Delivery, forms: Sequence[Form], *, compounds: bool = False) -> list[Timed]:
    """Time forms beside each other as a deployment is timed, at the first of its shapes and without many repeats."""
    shape, batch = next(iter(pruning.shapes.items()))
    if on_rows(pruning):
        assert delivery.in_order is not None
        rows = delivery.in_order(1)[:QUICK_ROWS]
    elif compounds:  # what they take depends on the rows
        rows = in_mixed_order(pruning.rows.promise, shape[0])
    else:
        return time_forms(forms, {shape: [batch]}, loads=QUICK_LOADS, progress=pruning.progress)
    return time_forms(forms, rows_by_shape({shape[0]: rows}), loads=QUICK_LOADS, progress=pruning.progress)


@dataclass(frozen=True)
class Decision:
    """What stays, and the form that it is deployed in.

    Attributes:
        choice: What stays.
        compound, sizes: How it is joined with the dense model, and the sizes of compounds that were tried.
        ways: The forms that `deploy` tried, and the results.
        dense_seconds: How long it took to try the dense model in them; the slim one takes about as long.
    """

    choice: Choice
    compound: Compound | None = None
    sizes: tuple[SizeTried, ...] = ()
    ways: tuple[DeployWay, ...] = ()
    dense_seconds: float = 0.0


@dataclass(frozen=True)
class _Found:
    """A cut whose model, or whose compound, keeps the promise in one way, and the time that it takes by its FLOPs."""

    way: DeployWay
    decision: Decision
    takes: float = math.inf  # relative to the first form; unknown for a compound
    form: Form | None = None


def find_fastest(pruning: Pruning, delivery: Delivery, statistics: Statistics, forms: Forms) -> Decision:
    """Return the cut that keeps the promise in the least time; nothing is cut where a dense form is the answer.

    The dense model is judged and timed in all forms. The largest cut is searched for in the fastest of those that keep
    the promise; of a classifier, compounds of deeper cuts are tried too. When the time of `deploy` is over, the search
    ends with what it has found. Raises PlanError if the dense model keeps the promise in no form.
    """
    assert delivery.deploy is not None
    looks, share, began = looks_of(pruning, delivery), delivery.deploy.keep, time.monotonic()
    promise = promise_of(pruning, looks.confidence)
    pruning.progress.stage("evaluate the dense model on the held-out rows")
    judge = pruning.judge(pruning.rows.held_out, **judging(promise), progress=pruning.progress)
    ways = _in_time(delivery, find_ways(type(pruning.task), delivery.deploy.runtimes))
    tried = try_dense(forms, judge, ways, partial(quick_times, pruning, delivery))
    able = [way for way in tried if way.at_least is not None]
    order = sorted((w for w in able if (w.at_least or 0.0) >= share), key=lambda way: way.dense_ratio or 0.0)
    if not order:
        best = max(able, key=lambda way: way.at_least or 0.0)
        whole, more = "the dense model itself", "more held-out rows"
        if pruning.trimming is not None:
            whole, more = "the model without the tokens that go", "vocabulary.files more texts like the held-out rows"
        raise PlanError(
            f"keep asks for {asked_words(promise)}, and {whole} keeps at least {100 * (best.at_least or 0.0):.2f} % in "
            f"its best form ({best.runtime}, {best.bits}); ask for less, or give {more}"
        )
    # Exporting, judging and timing the answer takes about as long as trying the dense model did, which is left for it.
    spent = time.monotonic() - began
    hurried = replace(pruning, progress=Until(pruning.progress, delivery.deadline - spent))
    scored: list[Scores] = []
    found: list[_Found] = []
    try:
        _trace_a_cut(hurried, forms)
        scored += score(hurried, statistics)
        for one in _search_ways(hurried, statistics, scored, promise, judge, order[: looks.forms], tried):
            found += _as_files(pruning, statistics, forms, judge, promise, one)
        if looks.compounds:
            like = found[0].decision.choice if found else None
            for kind in COMPOUNDS.values():
                found += _joined(hurried, delivery, statistics, scored, forms, kind, tried, like)
        if len(found) > 1:
            hurried.progress.stage("time the cuts that were found")
            running = [one.form for one in found if one.form is not None]
            times = ratios(
                quick_times(hurried, delivery, running, compounds=any(one.decision.compound for one in found))
            )
            found = [min(zip(times, found, strict=True), key=lambda pair: pair[0])[1]]
    except OutOfTime as error:
        pruning.progress.stage(str(error))
        for way in order[: looks.forms]:
            if way in tried:  # and so was not searched
                tried[tried.index(way)] = replace(way, search=str(error))
    if found:
        decision = min(found, key=lambda one: one.takes).decision
    else:
        pruning.progress.stage("nothing is cut: the fastest dense form that keeps the promise is the answer")
        scores = scored[0] if scored else Scores(pruning.options.criterion, {}, {})  # there was no time to rank units
        assert order[0].kept is not None
        outcome = replace(promise, found=Found(order[0].kept, order[0].at_least))
        decision = Decision(replace(nothing(pruning, statistics, scores, outcome), served=_served(pruning, order[0])))
    return replace(decision, ways=tuple(tried), dense_seconds=spent)


def _trace_a_cut(pruning: Pruning, forms: Forms) -> None:
    """Export a cut that takes a bundle from every module, so that no further cut has to be traced; see `Traces`."""
    pruning.progress.stage("trace a cut")
    unit = pruning.options.unit
    lost = {module.name: 1 for module in pruning.scored if bundle_count(module, unit) > 1}
    forms.add("one cut", cut_bundles(pruning.model, pruning.scored, lost, unit=unit))
    with contextlib.suppress(HiesError):  # then every cut is traced
        forms.plain("one cut")


def _in_time(delivery: Delivery, ways: Sequence[Way]) -> Iterator[Way]:
    """Yield the first way, and further ones until a third of the time from now to the deadline is over."""
    began = time.monotonic()
    for number, way in enumerate(ways):
        if number and time.monotonic() > began + (delivery.deadline - began) / 3:
            return
        yield way


def _search_ways(
    pruning: Pruning,
    statistics: Statistics,
    scored: Sequence[Scores],
    promise: Outcome,
    judge: Judge,
    ways: Sequence[DeployWay],
    tried: list[DeployWay],
) -> Iterator[_Found]:
    """Yield the largest cut that keeps the promise in each way that has one; note in `tried` what was judged."""
    sizes, best, guessed = sizes_of(pruning, None), math.inf, None
    known: dict[str, dict[Key, TriedCut]] = {}
    for way in ways:
        pruning.progress.stage(f"search for the largest cut that keeps the promise on {way.runtime} in {way.bits}")
        try:
            guessed = guessed or guess(pruning, statistics, promise, scored, sizes)
            choice = search_near(
                pruning,
                statistics,
                promise,
                guessed,
                sizes,
                served=_served(pruning, way),
                judge=judge,
                at_least=_not_worth(pruning, way, guessed.scores, sizes, best),
                known=known.setdefault(way.bits, {}),
            )
        except HiesError as error:
            logger.warning("no cut is deployed on %s in %s: %s", way.runtime, way.bits, error)
            tried[tried.index(way)] = replace(way, search=str(error))
            continue
        assert choice.outcome is not None
        left = pruning.flops_left(choice.plan.kept)
        best = min(best, (way.dense_ratio or 1.0) * left)
        tried[tried.index(way)] = replace(way, judged=choice.outcome.judged, flops=left)
        yield _Found(way, Decision(choice), (way.dense_ratio or 1.0) * left)


def _not_worth(pruning: Pruning, way: DeployWay, scores: Scores, sizes: Sequence[Goal], best: float) -> int:
    """Return the largest size whose cut, predicted by FLOPs, is clearly slower than the best one found; 0 if none."""

    def too_slow(size: int) -> bool:
        left = pruning.flops_left(select(pruning, scores, sizes[size - 1]))
        return (way.dense_ratio or 1.0) * left > UNSURE * best

    return largest(len(sizes), too_slow) if best < math.inf else 0


def _served(pruning: Pruning, way: DeployWay) -> TimedSection:
    batch, sequence = next(iter(pruning.shapes))
    return TimedSection.model_validate(
        {"runtime": way.runtime, "batch": batch, "sequence": sequence, "dtype": way.bits}
    )


def _as_files(
    pruning: Pruning, statistics: Statistics, forms: Forms, judge: Judge, promise: Outcome, found: _Found
) -> list[_Found]:
    """Export a cut, judge the file, and return the cut with it in a list, which is empty if it breaks the promise.

    It is judged again because it may have been judged on another runtime in the same bits.
    """
    choice, way = found.decision.choice, found.way
    forms.add(name := f"{way.runtime}-{way.bits}-cut", trial_model(pruning, statistics, choice.trial))
    form = forms.form(name, way.runtime, way.bits)
    if promise.budget.met(judge.found(promise.budget, form.predict(judge.batches, judge.task, pruning.progress))):
        return [replace(found, form=form)]
    logger.warning("no cut is deployed on %s in %s: its file breaks the promise", way.runtime, way.bits)
    return []


def _joined(
    pruning: Pruning,
    delivery: Delivery,
    statistics: Statistics,
    scored: Sequence[Scores],
    forms: Forms,
    kind: type[Compound],
    tried: Sequence[DeployWay],
    like: Choice | None,
) -> list[_Found]:
    """Return compounds of a classifier that keep the promise, in the form in which the dense model is fastest.

    The dense model in 8 bits need not keep the promise by itself: the dense part is in float32.
    """
    assert delivery.deploy is not None
    if forms.exporter.options.unquantized not in forms.exports_of("dense"):
        return []
    able = [
        way
        for way in tried
        if way.runtime in kind.runtimes and way.problem is None and way.bits not in RUNTIMES[way.runtime].calibrated
    ]
    if not able:
        return []
    way = min(able, key=lambda way: way.dense_ratio or 0.0)
    asked = kind(
        disagreement=1 - delivery.deploy.keep,
        confidence=(1 + looks_of(pruning, delivery).confidence) / 2,  # its interval is one-sided
        shares=FLOPS_TO_TRY,
        runtime=RUNTIMES[way.runtime].full or way.runtime,
        bits=way.bits,
    )
    try:
        joined = _in_sizes(pruning, asked, statistics, scored, forms, like)
    except HiesError as error:
        logger.warning("no %s is deployed on %s in %s: %s", asked.name, way.runtime, way.bits, error)
        return []
    sizes = tuple(one.tried for one in joined)
    return [
        _Found(way, Decision(replace(one.cut, served=_served(pruning, way)), asked, sizes), form=one.form)
        for one in joined
        if one.cut is not None and one.form is not None
    ]


def find_compound(pruning: Pruning, asked: Compound, statistics: Statistics, forms: Forms) -> Decision:
    """Return the cut to one of some shares of the FLOPs whose compound answers the held-out rows fastest.

    Raises PlanError if no share has a compound that keeps the promise.
    """
    processes.refuse_several(f"a {asked.name} that chooses its size")
    scored = score(pruning, statistics)
    dense = forms.form("dense", asked.runtime)
    joined = _in_sizes(pruning, asked, statistics, scored, forms, None)
    running = [one.form for one in joined if one.form is not None]
    if not running:
        tried = [one.tried for one in joined]
        problems = "; ".join(f"with {size.flops:.2f} of the FLOPs, {size.problem}" for size in tried)
        raise PlanError(f"no {asked.name} keeps the promise: {problems}")
    pruning.progress.stage(f"time every {asked.name} on the held-out rows")
    in_batches = rows_by_shape({BATCH: in_mixed_order(pruning.rows.promise, BATCH)})
    timed = time_forms([dense, *running], in_batches, progress=pruning.progress)
    times = iter(ratios(timed)[1:])
    sizes = [one.tried if one.form is None else replace(one.tried, time=next(times)) for one in joined]
    _, best = min((size.time, number) for number, size in enumerate(sizes) if size.time is not None)
    choice = joined[best].cut
    assert choice is not None
    return Decision(choice, asked, tuple(sizes))


def answers_of(pruning: Pruning) -> torch.Tensor:
    """Return the dense model's logits on the rows that a promise is made on, (rows, classes)."""
    return pruning.dense_predictions(pruning.rows.promise).values


def _in_sizes(
    pruning: Pruning,
    asked: Compound,
    statistics: Statistics,
    scored: Sequence[Scores],
    forms: Forms,
    like: Choice | None,
) -> list[Joined[Choice]]:
    """Join cuts to several shares of the FLOPs, by the scores of another choice if there is one; see `join_sizes`."""

    def cut(share: float) -> tuple[Choice, PreTrainedModel, float]:
        if like is None:
            options = pruning.options.model_copy(update={"budget": Budget(flops=share)})
            within = replace(pruning, options=options)
            check_pruning(within)
            choice = choose(within, statistics, scored)
        else:
            choice = choose_within(pruning, statistics, share, like)
        model = trial_model(pruning, statistics, choice.trial)
        return choice, model, pruning.flops_left(choice.plan.kept)

    return join_sizes(forms, asked, cut, batches=pruning.rows.promise, answers=answers_of(pruning))
