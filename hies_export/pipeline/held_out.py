"""Judge selections on held-out rows, and choose among scores by what they select."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..evaluate.judge import Judge, Judgement, Tried, clearly_better
from ..evaluate.metrics import higher_is_better
from ..progress import SILENT, Progress
from ..score.criteria import Scores
from ..units.units import PrunableModule, Selection
from .stages import Refit, predict_pruned

logger = logging.getLogger(__name__)

# The kept units of every module: equal for equal selections.
Key = tuple[tuple[int, ...], ...]


def key_of(selection: Selection) -> Key:
    """Return the kept units of every module."""
    return tuple(kept.units for kept in selection.values())


class HeldOut:
    """Judge selections on some rows, mostly held-out ones; equal selections are predicted once.

    `refit` compensates the model that a selection cuts; without it, the model is masked instead.
    """

    def __init__(
        self,
        judge: Judge,
        model: PreTrainedModel,
        modules: Sequence[PrunableModule],
        refit: Refit | None = None,
    ):
        self.judge = judge
        self._model, self._modules, self._refit = model, modules, refit
        self._found: dict[Key, tuple[Judgement, Tensor]] = {}

    def judgement(self, selection: Selection) -> Judgement:
        """Return a selection's metric with its standard error, and its stability."""
        return self._judged(selection)[0]

    def agreement(self, selection: Selection) -> Tensor:
        """Return which predictions of a selection equal the dense model's, (predictions,) bool."""
        return self._judged(selection)[1]

    def _judged(self, selection: Selection) -> tuple[Judgement, Tensor]:
        key = key_of(selection)
        if key not in self._found:
            rows = self.judge.batches
            predictions = predict_pruned(self._model, selection, self._modules, rows, refit=self._refit)
            self._found[key] = self.judge.judgement(predictions), self.judge.agreement(predictions)
        return self._found[key]


@dataclass(frozen=True)
class AlphaChoice:
    """Scores and selection at the chosen alpha; `curve` has for each candidate `alpha` and its `Judgement`'s fields."""

    scores: Scores
    selection: Selection
    curve: tuple[Mapping[str, Any], ...]


def choose_alpha(candidates: Iterable[tuple[Scores, Selection]], held_out: HeldOut) -> AlphaChoice:
    """Choose the alpha whose selection does best on held-out rows.

    A few hundred rows cannot separate the qualities of neighbouring alphas. So the most stable alpha is chosen among
    those within one standard error of the best quality. This is the one-standard-error rule of Breiman et al. (1984)
    with stability in place of simplicity. Ties go to the better quality, then to the larger alpha. Without labels,
    stability alone decides.
    """
    sign = 1.0 if higher_is_better(held_out.judge.metrics[0]) else -1.0

    def quality(judgement: Judgement) -> float:
        return 0.0 if judgement.quality is None else sign * judgement.quality

    judged = []
    for scores, selection in candidates:
        judged.append((scores.parameters["alpha"], scores, selection, held_out.judgement(selection)))
    best = max((judgement for *_, judgement in judged), key=quality)
    good = [c for c in judged if quality(c[3]) >= quality(best) - best.standard_error]
    alpha, scores, selection, found = max(good, key=lambda c: (c[3].stability, quality(c[3]), c[0]))
    if len(judged) > 1 and all((c[3].quality, c[3].stability) == (found.quality, found.stability) for c in judged):
        logger.warning(
            "all %d alphas give the same %s and stability on the held-out rows, which cannot tell them apart: the "
            "largest, %g, was taken",
            *(len(judged), held_out.judge.metrics[0], alpha),
        )
    curve = tuple({"alpha": alpha, **asdict(judgement)} for alpha, _, _, judgement in judged)
    return AlphaChoice(scores, selection, curve)


def choose_by_agreement(
    candidates: Sequence[tuple[Scores, Selection]],
    held_out: Mapping[float, HeldOut],
    *,
    progress: Progress = SILENT,
) -> tuple[Tried, ...]:
    """Choose the candidate that agrees most with the dense model on held-out rows, and then the weights of tokens.

    A later candidate takes the place of an earlier one if it agrees more often by two paired standard errors, and its
    metric is not worse by more than its own standard error. A few hundred rows cannot tell smaller differences from
    noise, so the order of candidates decides these. All candidates are judged with the first weights of tokens, a key
    of `held_out`. The best is then judged with the others, by the same rule.
    """
    first, *others = held_out
    sign = 1.0 if higher_is_better(held_out[first].judge.metrics[0]) else -1.0

    def judged(number: int, weights: float) -> Tried:
        scores, selection = candidates[number]
        found = held_out[weights].judgement(selection)
        alpha = scores.parameters.get("alpha")
        return Tried(number, scores.criterion, alpha, weights, found.quality, found.stability)

    def better(one: Tried, other: Tried) -> bool:
        flags, others = (held_out[t.token_weights].agreement(candidates[t.candidate][1]) for t in (one, other))
        error = held_out[one.token_weights].judgement(candidates[one.candidate][1]).standard_error
        lost = 0.0 if one.quality is None or other.quality is None else sign * (other.quality - one.quality)
        return clearly_better(flags, others, held_out[first].judge.samples) and lost <= error

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
