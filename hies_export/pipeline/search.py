"""Search for the largest cut that keeps a promise on held-out rows.

A promise is a budget `keep`, such as a share of the predictions. Size n is the n-th of goals that remove more and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..calibrate.statistics import Statistics
from ..data.batches import Batch, samples_of, size_of
from ..errors import PlanError
from ..evaluate.interval import FAILURES, confidence_of_each
from ..evaluate.judge import Judge
from ..evaluate.metrics import METRICS
from ..evaluate.predict import predict
from ..evaluate.promise import asked_words, found_words, stays_words
from ..recipe.budget import Budget, Found, Outcome, TimedSection
from ..score.criteria import Scores
from ..select.cost import CostTable, Goal
from ..tasks.given import first_rows
from .pruning import SEARCHED, Pruning
from .stages import Choice, Key, Trial, choice_of, judge_fields, predict_trial, select, token_weights_to_try

# A guess assumes that a cut loses at least this many times as much of nDCG@10 against the dense model's ranking as
# against the relevant documents: 3.5 to 9 times for MiniLM on BoolQ (bench/results/embedding-quality.txt), and a fifth
# more among `GUESS_ROWS` texts than among 2,000 (dev/LOG.md).
OWN_LOSS = 3
# Largest number of rows that a size is guessed on: the guess only says where the search on the held-out rows begins.
GUESS_ROWS = 512
# Precision of a guess, as a share of the number of sizes: the search begins a tenth below it anyway.
GUESS_WITHIN = 0.04


def search(
    pruning: Pruning, statistics: Statistics, scored: Sequence[Scores], sizes: Sequence[Goal], table: CostTable | None
) -> Choice:
    """Return the largest cut that keeps the promise of a budget `keep`; raise PlanError if none does.

    `sizes` remove more and more. The outcome has the cost that `table` predicts, if there is one.
    """
    promise, served = promise_of(pruning), pruning.budget.timed
    guessed = guess(pruning, statistics, promise, scored, sizes)
    where = "" if served is None else f", on {served.runtime}"
    pruning.progress.stage(f"judge cuts near that size on held-out rows{where}")
    judge = pruning.judge(pruning.rows.held_out, **judge_fields(promise))
    choice = Cuts(pruning, statistics, promise, judge, sizes, served).near(guessed)
    if table is None:
        return choice
    assert choice.outcome is not None
    predicted = table.left(choice.plan.kept, pruning.scored, unit=pruning.options.unit)
    return replace(choice, outcome=replace(choice.outcome, predicted=predicted))


@dataclass(frozen=True)
class Guess:
    """What a search on the held-out rows begins with: scores, weights of tokens and a size."""

    scores: Scores
    token_weights: float
    size: int
    report_rows: tuple[dict[str, Any], ...] = ()  # of the cuts that the guess is based on, see `Cuts.report_rows`


def guess(
    pruning: Pruning, statistics: Statistics, promise: Outcome, scored: Sequence[Scores], sizes: Sequence[Goal]
) -> Guess:
    """Choose the scores and the weights of tokens, and guess the size, in torch on rows that are not held out.

    Without such rows, or if no cut keeps the promise on them, the guess is the smallest size by the first scores.
    """
    weights, rows = token_weights_to_try(pruning), _rows_to_guess_on(pruning, promise)
    smallest = Guess(scored[0], weights[0], 1)
    if rows is None:
        return smallest
    pruning.progress.stage("guess how much to remove, on rows that are not held out")
    kind, keep, fields = pruning.rows_kind(rows), promise.budget.keep, judge_fields(promise)
    assert keep is not None
    if kind in ("texts", "groups"):  # no label says which document is relevant, so the dense model's ranking stands in
        fields["metrics"] = ("own_ndcg@10",)
        if keep.metric != "own_ndcg@10" and keep.predictions is not None:
            asked = keep.model_copy(update={"predictions": 1 - OWN_LOSS * (1 - keep.predictions)})
            promise = replace(promise, budget=Budget(keep=asked))
    if kind in (None, "texts"):
        rows = first_rows(rows, GUESS_ROWS)
    judge = pruning.judge(rows, **fields)
    cuts = Cuts(pruning, statistics, promise, judge, sizes, guess=True)
    best = cuts.largest(pruning.progress.track(scored, "guess how much to remove"), weights)
    if best is None:
        return replace(smallest, report_rows=cuts.report_rows)
    return Guess(best.trial.scores, best.trial.token_weights, best.size, cuts.report_rows)


def choose_nothing(pruning: Pruning, statistics: Statistics, scores: Scores, promise: Outcome | None = None) -> Choice:
    """Return the choice to remove nothing."""
    whole = {module.name: module.kept(range(module.units)) for module in pruning.modules}
    return choice_of(pruning, statistics, Trial(scores, whole), outcome=promise)


def promise_of(pruning: Pruning, confidence: float | None = None) -> Outcome:
    """Return what is promised on the held-out rows, with the metric and the index that the budget leaves open.

    `confidence` is that of each interval; by default, it is corrected for a search in which `FAILURES` cuts may fail.
    """
    rows, keep = pruning.rows.held_out, pruning.budget.keep
    assert keep is not None
    index = keep.index or ("dense" if pruning.rows_kind(rows) in SEARCHED else None)
    return Outcome(
        Budget(keep=keep.model_copy(update={"metric": pruning.promised_metric, "index": index})),
        samples=samples_of(rows),
        confidence=confidence_of_each(FAILURES) if confidence is None else confidence,
        # What a language model predicts may be answers or choices.
        word="prediction" if pruning.task.generative else pruning.task.word,
    )


def budget_as_timed(pruning: Pruning, budget: Budget, served: TimedSection | None = None) -> Budget:
    """Return a budget with the runtime, shape and dtype of `served`, or of what it times itself, if anything."""
    timed = served or budget.timed
    if timed is None:
        return budget
    batch, sequence = pruning.shape_of(timed)
    filled_in = {"runtime": timed.runtime, "batch": batch, "sequence": sequence, "dtype": timed.dtype}
    section = getattr(budget, budget.kind)  # `latency` or `keep`: both are a `TimedSection`
    return budget.model_copy(update={budget.kind: section.model_copy(update=filled_in)})


def _rows_to_guess_on(pruning: Pruning, promise: Outcome) -> list[Batch] | None:
    """Return the rows to guess on: those refitted on or, for a metric that needs labels, those scored on.

    Rankings are compared with the dense model's, so they need no labels. None for a metric of choices, which these rows
    lack, and for groups of candidates that have fewer than two each on average.
    """
    rows, metric = pruning.rows, promise.budget.metric
    unlabelled = rows.refit or rows.score
    if pruning.rows_kind(rows.held_out) is None:
        if metric is None or METRICS[metric].own:  # compared with the dense model's own predictions
            return unlabelled
        return None if METRICS[metric].of == "choices" else rows.score
    kind, candidates = pruning.rows_kind(unlabelled), sum(map(size_of, unlabelled))
    return unlabelled if kind in ("texts", "queries") or candidates >= 2 * samples_of(unlabelled) else None


@dataclass(frozen=True)
class TriedCut:
    """A judged cut: its size, and what it keeps or loses."""

    trial: Trial
    size: int
    found: Found
    runtime: str | None  # what predicted; None where a report need not say it


@dataclass(frozen=True)
class Cuts:
    """The cuts of a search, each judged once."""

    pruning: Pruning
    statistics: Statistics
    promise: Outcome
    judge: Judge  # on the rows that decide
    sizes: Sequence[Goal]  # that remove more and more; size n is `sizes[n - 1]`
    served: TimedSection | None = None  # what serves the models, and predicts; None for torch
    guess: bool = False  # whether `judge` has other rows than the promise is made on
    known: dict[Key, TriedCut] = field(default_factory=dict)  # those that were judged; new ones are added in place

    def largest(self, scored: Iterable[Scores], weights: Sequence[float]) -> TriedCut | None:
        """Return the largest cut that keeps the promise, by bisection; None if none does.

        All scores are tried with the first weights of tokens, and then the best scores with the other weights. Each
        replaces the best so far only if it allows a larger cut. For most of them, one cut rules that out.
        """
        first, *others = weights
        best: TriedCut | None = None
        for scores in scored:
            best = self._larger(scores, first, best)
        for other in others:
            if best is not None:
                best = self._larger(best.trial.scores, other, best)
        return best

    def _larger(self, scores: Scores, weights: float, best: TriedCut | None) -> TriedCut | None:
        """Return the largest cut by other scores or weights that keeps the promise; `best` if it is not larger."""
        best_size = 0 if best is None else best.size
        within = max(1, round(GUESS_WITHIN * len(self.sizes))) if self.guess else 1
        size = largest(len(self.sizes), partial(self._holds, scores, weights), at_least=best_size, within=within)
        return best if size == best_size else self._judged(scores, weights, size)

    def near(self, guessed: Guess, at_least: int = 0) -> Choice:
        """Return the largest cut that keeps the promise and is larger than a size, searching near a guess.

        At most `FAILURES` cuts fail. Raises PlanError if there is no such cut.
        """
        pruning, scores, weights = self.pruning, guessed.scores, guessed.token_weights
        holds = partial(self._holds, scores, weights)
        size = largest(len(self.sizes), holds, near=guessed.size, at_least=at_least, failures=FAILURES)
        if size == at_least:
            none_faster = "no cut that keeps the promise here is faster than what was found in another form"
            raise PlanError(none_faster if at_least else self._none_keeps())
        cut = self._judged(scores, weights, size)
        budget = budget_as_timed(pruning, self.promise.budget, self.served)
        judged = (*guessed.report_rows, *self.report_rows)
        outcome = replace(self.promise, budget=budget, found=cut.found, judged=judged)
        return choice_of(pruning, self.statistics, cut.trial, outcome=outcome)

    def _none_keeps(self) -> str:
        """Return the message of the error that no cut keeps the promise."""
        promise, mildest = self.promise, min(self.known.values(), key=lambda cut: cut.size)
        return (
            f"keep asks for {asked_words(promise)} on {promise.samples:,} held-out rows, and the mildest cut has "
            f"{found_words(replace(promise, found=mildest.found))}; ask for less, compensate, or give more held-out "
            "rows, which narrow the interval"
        )

    def _holds(self, scores: Scores, weights: float, size: int) -> bool:
        """Return whether the cut of a size keeps the promise."""
        return self.promise.budget.met(self._judged(scores, weights, size).found)

    def _judged(self, scores: Scores, weights: float, size: int) -> TriedCut:
        """Return the judged cut of a size; sizes that keep the same units are judged once."""
        trial = Trial(scores, select(self.pruning, scores, self.sizes[size - 1]), weights)
        if (key := trial.key) not in self.known:
            predict_served = predict if self.served is None else self.pruning.serve(self.served)
            predictions = predict_trial(self.pruning, self.statistics, trial, self.judge.batches, by=predict_served)
            found = self.judge.found(self.promise.budget, predictions)
            self.known[key] = TriedCut(trial, size, found, self._runtime)
            self._show(trial, found)
        return replace(self.known[key], trial=trial, size=size)

    def _show(self, trial: Trial, found: Found) -> None:
        """Show as progress how a cut was judged."""
        alpha, weights = trial.scores.parameters.get("alpha"), trial.token_weights
        name = trial.scores.criterion + ("" if alpha is None else f" at alpha {alpha:g}")
        name += "" if weights == 1 else f", tokens weighted {weights:g}"
        where = "torch" if self.served is None else self.served.runtime
        if self.promise.budget.share is None:
            result = f"{found.value:.4g} worse"
        else:
            result = f"{100 * found.value:.2f} % {stays_words(self.promise)}"
            result += "" if found.bound is None else f", at least {100 * found.bound:.2f} %"
        flops = f"{self.pruning.flops_left(trial.selection):.2f} of the FLOPs"
        self.pruning.progress.stage(f"{name}, {flops} in {where}: {result}")

    @property
    def _runtime(self) -> str | None:
        """The runtime that a report names beside each cut; None where it need not say it."""
        if self.guess:
            return "torch" if self.pruning.fast or self.pruning.budget.timed else None
        return None if self.served is None else self.served.runtime

    @property
    def report_rows(self) -> tuple[dict[str, Any], ...]:
        """What a report says of every judged cut, in order: how it was made and judged, and what it keeps or loses."""
        value, bound = ("lost", "at_most") if self.promise.budget.share is None else ("kept", "at_least")
        rows = []
        for cut in self.known.values():
            row: dict[str, Any] = {
                "criterion": cut.trial.scores.criterion,
                "alpha": cut.trial.scores.parameters.get("alpha"),
                "removed": sum(len(kept.removed) for kept in cut.trial.selection.values()),
                "runtime": cut.runtime,
                "guess": True if self.guess else None,
                value: cut.found.value,
                bound: cut.found.bound,
            }
            rows.append({name: entry for name, entry in row.items() if entry is not None or name == "alpha"})
        return tuple(rows)


def largest(
    count: int,
    holds: Callable[[int], bool],
    *,
    near: int | None = None,
    at_least: int = 0,
    failures: int | None = None,
    within: int = 1,
) -> int:
    """Return the largest size in 1..count that holds, `at_least` if no larger one does.

    Every size below one that holds is assumed to hold. Without a limit of failures, this is a bisection; above
    `at_least`, it first goes up in steps that double, because the next scores or weights are seldom much better. With a
    limit, it begins a tenth below `near`, because a size that fails costs more than one that holds. Then it goes up
    from the largest size that held, in the steps that take the fewest trials in the worst case: for 100 sizes and 3
    failures at most 14.

    `holds` is called at most once for each size. `at_least` is taken to hold without a trial, and smaller sizes are not
    tried. `failures` is how many sizes may fail. The result may be too small by less than `within`.
    """
    low, high = at_least, count + 1  # the largest size that held, and the smallest that failed
    step = max(1, count // 16) if at_least else count  # the most that a bisection goes up; no limit after a failure
    size = low + 1 if at_least else high // 2
    if near is not None:
        size = max(low + 1, round(0.9 * near))
    while high - low > within:
        if holds(size):
            low = size
        else:
            high, step = size, count
            if failures is not None:
                failures -= 1
        if failures is None:
            size, step = min((low + high) // 2, low + step), 2 * step
        else:
            size = low + _step_up(high - low - 1, failures)
    return low


def _step_up(sizes: int, failures: int) -> int:
    """Return how many sizes to go up for the next trial if `sizes` are open and `failures` trials may fail.

    d trials, of which f may fail, tell C(d, 1) + ... + C(d, f) sizes apart. If the next trial fails, those below it
    are left to d - 1 trials and f - 1 failures. With one failure left, the step is therefore 1.

    Source: the egg-dropping problem; Boardman, Mathematics Magazine 77 (2004).
    """

    def told_apart(trials: int, failures: int) -> int:
        return sum(math.comb(trials, number) for number in range(1, failures + 1))

    trials = 1
    while told_apart(trials, failures) < sizes:
        trials += 1
    return 1 + told_apart(trials - 1, failures - 1)
