"""Search on held-out rows for the best alpha, or for the largest cut that keeps a metric."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..evaluate.judge import Judge, Judgement, clearly_better
from ..evaluate.metrics import higher_is_better
from ..evaluate.predict import predict
from ..progress import SILENT, Progress
from ..report.details import Tried
from ..units import PrunableModule, Selection
from ..values import Scores
from .quality import Predictor, Refit, predict_pruned

logger = logging.getLogger(__name__)

ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

# The kept units of every module: equal for equal selections.
_Key = tuple[tuple[int, ...], ...]


def _key(selection: Selection) -> _Key:
    return tuple(kept.units for kept in selection.values())


class HeldOut:
    """Judge selections on held-out rows, which were not used for scoring; equal selections are evaluated once.

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
        self._judge, self._model, self._modules, self.refit, self._by = judge, model, modules, refit, by
        self._judgements: dict[_Key, Judgement] = {}
        self._agreements: dict[_Key, Tensor] = {}

    @property
    def metric(self) -> str:
        """Name of the metric by which selections are compared."""
        return self._judge.metrics[0]

    @property
    def samples(self) -> Tensor | None:
        """Sample of every prediction; None if each has its own."""
        return self._judge.samples

    def dense(self) -> float:
        """Return the metric of the dense model."""
        return self._judge.of(self._judge.dense).metrics[self.metric]

    def judgement(self, selection: Selection) -> Judgement:
        """Return a selection's metric with its standard error, and its stability."""
        key = _key(selection)
        if key not in self._judgements:
            predictions = self._predict(selection)
            self._judgements[key] = self._judge.judgement(predictions)
            self._agreements[key] = self._judge.agreement(predictions)
        return self._judgements[key]

    def agreement(self, selection: Selection) -> Tensor:
        """Return which predictions of a selection equal the dense model's, (predictions,) bool."""
        self.judgement(selection)
        return self._agreements[_key(selection)]

    def value(self, selection: Selection) -> float:
        """Return a selection's metric."""
        return self._judge.of(self._predict(selection)).metrics[self.metric]

    def kept(self, selection: Selection) -> tuple[float, float]:
        """Return the share of predictions that stay, and the lower end of its interval."""
        return self._judge.kept(self._predict(selection))

    def lost(self, selection: Selection) -> tuple[float, float]:
        """Return how much worse the metric gets, and the upper end of its interval."""
        return self._judge.lost(self._predict(selection))

    def _predict(self, selection: Selection) -> Any:
        return predict_pruned(self._model, selection, self._modules, self._judge.batches, refit=self.refit, by=self._by)


@dataclass(frozen=True)
class AlphaChoice:
    """Scores and selection at the chosen alpha; `curve` has for each candidate `alpha` and its `Judgement`'s fields."""

    scores: Scores
    selection: Selection
    curve: tuple[Mapping[str, Any], ...]


def choose_alpha(candidates: Iterable[Scores], select: Callable[[Scores], Selection], held_out: HeldOut) -> AlphaChoice:
    """Choose the alpha whose selection does best on held-out rows.

    A few hundred rows cannot separate the qualities of neighbouring alphas. So the most stable alpha is chosen among
    those within one standard error of the best quality. This is the one-standard-error rule of Breiman et al. (1984)
    with stability in place of simplicity. Ties go to the better quality, then to the larger alpha. Without labels,
    stability alone decides.
    """
    sign = 1.0 if higher_is_better(held_out.metric) else -1.0

    def quality(judgement: Judgement) -> float:
        return 0.0 if judgement.quality is None else sign * judgement.quality

    judged = []
    for scores in candidates:
        selection = select(scores)
        judged.append((scores.parameters["alpha"], scores, selection, held_out.judgement(selection)))
    best = max((judgement for *_, judgement in judged), key=quality)
    good = [c for c in judged if quality(c[3]) >= quality(best) - best.standard_error]
    alpha, scores, selection, found = max(good, key=lambda c: (c[3].stability, quality(c[3]), c[0]))
    if len(judged) > 1 and all((c[3].quality, c[3].stability) == (found.quality, found.stability) for c in judged):
        logger.warning(
            "all %d alphas give the same %s and stability on the held-out rows, which cannot tell them apart: the "
            "largest, %g, was taken",
            *(len(judged), held_out.metric, alpha),
        )
    curve = tuple({"alpha": alpha, **asdict(judgement)} for alpha, _, _, judgement in judged)
    return AlphaChoice(scores, selection, curve)


