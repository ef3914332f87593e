"""Search for the largest cut that keeps a promise on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..calibrate.statistics import Statistics
from ..data.batches import Batch, samples_of, size_of
from ..errors import PlanError, RequestError
from ..evaluate.interval import FAILURES, confidence_of_each
from ..evaluate.judge import Judge
from ..evaluate.metrics import METRICS
from ..evaluate.predict import Predictor, predict
from ..evaluate.promise import asked_words, found_words, stays_words
from ..evaluate.ranking import keeps_predictions
from ..progress import OutOfTime
from ..recipe.budget import Budget, Found, Outcome, TimedSection
from ..score.criteria import Scores
from ..select.cost import CostTable, Goal
from ..tasks.given import first_rows
from .pruning import Pruning
from .stages import (
    Choice,
    Trial,
    choice_of,
    judging,
    predict_trial,
    select,
    token_weights_of,
)
from .trials import Key, key_of

# A cut's loss of nDCG@10 against the dense model's ranking is at least this many times its loss of nDCG@10 against the
# relevant documents: 3.5 to 9 times for MiniLM on BoolQ (bench/results/embedding-quality.txt). Only the guess of a size
# assumes it.
OWN_LOSS = 3
# Rows that a size is guessed on, at most: the held-out rows decide, and the guess only says where they begin.
GUESS_ROWS = 512
# A guess is known to less than this share of all sizes, and no better: the search begins a tenth below it anyway.
GUESS_WITHIN = 0.04


def search(
    pruning: Pruning,
    statistics: Statistics,
    scored: Sequence[Scores],
    sizes: Sequence[Goal],
    table: CostTable | None = None,
) -> Choice:
    """Return the largest cut that keeps the promise of the budget, which is `keep`.

    Raises:
        PlanError: No cut keeps it.
    """
    promise = promise_of(pruning)
    guessed = guess(pruning, statistics, promise, scored, sizes)
    return search_near(pruning, statistics, promise, guessed, sizes, served=pruning.budget.timed, table=table)


@dataclass(frozen=True)
class Guess:
    """Scores and weights of tokens to cut by, a size to begin a search at, and rows of the cuts that were judged."""

    scores: Scores
    token_weights: float
    size: int
    rows: tuple[dict[str, Any], ...] = ()


def guess(
    pruning: Pruning,
    statistics: Statistics,
    promise: Outcome,
    scored: Sequence[Scores],
    sizes: Sequence[Goal],
) -> Guess:
    """Choose the scores and the weights of tokens, and guess the size, in torch on rows that nothing is promised on.

    Without such rows, the guess is the smallest size, by the first scores.
    """
    weights, rows = token_weights_of(pruning), _rows_to_guess_on(pruning, promise)
    smallest = Guess(scored[0], weights[0], 1)
    if rows is None:
        return smallest
    pruning.progress.stage("guess how much to remove, on rows that are not held out")
    by_own, keep = pruning.kind(rows) in ("texts", "groups"), promise.budget.keep
    if keeps_predictions(pruning.kind(rows)):
        rows = first_rows(rows, GUESS_ROWS)
    judge = pruning.judge(rows, **judging(promise) | ({"metrics": ("own_ndcg@10",)} if by_own else {}))
    if by_own and keep is not None and keep.metric != "own_ndcg@10" and keep.predictions is not None:
        asked = keep.model_copy(update={"predictions": 1 - OWN_LOSS * (1 - keep.predictions)})
        promise = replace(promise, budget=Budget(keep=asked))
    cuts = Cuts(pruning, statistics, promise, judge, sizes, guess=True)
    best = cuts.largest(pruning.progress.track(scored, "guess how much to remove"), weights)
    if best is None:
        return replace(smallest, rows=cuts.rows)
    return Guess(best.trial.scores, best.trial.token_weights, best.size, cuts.rows)


def search_near(
    pruning: Pruning,
    statistics: Statistics,
    promise: Outcome,
    guessed: Guess,
    sizes: Sequence[Goal],
    *,
    served: TimedSection | None = None,
    judge: Judge | None = None,
    table: CostTable | None = None,
    at_least: int = 0,
    known: dict[Key, TriedCut] | None = None,
) -> Choice:
    """Return the largest cut that keeps the promise, near a guess; held-out rows decide nothing but its size.

    Args:
        pruning, statistics, promise, guessed: What is cut, the promise on the held-out rows, and where to begin.
        sizes: What cuts of each size remove; each at least as much as the one before.
        served: What serves the models, and predicts; torch by default.
        judge: The judge on the held-out rows, if it is known.
        table: What a budget of time is predicted by.
        at_least: Only cuts of a larger size than this are looked for.
        known: Cuts that were judged in the same bits; those that are judged now are added.

    Raises:
        PlanError: No such cut keeps the promise.
    """
    where = "" if served is None else f", on {served.runtime}"
    pruning.progress.stage(f"judge cuts near that size on held-out rows{where}")
    judge = judge or pruning.judge(pruning.rows.held_out, **judging(promise))
    cuts = Cuts(pruning, statistics, promise, judge, sizes, served=served, known=known)
    found = cuts.near(guessed, at_least)
    if found is None:
        raise PlanError(
            "no cut that keeps the promise here is faster than what was found in another form"
            if at_least
            else cuts.problem
        )
    outcome = replace(
        promise,
        budget=budget_where(pruning, promise.budget, served),
        found=found.found,
        judged=(*guessed.rows, *cuts.rows),
        predicted=None
        if table is None
        else table.left(found.trial.selection, pruning.scored, unit=pruning.options.unit),
    )
    return choice_of(pruning, statistics, found.trial, outcome=outcome, served=served)


def nothing(pruning: Pruning, statistics: Statistics, scores: Scores, promise: Outcome | None = None) -> Choice:
    """Return the choice that removes nothing, because no cut keeps a promise, or none is asked for."""
    whole = {module.name: module.kept(range(module.units)) for module in pruning.modules}
    return choice_of(pruning, statistics, Trial(scores, whole), outcome=promise)


def promise_of(pruning: Pruning, confidence: float | None = None) -> Outcome:
    """Return what is promised on the held-out rows, with what the budget leaves open: of rankings, a metric's share.

    `confidence` is that of each interval; by default, one search of `FAILURES` failing cuts is all that looks at them.
    """
    rows, budget = pruning.rows.held_out, pruning.budget
    if budget.keep is None:
        return Outcome(budget, samples=samples_of(rows))
    searched, index = pruning.kind(rows) in ("queries", "texts"), budget.keep.index
    if index is not None and not searched:
        raise RequestError(
            "keep.index says which vectors of documents queries search, and only embeddings of queries and "
            "documents, or of texts alone, have these; leave it out"
        )
    left_open = {"metric": pruning.promised_metric, "index": index or ("dense" if searched else None)}
    return Outcome(
        Budget(keep=budget.keep.model_copy(update=left_open)),
        samples=samples_of(rows),
        confidence=confidence_of_each(FAILURES) if confidence is None else confidence,
        # What a language model predicts may be answers or choices.
        word="prediction" if pruning.task.generative else pruning.task.word,
    )


def budget_where(pruning: Pruning, budget: Budget, served: TimedSection | None = None) -> Budget:
    """Return a budget with where it is timed, by default as it says itself; the same if nothing is timed."""
    timed = served or budget.timed
    if timed is None:
        return budget
    batch, sequence = pruning.shape_of(timed)
    where = {"runtime": timed.runtime, "batch": batch, "sequence": sequence, "dtype": timed.dtype}
    return budget.model_copy(update={budget.kind: getattr(budget, budget.kind).model_copy(update=where)})


def _rows_to_guess_on(pruning: Pruning, promise: Outcome) -> list[Batch] | None:
    """Return rows that nothing is promised on: those refitted on or, for a metric, those scored on, with labels.

    Rankings are guessed from unlabelled texts, or candidates, which are ranked as the dense model does. None for a
    metric of choices, which none of these rows have, and for candidates of which too few are of one query.
    """
    rows, metric = pruning.rows, promise.budget.metric
    unlabelled = rows.refit or rows.score
    if keeps_predictions(pruning.kind(rows.held_out)):
        if metric is None or METRICS[metric].own:
            return unlabelled
        return None if METRICS[metric].of == "choices" else rows.score
    kind, count = pruning.kind(unlabelled), sum(map(size_of, unlabelled))
    return unlabelled if kind in ("texts", "queries") or count >= 2 * samples_of(unlabelled) else None


@dataclass(frozen=True)
class TriedCut:
    """A judged cut: its size, what it keeps or loses, and whether that meets the promise."""

    trial: Trial
    size: int
    found: Found
    met: bool
    runtime: str | None  # what predicted, where that matters


class Cuts:
    """The cuts of a search: judged on some rows, each once, as they are served.

    Args:
        pruning, statistics, promise: What is cut, and what it is held against.
        judge: The judge on the rows.
        sizes: What cuts of each size remove.
        served: What serves the models, and predicts; torch by default.
        guess: Whether the rows are others than the promise is made on.
        known: Cuts that were judged before, to which others are added.
    """

    def __init__(
        self,
        pruning: Pruning,
        statistics: Statistics,
        promise: Outcome,
        judge: Judge,
        sizes: Sequence[Goal],
        *,
        served: TimedSection | None = None,
        guess: bool = False,
        known: dict[Key, TriedCut] | None = None,
    ):
        self._pruning, self._statistics, self._promise = pruning, statistics, promise
        self._judge, self._sizes, self._served = judge, sizes, served
        self._guess = guess
        self._by: Predictor = predict if served is None else pruning.serve(served)
        self._known = {} if known is None else known

    def largest(self, scored: Iterable[Scores], weights: Sequence[float]) -> TriedCut | None:
        """Return the largest cut that keeps the promise, by bisection; None if none does.

        All scores are tried with the first weights of tokens, and the best scores then with the others. Each takes the
        place of the best so far only if it allows a larger cut. For most of them, one cut rules that out.
        """
        first, *others = weights
        best: TriedCut | None = None
        for scores in scored:
            best = self._larger(scores, first, best)
        for other in others:
            best = best and self._larger(best.trial.scores, other, best)
        return best

    def _larger(self, scores: Scores, weights: float, best: TriedCut | None) -> TriedCut | None:
        known = 0 if best is None else best.size
        within = max(1, round(GUESS_WITHIN * len(self._sizes))) if self._guess else 1
        size = largest(len(self._sizes), partial(self._holds, scores, weights), at_least=known, within=within)
        return best if size == known else self._judged(scores, weights, size)

    def near(self, guessed: Guess, at_least: int = 0) -> TriedCut | None:
        """Return the largest cut that keeps the promise, by few failing cuts around a guess; None if none does."""
        scores, weights = guessed.scores, guessed.token_weights
        holds = partial(self._holds, scores, weights)
        try:
            size = largest(len(self._sizes), holds, near=guessed.size, at_least=at_least, failures=FAILURES)
        except OutOfTime:
            size = max((cut.size for cut in self._known.values() if cut.met), default=at_least)
            if size <= at_least:
                raise
        return self._judged(scores, weights, size) if size > at_least else None

    def _trial(self, scores: Scores, weights: float, size: int) -> Trial:
        return Trial(scores, select(self._pruning, scores, self._sizes[size - 1]), weights)

    def _holds(self, scores: Scores, weights: float, size: int) -> bool:
        trial = self._trial(scores, weights, size)
        if (key := key_of(trial)) not in self._known:
            predicted = predict_trial(self._pruning, self._statistics, trial, self._judge.batches, by=self._by)
            found = self._judge.found(self._promise.budget, predicted)
            self._known[key] = TriedCut(trial, size, found, self._promise.budget.met(found), self._runtime)
            self._tell(trial, found)
        return self._known[key].met

    def _judged(self, scores: Scores, weights: float, size: int) -> TriedCut:
        """Return a cut that was judged, by its size; sizes that keep the same units share what was found."""
        trial = self._trial(scores, weights, size)
        return replace(self._known[key_of(trial)], trial=trial, size=size)

    def _tell(self, trial: Trial, found: Found) -> None:
        alpha, weights = trial.scores.parameters.get("alpha"), trial.token_weights
        name = trial.scores.criterion + ("" if alpha is None else f" at alpha {alpha:g}")
        name += "" if weights == 1 else f", tokens weighted {weights:g}"
        where = "torch" if self._served is None else self._served.runtime
        if self._promise.budget.share is None:
            shown = f"{found.value:.4g} worse"
        else:
            shown = f"{100 * found.value:.2f} % {stays_words(self._promise)}"
            shown += "" if found.bound is None else f", at least {100 * found.bound:.2f} %"
        left = self._pruning.flops_left(trial.selection)
        self._pruning.progress.stage(f"{name}, {left:.2f} of the FLOPs in {where}: {shown}")

    @property
    def _runtime(self) -> str | None:
        if self._guess:
            return "torch" if self._pruning.fast or self._pruning.budget.timed else None
        return None if self._served is None else self._served.runtime

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """What was judged, in order, for a report: criterion, alpha, units removed, how it was judged, what it has."""
        return tuple(map(self._row, self._known.values()))

    def _row(self, cut: TriedCut) -> dict[str, Any]:
        scores, found = cut.trial.scores, cut.found
        value, bound = ("lost", "at_most") if self._promise.budget.share is None else ("kept", "at_least")
        return {
            "criterion": scores.criterion,
            "alpha": scores.parameters.get("alpha"),
            "removed": sum(len(kept.removed) for kept in cut.trial.selection.values()),
            **({} if cut.runtime is None else {"runtime": cut.runtime}),
            **({"guess": True} if self._guess else {}),
            value: found.value,
            **({} if found.bound is None else {bound: found.bound}),
        }

    @property
    def problem(self) -> str:
        """Why no cut keeps the promise."""
        cuts, promise = list(self._known.values()), self._promise
        # The mildest cut is judged last.
        return (
            f"keep asks for {asked_words(promise)} on {promise.samples:,} held-out rows, and the mildest cut has "
            f"{found_words(replace(promise, found=cuts[-1].found))}; ask for less, compensate, or give more held-out "
            "rows, which narrow the interval"
        )


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

    The result may be too small, by less than `within`. It was tried, unless it is `at_least`. Every size below one that
    holds is assumed to hold.

    Without a limit of failures, this is a bisection. With one, it begins a tenth below `near`, because a size that
    fails costs more than one that holds. Then it goes up from the largest size that held, in the steps that take the
    fewest trials in the worst case: for 100 sizes and 3 failures at most 14.

    Args:
        count: Number of sizes.
        holds: Returns whether a size holds; it is asked for no size twice.
        near: A guess of the size.
        at_least: A size that is known to hold; smaller ones are not looked for.
        failures: How many sizes may fail.
        within: The search ends as soon as the size is known to less than this.
    """
    low, high = at_least, count + 1
    size = (low + 1 if low else high // 2) if near is None else max(low + 1, round(0.9 * near))
    while high - low > within:
        if holds(size):
            low = size
        else:
            high, failures = size, None if failures is None else failures - 1
        size = (low + high) // 2 if failures is None else low + _step_up(high - low - 1, failures)
    return low


def _step_up(sizes: int, failures: int) -> int:
    """Return how far to go up if so many sizes are open and so many may fail; with a single failure left, by one.

    With d trials, of which f may fail, C(d, 1) + ... + C(d, f) sizes can be told apart. If the next trial fails, those
    below it are left to d - 1 trials and f - 1 failures.

    Source: the egg-dropping problem; Boardman, Mathematics Magazine 77 (2004).
    """

    def told_apart(trials: int, failures: int) -> int:
        return sum(math.comb(trials, number) for number in range(1, failures + 1))

    trials = 1
    while told_apart(trials, failures) < sizes:
        trials += 1
    return 1 + told_apart(trials - 1, failures - 1)
