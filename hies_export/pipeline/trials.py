"""Judge cuts on held-out rows, each once, and choose among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

from torch import Tensor

from ..evaluate.judge import Judge, Judgement, Tried, clearly_better
from ..evaluate.metrics import higher_is_better
from ..progress import SILENT, Progress
from ..tasks import Predictions
from .stages import Key, Trial


class Trials:
    """Cuts of a model, each judged once on the rows of a judge; `predict` returns what the model of a cut predicts."""

    def __init__(self, judge: Judge, predict: Callable[[Trial], Predictions]):
        self.judge, self._predict = judge, predict
        self._found: dict[Key, tuple[Judgement, Tensor]] = {}

    def judged(self, trial: Trial) -> tuple[Judgement, Tensor]:
        """Return a cut's judgement, and which of its predictions equal the dense model's, (predictions,) bool."""
        if (key := trial.key) not in self._found:
            predictions = self._predict(trial)
            self._found[key] = self.judge.judgement(predictions), self.judge.agreement(predictions)
        return self._found[key]


def _tried(number: int, trial: Trial, trials: Trials) -> Tried:
    """Return how a candidate of a number was judged."""
    scores, (found, _) = trial.scores, trials.judged(trial)
    alpha = scores.parameters.get("alpha")
    return Tried(number, scores.criterion, alpha, trial.token_weights, found.quality, found.stability)


def choose_alpha(
    candidates: Sequence[Trial], trials: Trials, *, progress: Progress = SILENT
) -> tuple[Trial, tuple[Tried, ...]]:
    """Return the candidate whose alpha does best on held-out rows, and how all were judged, that one marked.

    A few hundred rows cannot separate the qualities of neighbouring alphas. So the most stable one is taken of those
    within one standard error of the best quality: the one-standard-error rule of Breiman et al. (1984) with stability
    in place of simplicity. Ties go to the better quality, then to the larger alpha. Without labels, stability decides.
    """
    sign = 1.0 if higher_is_better(trials.judge.metrics[0]) else -1.0

    def quality(judgement: Judgement) -> float:
        return 0.0 if judgement.quality is None else sign * judgement.quality

    tracked = progress.track(candidates, "choose alpha")
    judged = [(trial.scores.parameters["alpha"], trial, trials.judged(trial)[0]) for trial in tracked]
    best = max((found for *_, found in judged), key=quality)
    good = [one for one in judged if quality(one[2]) >= quality(best) - best.standard_error]
    _, trial, _ = max(good, key=lambda one: (one[2].stability, quality(one[2]), one[0]))
    tried = (replace(_tried(number, one, trials), chosen=one is trial) for number, (_, one, _) in enumerate(judged))
    return trial, tuple(tried)


def choose_by_agreement(
    candidates: Sequence[Trial], weights: Sequence[float], trials: Trials, *, progress: Progress = SILENT
) -> tuple[Trial, tuple[Tried, ...]]:
    """Return the candidate that agrees most with the dense model on held-out rows, and how all were judged.

    The best candidate is then judged with other `weights` of tokens. One replaces the best so far if it agrees more
    often by two paired standard errors and its metric is not worse by more than its standard error. A few hundred rows
    cannot tell smaller differences from noise, so the order decides these.
    """
    sign = 1.0 if higher_is_better(trials.judge.metrics[0]) else -1.0

    def better(best: tuple[int, Trial], other: tuple[int, Trial]) -> tuple[int, Trial]:
        (of_best, agreement_of_best), (found, agreement) = (trials.judged(trial) for _, trial in (best, other))
        lost = 0.0 if of_best.quality is None or found.quality is None else sign * (of_best.quality - found.quality)
        agrees_more = clearly_better(agreement, agreement_of_best, trials.judge.samples)
        return other if agrees_more and lost <= found.standard_error else best

    for trial in progress.track(candidates, "choose criterion"):
        trials.judged(trial)
    numbered = [*enumerate(candidates)]
    number, best = reduce(better, numbered)
    weighted = [(number, replace(best, token_weights=other)) for other in weights]
    _, chosen = reduce(better, weighted, (number, best))
    tried = (replace(_tried(n, trial, trials), chosen=trial is chosen) for n, trial in (*numbered, *weighted))
    return chosen, tuple(tried)