def choose_by_agreement(
    candidates: Sequence[tuple[Scores, Selection]],
    held_out: Mapping[float, HeldOut],
    *,
    steps: Sequence[int],
    progress: Progress = SILENT,
) -> tuple[Tried, ...]:
    """Choose the candidate that agrees most with the dense model on held-out rows, and then the weights of tokens.

    A later candidate takes the place of an earlier one if it agrees more often by two paired standard errors, and its
    metric is not worse by more than its own standard error. A few hundred rows cannot tell smaller differences from
    noise, so the order of candidates decides these. All candidates are judged with the first weights of tokens, a key
    of `held_out`. The best is then judged with the others, by the same rule.
    """
    first, *others = held_out
    sign = 1.0 if higher_is_better(held_out[first].metric) else -1.0

    def judged(number: int, weights: float) -> Tried:
        scores, selection = candidates[number]
        found = held_out[weights].judgement(selection)
        alpha = scores.parameters.get("alpha")
        return Tried(number, scores.criterion, alpha, steps[number], weights, found.quality, found.stability)

    def better(one: Tried, other: Tried) -> bool:
        flags, others = (held_out[t.token_weights].agreement(candidates[t.candidate][1]) for t in (one, other))
        error = held_out[one.token_weights].judgement(candidates[one.candidate][1]).standard_error
        lost = 0.0 if one.quality is None or other.quality is None else sign * (other.quality - one.quality)
        return clearly_better(flags, others, held_out[first].samples) and lost <= error

    def best_of(tried: Sequence[Tried]) -> Tried:
        best = tried[0]
        for other in tried[1:]:
            best = other if better(other, best) else best
        return best

    tried = [judged(number, first) for number in progress.track(range(len(candidates)), "choose criterion")]
    best = best_of(tried)
    weighted = [judged(best.candidate, weights) for weights in others]
    best = best_of([best, *weighted])
    return tuple(replace(t, chosen=t is best) for t in (*tried, *weighted))


@dataclass(frozen=True)
class Verdict:
    """Whether a cut meets a budget on the held-out rows, and the numbers that show it, by name."""

    holds: bool
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Candidate:
    """Scores to select by, and the judge of their selections; `runtime` names what predicts, if that matters."""

    scores: Scores
    judge: Callable[[Selection], Verdict]
    runtime: str | None = None


@dataclass(frozen=True)
class LargestCut:
    """The largest cut that holds, and the number of its candidate; `candidate` and `verdict` are None if none does.

    `judged` has a mapping for each selection tried, in order: criterion, alpha, number of units removed, the
    candidate's runtime if it has one, and the verdict's numbers.
    """

    size: int
    candidate: int | None
    verdict: Verdict | None
    judged: tuple[Mapping[str, Any], ...]


def choose_largest(
    candidates: Iterable[Candidate],
    select: Callable[[Scores, int], Selection],
    *,
    sizes: int,
    at_least: int = 0,
    near: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> LargestCut:
    """Find the largest cut that holds, and the candidate that allows it, by bisection over evaluations.

    A later candidate replaces the best so far only if it allows a larger cut. For most candidates one evaluation rules
    that out. A larger size, in 1..sizes, removes at least as much. Only cuts larger than `at_least` are looked for.
    Once `stop` returns true, nothing more is judged. With a guess, `near`, of the first candidate's largest size, sizes
    are tried from there on.
    """
    judged: list[Mapping[str, Any]] = []
    known: dict[tuple[Any, _Key], Verdict] = {}
    best: int | None = None
    passed, verdict = at_least, None
    for number, candidate in enumerate(candidates):

        def holds(size: int, candidate: Candidate = candidate) -> bool:
            selection = select(candidate.scores, size)
            key = candidate.judge, _key(selection)
            if key not in known and stop():
                return False
            if key not in known:
                known[key] = candidate.judge(selection)
                removed = sum(len(kept.removed) for kept in selection.values())
                alpha, criterion = candidate.scores.parameters.get("alpha"), candidate.scores.criterion
                row = {"criterion": criterion, "alpha": alpha, "removed": removed}
                where = {} if candidate.runtime is None else {"runtime": candidate.runtime}
                judged.append({**row, **where, **known[key].numbers})
            return known[key].holds

        if near is None or number:
            found = most_within(holds, sizes, at_least=passed)
        else:
            found = most_near(holds, sizes, near=near)
        if found > passed:
            passed, best = found, number
            verdict = known[candidate.judge, _key(select(candidate.scores, found))]
    return LargestCut(passed, best, verdict, tuple(judged))


def most_within(passes: Callable[[int], bool], count: int, *, at_least: int = 0) -> int:
    """Return the largest size in 1..count that passes, by bisection; `at_least` if no larger one is found.

    Bisection assumes that every size below a passing one passes too. A size that is returned was tried, unless it is
    `at_least`.
    """
    if at_least and at_least < count and not passes(at_least + 1):
        return at_least
    return _bisected(passes, at_least, count + 1)


def most_near(passes: Callable[[int], bool], count: int, *, near: int) -> int:
    """Return the largest size in 1..count that passes, 0 if none does, by bisection that begins around a guess.

    From `near`, in 1..count, sizes are tried upwards if it passes, else downwards, in steps that double.
    """
    step = 1
    if passes(near):
        low, high = near, near + 1
        while low < count and passes(high := min(count, low + step)):
            low, high, step = high, high + 1, 2 * step
        return _bisected(passes, low, high)
    low, high = 0, near
    while high > 1:
        low = max(1, high - step)
        if passes(low):
            return _bisected(passes, low, high)
        high, step = low, 2 * step
    return 0


def _bisected(passes: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest size between two that passes; `low` passes, or is the least, and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low
