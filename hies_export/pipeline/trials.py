"""Judge cuts on held-out rows, each once, and choose among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from ..evaluate.judge import Judge, Judgement, Tried, clearly_better
from ..evaluate.metrics import higher_is_better
from ..progress import SILENT, Progress
from ..tasks import Predictions
from .stages import Trial

logger = logging.getLogger(__name__)

# How a cut's refit weighs tokens, and the kept units of every module: equal for equal models.
Key = tuple[float, tuple[tuple[int, ...], ...]]


def key_of(trial: Trial) -> Key:
    """Return what a cut model follows from."""
    return trial.token_weights, tuple(kept.units for kept in trial.selection.values())


class Trials:
    """Cuts of a model, each predicted and judged on some rows once.

    Args:
        judge: The judge on the rows.
        predict: Returns what the model of a cut predicts there.
    """

    def __init__(self, judge: Judge, predict: Callable[[Trial], Predictions]):
        self.judge, self._predict = judge, predict
        self._found: dict[Key, tuple[Judgement, Tensor]] = {}

    def judgement(self, trial: Trial) -> Judgement:
        """Return a cut's metric with its standard error, and its stability."""
        return self._judged(trial)[0]

    def agreement(self, trial: Trial) -> Tensor:
        """Return which predictions of a cut equal the dense model's, (predictions,) bool."""
        return self._judged(trial)[1]

    def _judged(self, trial: Trial) -> tuple[Judgement, Tensor]:
        key = key_of(trial)
        if key not in self._found:
            predictions = self._predict(trial)
            self._found[key] = self.judge.judgement(predictions), self.judge.agreement(predictions)
        return self._found[key]


def choose_alpha(candidates: Iterable[Trial], trials: Trials) -> tuple[Trial, tuple[Mapping[str, Any], ...]]:
    """Choose the alpha whose cut does best on held-out rows; also return each alpha with its `Judgement`'s fields.

    A few hundred rows cannot separate the qualities of neighbouring alphas. So the most stable alpha is chosen among
    those within one standard error of the best quality. This is the one-standard-error rule of Breiman et al. (1984)
    with stability in place of simplicity. Ties go to the better quality, then to the larger alpha. Without labels,
    stability alone decides.
    """
    sign = 1.0 if higher_is_better(trials.judge.metrics[0]) else -1.0

    def quality(judgement: Judgement) -> float:
        return 0.0 if judgement.quality is None else sign * judgement.quality

    judged = [(trial.scores.parameters["alpha"], trial, trials.judgement(trial)) for trial in candidates]
    best = max((found for *_, found in judged), key=quality)
    good = [one for one in judged if quality(one[2]) >= quality(best) - best.standard_error]
    alpha, trial, found = max(good, key=lambda one: (one[2].stability, quality(one[2]), one[0]))
    same = ((of.quality, of.stability) == (found.quality, found.stability) for *_, of in judged)
    if len(judged) > 1 and all(same):
        logger.warning(
            "all %d alphas give the same %s and stability on the held-out rows, which cannot tell them apart: the "
            "largest, %g, was taken",
            *(len(judged), trials.judge.metrics[0], alpha),
        )
    return trial, tuple({"alpha": alpha, **asdict(of)} for alpha, _, of in judged)


def choose_by_agreement(
    candidates: Sequence[Trial], token_weights: Sequence[float], trials: Trials, *, progress: Progress = SILENT
) -> tuple[Tried, ...]:
    """Choose the candidate that agrees most with the dense model on held-out rows, and then the weights of tokens.

    A later candidate takes the place of an earlier one if it agrees more often by two paired standard errors, and its
    metric is not worse by more than its own standard error. A few hundred rows cannot tell smaller differences from
    noise, so the order of candidates decides these. All candidates are judged with the first weights of tokens. The
    best is then judged with the others, by the same rule.
    """
    first, *others = token_weights
    sign = 1.0 if higher_is_better(trials.judge.metrics[0]) else -1.0

    def judged(number: int, weights: float) -> Tried:
        scores = candidates[number].scores
        found = trials.judgement(replace(candidates[number], token_weights=weights))
        alpha = scores.parameters.get("alpha")
        return Tried(number, scores.criterion, alpha, weights, found.quality, found.stability)

    def trial_of(tried: Tried) -> Trial:
        return replace(candidates[tried.candidate], token_weights=tried.token_weights)

    def better(one: Tried, other: Tried) -> bool:
        flags, others = (trials.agreement(trial_of(tried)) for tried in (one, other))
        error = trials.judgement(trial_of(one)).standard_error
        lost = 0.0 if one.quality is None or other.quality is None else sign * (other.quality - one.quality)
        return clearly_better(flags, others, trials.judge.samples) and lost <= error

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
