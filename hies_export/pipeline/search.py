"""Search on held-out rows: the best alpha, and the most that may go while a metric holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from ..errors import PlanError
from ..evaluate.judge import Judge, Judgement
from ..evaluate.metrics import higher_is_better
from ..values import PrunableModule, Scores, Selection
from .quality import Refit, predict_pruned

ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

# What tells one selection from another.
_Key = tuple[tuple[int, ...], ...]


def _key(selection: Selection) -> _Key:
    return tuple(kept.units for kept in selection.values())


class HeldOut:
    """Judges selections by what is left of the model on rows that units were not scored on; equal ones once."""

    def __init__(
        self, judge: Judge, model: PreTrainedModel, modules: Sequence[PrunableModule], refit: Refit | None = None
    ):
        self._judge, self._model, self._modules, self._refit = judge, model, modules, refit
        self._judgements: dict[_Key, Judgement] = {}
        self._metrics: dict[_Key, float] = {}

    @property
    def metric(self) -> str:
        """Name of the metric that selections are compared by."""
        return self._judge.metrics[0]

    def dense(self) -> float:
        """Return the metric of the dense model."""
        return self._judge.of(self._judge.dense).metrics[self.metric]

    def judgement(self, selection: Selection) -> Judgement:
        """Return the metric with its standard error, and the stability."""
        key = _key(selection)
        if key not in self._judgements:
            self._judgements[key] = self._judge.judgement(self._predict(selection))
        return self._judgements[key]

    def value(self, selection: Selection) -> float:
        """Return the metric alone."""
        key = _key(selection)
        if key not in self._metrics:
            self._metrics[key] = self._judge.of(self._predict(selection)).metrics[self.metric]
        return self._metrics[key]

    def _predict(self, selection: Selection) -> Any:
        return predict_pruned(self._model, selection, self._modules, self._judge.batches, refit=self._refit)


@dataclass(frozen=True)
class AlphaChoice:
    """The chosen alpha, and what was found of every candidate.

    Attributes:
        scores: Scores at the chosen alpha.
        selection: Selection at the chosen alpha.
        curve: Per candidate `alpha` and the fields of its `Judgement`.
    """

    scores: Scores
    selection: Selection
    curve: tuple[Mapping[str, Any], ...]


def choose_alpha(
    candidates: Mapping[float, Scores], select: Callable[[Scores], Selection], held_out: HeldOut
) -> AlphaChoice:
    """Judge the selection of every alpha on held-out rows and take the best.

    Quality on a few hundred rows cannot tell neighbours apart. So of the alphas within one standard error of the best
    quality the most stable is taken: the one-standard-error rule of Breiman et al. 1984, with stability in the place of
    simplicity. Ties go to the better quality, then to the greater alpha. Without labels stability alone decides.

    Args:
        candidates: Scores by alpha.
        select: The selection of some scores.
        held_out: Rows that units were not scored on.
    """
    sign = 1.0 if higher_is_better(held_out.metric) else -1.0

    def quality(judgement: Judgement) -> float:
        return 0.0 if judgement.quality is None else sign * judgement.quality

    judged = []
    for alpha, scores in candidates.items():
        selection = select(scores)
        judged.append((alpha, scores, selection, held_out.judgement(selection)))
    best = max((judgement for *_, judgement in judged), key=quality)
    good = [c for c in judged if quality(c[3]) >= quality(best) - best.standard_error]
    _, scores, selection, _ = max(good, key=lambda c: (c[3].stability, quality(c[3]), c[0]))
    curve = tuple({"alpha": alpha, **asdict(judgement)} for alpha, _, _, judgement in judged)
    return AlphaChoice(scores, selection, curve)


@dataclass(frozen=True)
class MaxDropChoice:
    """The scores and the selection by which most units go.

    Attributes:
        scores: The candidate that was taken.
        selection: Its selection.
        value: Its metric on the held-out rows.
        judged: Per selection that was tried, in order: alpha, units removed, and the metric.
    """

    scores: Scores
    selection: Selection
    value: float
    judged: tuple[Mapping[str, Any], ...]


def choose_by_max_drop(
    candidates: Iterable[Scores],
    select: Callable[[Scores, int], Selection],
    held_out: HeldOut,
    *,
    sizes: int,
    by: float,
) -> MaxDropChoice:
    """Find, by bisection over evaluations, the largest cut whose metric holds, and the scores that allow it.

    A later candidate must allow a larger cut than the best so far; for most of them one evaluation shows that it does
    not.

    Args:
        candidates: Scores to choose from, e.g. one per alpha.
        select: The selection of some scores at size 1..sizes, each removing at least as much as the one before.
        held_out: Rows that units were not scored on; its metric is the one that must hold.
        sizes: How many sizes there are.
        by: How much worse the metric may get, in its own units.

    Raises:
        PlanError: Even the smallest cut costs more.
    """
    metric, dense = held_out.metric, held_out.dense()
    judged: dict[_Key, Mapping[str, Any]] = {}

    def loss(scores: Scores, size: int) -> float:
        selection = select(scores, size)
        value = held_out.value(selection)
        removed = sum(len(kept.removed) for kept in selection.values())
        judged.setdefault(_key(selection), {"alpha": scores.parameters.get("alpha"), "removed": removed, metric: value})
        return quality_loss(metric, dense, value)

    best: Scores | None = None
    passed = 0
    for scores in candidates:

        def holds(size: int, scores: Scores = scores) -> bool:
            return loss(scores, size) <= by

        found = most_within(holds, sizes, at_least=passed)
        if found > passed:
            passed, best = found, scores
    if best is None:
        least = min((quality_loss(metric, dense, row[metric]) for row in judged.values()), default=0.0)
        raise PlanError(
            f"max_drop allows {metric} to get worse by {by:g}, but on the held-out rows even the smallest cut makes it "
            f"worse by {least:.4g} (dense {dense:.4g}); allow more, or use compensation with a budget of heads"
        )
    selection = select(best, passed)
    return MaxDropChoice(best, selection, held_out.value(selection), tuple(judged.values()))


def most_within(passes: Callable[[int], bool], count: int, *, at_least: int = 0) -> int:
    """Return, by bisection, the largest size in 1..count that passes, or `at_least`.

    It presumes that every size below one that passes does so too; only sizes that were tried are promised.

    Args:
        passes: Whether a size passes.
        count: The largest size.
        at_least: A size that is known to pass, for another candidate; 0 for none.
    """
    low, high = at_least, count + 1
    if low and low < count and not passes(low + 1):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def quality_loss(metric: str, dense: float, other: float) -> float:
    """Return how much worse a metric got, whichever way is better; negative where it got better."""
    worse = dense - other if higher_is_better(metric) else other - dense
    # 0.88 - 0.87 is a little more than 0.01.
    return round(worse, 12)
