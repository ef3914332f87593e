"""Judge pruned models, and search for the largest cut that keeps a promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import Batch
from ..errors import DropError
from ..evaluate.interval import FAILURES
from ..evaluate.judge import Judge, Judgement, Quality
from ..evaluate.predict import Predictor, predict
from ..forms.measure.counts import Both
from ..progress import Progress
from ..recipe.budget import Found, Outcome
from ..report.outcomes import asked_words, found_words
from ..score.criteria import Scores
from ..slim.check import masked_units
from ..tasks import Predictions
from ..units.units import PrunableModule, Selection
from .prepare import Prepared
from .stages import Refit, Slim, cut_beside
from .targets import Round

# Runs benchmarks on a model, and returns their values by name.
Benchmark = Callable[[PreTrainedModel], Mapping[str, float]]
# The kept units of every module: equal for equal selections.
_Key = tuple[tuple[int, ...], ...]


def _key(selection: Selection) -> _Key:
    return tuple(kept.units for kept in selection.values())


def judging(promise: Outcome) -> dict[str, Any]:
    """Return the options of the `Judge` that decides about a promise, beside those of the run."""
    budget = promise.budget
    metrics = {} if budget.metric is None else {"metrics": (budget.metric,)}
    if budget.keep is None:
        return metrics
    index = {} if budget.keep.index is None else {"index": budget.keep.index}
    return {**metrics, **index, "confidence": promise.confidence, "as_of": promise.samples}


def predict_pruned(
    model: PreTrainedModel,
    selection: Selection,
    modules: Sequence[PrunableModule],
    batches: Sequence[Batch],
    *,
    refit: Refit | None = None,
    by: Predictor = predict,
) -> Predictions:
    """Return the model's predictions without the units that a selection removes.

    Without a refit, units are masked instead of cut, which in torch gives the same predictions at less cost.
    """
    if refit is None and by is predict:
        with masked_units(model, selection, modules):
            return predict(model, batches)
    return by(cut_beside(model, selection, modules, refit), batches)


class HeldOut:
    """Judge selections on some rows, mostly held-out ones; for one judgement, equal selections are predicted once.

    `refit` compensates the model that a selection cuts; without it, the model is masked instead. `by` predicts.
    """

    def __init__(
        self,
        judge: Judge,
        model: PreTrainedModel,
        modules: Sequence[PrunableModule],
        refit: Refit | None = None,
        by: Predictor = predict,
    ):
        self.judge, self.refit = judge, refit
        self._model, self._modules, self._by = model, modules, by
        self._judgements: dict[_Key, Judgement] = {}
        self._agreements: dict[_Key, Tensor] = {}

    @property
    def metric(self) -> str:
        """Name of the metric by which selections are compared."""
        return self.judge.metrics[0]

    @property
    def samples(self) -> Tensor | None:
        """Sample of every prediction; None if each has its own."""
        return self.judge.samples

    def judgement(self, selection: Selection) -> Judgement:
        """Return a selection's metric with its standard error, and its stability."""
        key = _key(selection)
        if key not in self._judgements:
            predictions = self.predict(selection)
            self._judgements[key] = self.judge.judgement(predictions)
            self._agreements[key] = self.judge.agreement(predictions)
        return self._judgements[key]

    def agreement(self, selection: Selection) -> Tensor:
        """Return which predictions of a selection equal the dense model's, (predictions,) bool."""
        self.judgement(selection)
        return self._agreements[_key(selection)]

    def predict(self, selection: Selection) -> Predictions:
        """Return the predictions of a selection."""
        return predict_pruned(self._model, selection, self._modules, self.judge.batches, refit=self.refit, by=self._by)


@dataclass(frozen=True)
class Trial:
    """A cut to judge: its units, and how it was chosen, refitted and served.

    `token_weights` are those of the refit, and `runtime` names what predicts, if that matters. A `guess` is judged on
    other rows than the promise is made on.
    """

    promise: Outcome
    rows: HeldOut
    scores: Scores
    token_weights: float
    size: int
    selection: Selection
    runtime: str | None = None
    guess: bool = False

    def judge(self) -> Found:
        """Return what decides whether the cut keeps the promise."""
        return self.rows.judge.found(self.promise.budget, self.rows.predict(self.selection))


