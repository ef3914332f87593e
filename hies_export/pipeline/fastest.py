"""Find the cut, or the cascade of it and the dense model, that keeps a promise in the least time.

A way is a runtime and the bits that it computes in; a form is a model in one way. `DeployWay` records a tried way.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..calibrate.statistics import Statistics
from ..data.batches import Batch, samples_of
from ..errors import HiesError, PlanError
from ..evaluate.interval import Looks
from ..evaluate.judge import Judge
from ..evaluate.promise import asked_words
from ..forms.cascade.export import CascadeForm
from ..forms.deployment import DeployWay, SizeTried, find_ways, try_dense
from ..forms.form import Form, Forms
from ..forms.runtimes.base import RUNTIMES
from ..forms.time import TimedRow, in_mixed_order, ratios, rows_by_shape
from ..forms.time import time as time_forms
from ..recipe.budget import Budget, Found, Outcome, TimedSection
from ..score.criteria import Scores
from ..select.constraints import bundle_count
from ..select.cost import Goal
from ..slim.bundles import cut_bundles
from ..units.counts import Shape
from .choose import choose, choose_within, sizes_of
from .delivery import Delivery, timed_on_rows
from .draw import FLOPS_TO_TRY, all_looks
from .pruning import Pruning, check_pruning
from .search import Cuts, Guess, TriedCut, choose_nothing, guess, largest, promise_of
from .stages import Choice, Key, judge_fields, score, select, trial_model

logger = logging.getLogger(__name__)

# A cut may be faster by this factor than its FLOPs predict.
UNSURE = 1.1
# Number of rows to time one at a time where cuts, or forms of the dense model, are compared, and how often each is
# loaded for that: loading and warming up take longer than the timed runs.
QUICK_ROWS, QUICK_LOADS = 128, 2


def looks_of(pruning: Pruning, delivery: Delivery) -> Looks:
    """Return the most looks that a deployment may take at the held-out rows, by their number; see `Looks`."""
    share, metric, count = pruning.budget.share, pruning.promised_metric, samples_of(pruning.rows.held_out)
    assert share is not None
    classifies = pruning.task.classifies and pruning.task.predicts == "classes" and pruning.trimming is None
    plans = all_looks(type(pruning.task), delivery.deploy, classifies=classifies and metric is None)
    return next((looks for looks in plans if count >= looks.rows(share, metric)), plans[-1])


def quick_times(
    pruning: Pruning, delivery: Delivery, forms: Sequence[Form], *, cascades: bool = False
) -> list[list[TimedRow]]:
    """Time forms, `cascades` among them or not, as a deployment is timed, at its first shape and with few loads."""
    shape, batch = next(iter(pruning.shapes.items()))
    batches: Mapping[Shape, Sequence[Batch]] = {shape: [batch]}
    if timed_on_rows(pruning):
        assert delivery.in_order is not None
        batches = rows_by_shape({shape[0]: delivery.in_order(1)[:QUICK_ROWS]})
    elif cascades:  # their times depend on the rows
        batches = rows_by_shape({shape[0]: in_mixed_order(pruning.rows.promise, shape[0])})
    return time_forms(forms, batches, loads=QUICK_LOADS, progress=pruning.progress)


@dataclass(frozen=True)
class Decision:
    """What stays, and the form that it is deployed in."""

    choice: Choice
    cascade: CascadeForm | None = None  # how it is joined with the dense model
    sizes: tuple[SizeTried, ...] = ()  # of cascades that were tried
    ways: tuple[DeployWay, ...] = ()  # that `deploy` tried, and the results


def find_fastest(pruning: Pruning, delivery: Delivery, statistics: Statistics, forms: Forms) -> Decision:
    """Return the cut that keeps the promise in the least time; one that removes nothing if a dense form is fastest.

    The dense model is judged and timed in all forms. The largest cut is searched for in the fastest of those that keep
    the promise; of a classifier, cascades of deeper cuts are tried too. Raises PlanError if no dense form keeps it.
    """
    assert delivery.deploy is not None
    looks = looks_of(pruning, delivery)
    promise = promise_of(pruning, looks.confidence)
    pruning.progress.stage("evaluate the dense model on the held-out rows")
    judge = pruning.judge(pruning.rows.held_out, **judge_fields(promise), progress=pruning.progress)
    ways = find_ways(type(pruning.task), delivery.deploy.runtimes)
    tried = try_dense(forms, judge, ways, partial(quick_times, pruning, delivery))
    kept_ways = _ways_that_keep(promise, delivery.deploy.keep, tried, trimmed=pruning.trimming is not None)
    scored = score(pruning, statistics)
    search = _Search(pruning, delivery, statistics, forms, promise, judge, scored, tried)
    decision = search.run(kept_ways[: looks.forms], cascades=looks.cascades > 0)
    if decision is None:
        pruning.progress.stage("nothing is cut: the fastest dense form that keeps the promise is the answer")
        fastest = kept_ways[0]
        assert fastest.kept is not None
        outcome = replace(promise, found=Found(fastest.kept, fastest.at_least))
        decision = Decision(choose_nothing(pruning, statistics, scored[0], outcome))
    return replace(decision, ways=tuple(tried))


def _ways_that_keep(promise: Outcome, share: float, tried: Sequence[DeployWay], *, trimmed: bool) -> list[DeployWay]:
    """Return the ways in which the dense model keeps a share, the fastest first; raise PlanError if there is none."""
    bounds = [(way.at_least, way) for way in tried if way.at_least is not None]
    keeping = [way for bound, way in bounds if bound >= share]
    if keeping:
        return sorted(keeping, key=lambda way: way.dense_ratio or 0.0)
    bound, best = max(bounds, key=lambda pair: pair[0])
    model, remedy = "the dense model itself", "more held-out rows"
    if trimmed:
        model, remedy = "the model without the tokens that go", "vocabulary.files more texts like the held-out rows"
    raise PlanError(
        f"keep asks for {asked_words(promise)}, and {model} keeps at least {100 * bound:.2f} % in its "
        f"best form ({best.runtime}, {best.bits}); ask for less, or give {remedy}"
    )


@dataclass(frozen=True)
class _Search:
    """A search for the fastest form: its inputs, and what it has found so far."""

    pruning: Pruning
    delivery: Delivery
    statistics: Statistics
    forms: Forms
    promise: Outcome  # on the held-out rows
    judge: Judge  # of the promise
    scored: Sequence[Scores]  # to cut by
    tried: list[DeployWay]  # of the dense model; each is replaced in place when cuts were searched for in it
    found: list[tuple[Decision, Form]] = field(default_factory=list)  # cuts and cascades that keep the promise

    def run(self, ways: Sequence[DeployWay], *, cascades: bool) -> Decision | None:
        """Search for cuts in some ways, and for cascades if asked; return the fastest, None if none is found."""
        self._trace_a_cut()
        self._search_in(ways)
        if cascades:
            self._add_cascades()
        decisions, forms = [decision for decision, _ in self.found], [form for _, form in self.found]
        if len(decisions) < 2:
            return decisions[0] if decisions else None
        self.pruning.progress.stage("time the cuts that were found")
        joined = any(decision.cascade for decision in decisions)
        times = ratios(quick_times(self.pruning, self.delivery, forms, cascades=joined))
        return decisions[times.index(min(times))]

    def _trace_a_cut(self) -> None:
        """Export a cut that takes a bundle from every module, so that no further cut has to be traced; see `Traces`."""
        pruning, unit = self.pruning, self.pruning.options.unit
        pruning.progress.stage("trace a cut")
        removed = {module.name: 1 for module in pruning.scored if bundle_count(module, unit) > 1}
        self.forms.add("one cut", cut_bundles(pruning.model, pruning.scored, removed, unit=unit))
        with contextlib.suppress(HiesError):  # then every cut is traced
            self.forms.plain("one cut")

    def _search_in(self, ways: Sequence[DeployWay]) -> None:
        """Search for the largest cut that keeps the promise in each way; note in `tried` what was judged."""
        pruning, statistics, promise = self.pruning, self.statistics, self.promise
        sizes = sizes_of(pruning, None)
        batch, sequence = next(iter(pruning.shapes))  # the only shape that `quick_times` times
        guessed: Guess | None = None  # made once, in torch, for all ways
        best_time = math.inf  # predicted by the FLOPs left, relative to the first form of the dense model
        # By bits, as runtimes that compute in the same ones predict the same.
        known = defaultdict[str, dict[Key, TriedCut]](dict)
        for way in ways:
            dense_time = way.dense_ratio or 1.0
            fields = {"runtime": way.runtime, "batch": batch, "sequence": sequence, "dtype": way.bits}
            served = TimedSection.model_validate(fields)
            pruning.progress.stage(f"search for the largest cut that keeps the promise on {way.runtime} in {way.bits}")
            try:
                if guessed is None:
                    guessed = guess(pruning, statistics, promise, self.scored, sizes)
                too_slow = _largest_too_slow(pruning, guessed.scores, sizes, UNSURE * best_time / dense_time)
                pruning.progress.stage(f"judge cuts near that size on held-out rows, on {way.runtime}")
                cuts = Cuts(pruning, statistics, promise, self.judge, sizes, served, known=known[way.bits])
                choice = cuts.near(guessed, too_slow)
            except HiesError as error:
                logger.warning("no cut is deployed on %s in %s: %s", way.runtime, way.bits, error)
                self.tried[self.tried.index(way)] = replace(way, search=str(error))
                continue
            assert choice.outcome is not None
            left = pruning.flops_left(choice.plan.kept)
            best_time = min(best_time, dense_time * left)
            self.tried[self.tried.index(way)] = replace(way, judged=choice.outcome.judged, flops=left)
            self._add_file(way, choice)

    def _add_file(self, way: DeployWay, choice: Choice) -> None:
        """Export a cut, and add it to `found` if the file keeps the promise."""
        pruning, judge, budget = self.pruning, self.judge, self.promise.budget
        name = f"{way.runtime}-{way.bits}-cut"
        self.forms.add(name, trial_model(pruning, self.statistics, choice.trial))
        form = self.forms.form(name, way.runtime, way.bits)
        # Judged again, because the search may have judged it on another runtime in the same bits.
        if budget.met(judge.found(budget, form.predict(judge.batches, judge.task, pruning.progress))):
            self.found.append((Decision(choice), form))
        else:
            logger.warning("no cut is deployed on %s in %s: its file breaks the promise", way.runtime, way.bits)

    def _add_cascades(self) -> None:
        """Add cascades of a classifier that keep the promise, in the form in which the dense model is fastest."""
        assert self.delivery.deploy is not None
        # The dense model in 8 bits need not keep the promise by itself: the dense part is in float32.
        usable = [
            way
            for way in self.tried
            if way.runtime in CascadeForm.runtimes
            and way.problem is None
            and way.bits not in RUNTIMES[way.runtime].calibrated
        ]
        if not usable or not self.forms.has_plain("dense"):  # the export that becomes the dense part
            return
        fastest = min(usable, key=lambda way: way.dense_ratio or 0.0)
        cascade = CascadeForm(
            disagreement=1 - self.delivery.deploy.keep,
            confidence=(1 + looks_of(self.pruning, self.delivery).confidence) / 2,  # its interval is one-sided
            bits=fastest.bits,
        )
        joined, sizes = self._join(cascade)
        self.found.extend((Decision(choice, cascade, sizes), form) for choice, form in joined)

    def _join(self, cascade: CascadeForm) -> tuple[list[tuple[Choice, Form]], tuple[SizeTried, ...]]:
        """Return (cut, form) of the cascades at `FLOPS_TO_TRY` that keep the promise, and the results of all."""
        pruning, forms, rows = self.pruning, self.forms, self.pruning.rows.promise
        dense, answers = forms.plain("dense"), pruning.dense_predictions(rows).values
        joined, sizes = [], []
        for share in FLOPS_TO_TRY:
            pruning.progress.stage(f"cut to {share:g} of the FLOPs for a {cascade.name}")
            left, name = share, f"{share:g}-for-{cascade.name}"
            try:
                choice = self._cut_to(share)
                left = pruning.flops_left(choice.plan.kept)
                forms.add(name, trial_model(pruning, self.statistics, choice.trial))
                slim, folder = forms.plain(name), forms.folder / f"{cascade.name}-{share:g}"
                pruning.progress.stage(f"join {left:.2f} of the FLOPs in a {cascade.name} on {cascade.runtime}")
                exported = cascade.join(slim, dense, folder, batches=rows, answers=answers)
            except HiesError as error:
                sizes.append(SizeTried(flops=left, problem=str(error)))
                continue
            promise = exported.facts["promise"]
            sizes.append(SizeTried(flops=left, passed_on=promise.passed_on, differ=promise.differ))
            joined.append((choice, cascade.form(exported)))
        return joined, tuple(sizes)

    def _cut_to(self, share: float) -> Choice:
        """Return a cut to a share of the FLOPs, by the scores of the first cut found so far; without one, as asked."""
        for decision, _ in self.found:
            if decision.cascade is None:  # it is a cut alone
                return choose_within(self.pruning, self.statistics, share, decision.choice)
        pruning = replace(self.pruning, options=self.pruning.options.model_copy(update={"budget": Budget(flops=share)}))
        check_pruning(pruning)
        return choose(pruning, self.statistics, self.scored)


def _largest_too_slow(pruning: Pruning, scores: Scores, sizes: Sequence[Goal], most: float) -> int:
    """Return the largest size whose cut leaves more than `most`, a share of the FLOPs; 0 if none does."""
    if most == math.inf:  # nothing was found yet that a cut could be slower than
        return 0
    return largest(len(sizes), lambda size: pruning.flops_left(select(pruning, scores, sizes[size - 1])) > most)