@dataclass(frozen=True)
class Judged:
    """A cut, and what it has of what is promised."""

    trial: Trial
    found: Found

    @property
    def outcome(self) -> Outcome:
        """The promise with what the cut has."""
        return replace(self.trial.promise, found=self.found)

    @property
    def met(self) -> bool:
        """Whether the cut keeps the promise."""
        return self.trial.promise.budget.met(self.found)

    @property
    def row(self) -> dict[str, Any]:
        """The cut in a report: criterion, alpha, number of units removed, how it was judged, and what it has."""
        trial, scores, found = self.trial, self.trial.scores, self.found
        value, bound = ("lost", "at_most") if trial.promise.budget.share is None else ("kept", "at_least")
        return {
            "criterion": scores.criterion,
            "alpha": scores.parameters.get("alpha"),
            "removed": sum(len(kept.removed) for kept in trial.selection.values()),
            **({} if trial.runtime is None else {"runtime": trial.runtime}),
            **({"guess": True} if trial.guess else {}),
            value: found.value,
            **({} if found.bound is None else {bound: found.bound}),
        }


@dataclass(frozen=True)
class Guess:
    """Scores and weights of tokens to cut by, a size to begin a search at, and the cuts that were judged to find it."""

    scores: Scores
    token_weights: float
    size: int
    judged: Sequence[Judged] = ()


class Watch:
    """Follows a search. A subclass may know cuts from before, tell of them, or stop the search."""

    def judge(self, trial: Trial) -> Found:
        """Return what a cut has of what is promised."""
        return trial.judge()

    def stops(self) -> bool:
        """Tell whether no further cut shall be judged."""
        return False


class Search:
    """A search for the largest cut that keeps a promise, among scores and weights of tokens; no cut is judged twice.

    Args:
        promise: The promise.
        rows: The rows to judge on, refitted with each of the weights of tokens that are tried.
        sizes: What cuts of each size remove; each at least as much as the one before.
        runtime, guess: As in `Trial`.
        watch: Follows the search. If it stops the search before a cut holds, a guess is none, and other searches go on
            until one does.
    """

    def __init__(
        self,
        promise: Outcome,
        rows: Mapping[float, HeldOut],
        sizes: Sequence[Round],
        *,
        runtime: str | None = None,
        guess: bool = False,
        watch: Watch | None = None,
    ):
        self._promise, self._rows, self._sizes = promise, rows, sizes
        self._runtime, self._guess, self._watch = runtime, guess, watch or Watch()
        self._known: dict[tuple[float, _Key], Judged] = {}

    @property
    def judged(self) -> list[Judged]:
        """The cuts that were judged, in order."""
        return list(self._known.values())

    def largest(self, scored: Iterable[Scores]) -> Judged | None:
        """Return the largest cut that keeps the promise, by bisection; None if none does.

        All scores are tried with the first weights of tokens, and the best scores then with the others. Each takes the
        place of the best so far only if it allows a larger cut. For most of them, one cut rules that out.
        """
        weights, *others = self._rows
        best: Judged | None = None
        for scores in scored:
            best = self._larger(scores, weights, best)
        for other in others:
            best = best and self._larger(best.trial.scores, other, best)
        return best

    def _larger(self, scores: Scores, weights: float, best: Judged | None) -> Judged | None:
        known = 0 if best is None else best.trial.size
        size = largest(len(self._sizes), partial(self._holds, scores, weights), at_least=known)
        return best if size == known else self._at(scores, weights, size)

    def near(self, guess: Guess) -> Judged | None:
        """Return the largest cut that keeps the promise, by few failing cuts around a guess; None if none does."""
        scores, weights = guess.scores, guess.token_weights
        holds = partial(self._holds, scores, weights)
        size = largest(len(self._sizes), holds, near=guess.size, failures=FAILURES)
        return self._at(scores, weights, size) if size else None

    @property
    def problem(self) -> str:
        """Why no cut keeps the promise."""
        judged, promise = self.judged, self._promise
        budget = promise.budget
        if budget.max_drop is not None:
            least = min((one.found.value for one in judged), default=0.0)
            return (
                f"max_drop allows {budget.metric} to get worse by {budget.by:g}, but on the held-out rows even the "
                f"smallest cut makes it worse by {least:.4g} (dense {promise.dense:.4g}); allow more, or use "
                "compensation with a budget of heads"
            )
        if not judged:
            return "keep needs time to judge a cut, and there was none; allow more"
        # The mildest cut is judged last.
        return (
            f"keep asks for {asked_words(promise)} on {promise.samples:,} held-out rows, and the mildest cut has "
            f"{found_words(judged[-1].outcome)}; ask for less, compensate, or give more held-out rows, which narrow "
            "the interval"
        )

    def _holds(self, scores: Scores, weights: float, size: int) -> bool:
        selection = self._sizes[size - 1].select(scores)
        key = weights, _key(selection)
        if key not in self._known:
            if self._stops():
                return False
            trial = Trial(
                self._promise, self._rows[weights], scores, weights, size, selection, self._runtime, self._guess
            )
            self._known[key] = Judged(trial, self._watch.judge(trial))
        return self._known[key].met

    def _stops(self) -> bool:
        return self._watch.stops() and (self._guess or any(one.met for one in self.judged))

    def _at(self, scores: Scores, weights: float, size: int) -> Judged:
        known = self._known[weights, _key(self._sizes[size - 1].select(scores))]
        return replace(known, trial=replace(known.trial, scores=scores, size=size))


def largest(
    count: int,
    holds: Callable[[int], bool],
    *,
    near: int | None = None,
    at_least: int = 0,
    failures: int | None = None,
) -> int:
    """Return the largest size in 1..count that holds, `at_least` if no larger one does.

    It assumes that every size below one that holds does so too. A size that is returned was tried, unless it is
    `at_least`. Without a limit of failures, it halves what is open. With one, it begins a tenth below `near`, as a size
    that fails costs more than one that holds, and goes up from the largest that held, in the steps that take the fewest
    trials in the worst case: for 100 sizes and 3 failures at most 14.

    Args:
        count: Number of sizes.
        holds: Returns whether a size holds; it is asked for no size twice.
        near: A guess of the size.
        at_least: A size that is known to hold; smaller ones are not looked for.
        failures: How many sizes may fail.
    """
    low, high = at_least, count + 1
    size = (low + 1 if low else high // 2) if near is None else max(low + 1, round(0.9 * near))
    while high - low > 1:
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


def confirm(
    prepared: Prepared, slim: Slim, outcome: Outcome, by: Predictor = predict, *, progress: Progress
) -> Outcome:
    """Evaluate a slim model on the held-out rows that its promise was made on; `by` predicts."""
    if not outcome.budget.searched:
        return outcome
    progress.stage("evaluate the slim model on the held-out rows")
    judge = Judge.on(prepared.model, prepared.rows.held_out, **vars(prepared.judged) | judging(outcome))
    confirmed = replace(outcome, found=judge.found(outcome.budget, by(slim.model, judge.batches)))
    if not confirmed.met:
        what, remedy = "compensated", "compensate on more samples, or not at all"
        if slim.refitted is None:
            what, remedy = "rounded", "set save_dtype: float32"
        raise DropError(
            f"{outcome.budget.kind} asks for {asked_words(outcome)} on the held-out rows. The model that was judged "
            f"kept to it, but the {what} one has {found_words(confirmed)}; {remedy}"
        )
    return confirmed


@dataclass(frozen=True)
class Evaluation:
    """How a slim model compares with the dense one: metrics and lm-eval benchmarks by name, stability, and rankings."""

    metrics: Mapping[str, Both[float]]
    stability: float  # share of predictions that equal the dense model's, in [0, 1]
    uncompensated: Quality | None  # of the cut model without compensation; None if the run does not compensate
    benchmarks: Mapping[str, Both[float]]
    ranking: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of the slim model, as in `Judge.ranking`
    tolerance: float | None = None  # largest difference of numbers of a regression that are the same


def evaluate(
    judge: Judge,
    model: PreTrainedModel,
    slim: PreTrainedModel,
    *,
    modules: Sequence[PrunableModule] = (),
    uncompensated: Selection | None = None,
    benchmark: Benchmark | None = None,
    progress: Progress,
) -> Evaluation:
    """Evaluate the slim model of a run against the dense one."""

    def predictions_of(model: PreTrainedModel) -> Predictions:
        return predict(model, judge.batches, progress=progress)

    predictions = predictions_of(slim)
    dense, pruned, masked = judge.of(judge.dense), judge.of(predictions), None
    if uncompensated is not None:
        # Masked and cut models predict the same: `compare_cut` has checked that.
        with masked_units(model, uncompensated, modules):
            masked = judge.of(predictions_of(model))
    benchmarks: Mapping[str, Both[float]] = {}
    if benchmark is not None:
        progress.stage("run the benchmarks of lm-eval on both models")
        benchmarks = _side_by_side(benchmark(model), benchmark(slim))
    metrics, ranking = _side_by_side(dense.metrics, pruned.metrics), judge.ranking(predictions)
    # Rankings are compared by their order, whatever the logits.
    tolerance = None if ranking else judge.task.tolerance_on(judge.dense)
    return Evaluation(metrics, pruned.stability, masked, benchmarks, ranking, tolerance)


def _side_by_side(dense: Mapping[str, float], slim: Mapping[str, float]) -> dict[str, Both[float]]:
    return {name: Both(dense[name], slim[name]) for name in dense}
