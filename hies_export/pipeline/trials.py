"""Choose among cuts of the same budget (`alpha: auto`, `criterion: auto`) by judging each on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ..evaluate.judge import Judge, Judgement, Tried, clearly_better
from ..evaluate.metrics import higher_is_better
from ..progress import SILENT, Progress
from ..tasks import Predictions
from .stages import Key, Trial


class Trials:
    """Judge cuts on the rows of a judge, each once; `predict` returns the predictions of a cut model on these."""

    def __init__(self, judge: Judge, predict: Callable[[Trial], Predictions]):
        self.judge, self._predict = judge, predict
        self._judged: dict[Key, tuple[Judgement, Tensor]] = {}

    def judged(self, trial: Trial) -> tuple[Judgement, Tensor]:
        """Return a cut's judgement, and which of its predictions equal the dense model's, (predictions,) bool."""
        if trial.key not in self._judged:
            predictions = self._predict(trial)
            self._judged[trial.key] = self.judge.judgement(predictions), self.judge.agreement(predictions)
        return self._judged[trial.key]


def _tried(number: int, trial: Trial, trials: Trials, *, chosen: bool) -> Tried:
    """Return how a trial was judged, for the report; `number` is its position among the candidates."""
    scores, (judgement, _) = trial.scores, trials.judged(trial)
    alpha, quality, stability = scores.parameters.get("alpha"), judgement.quality, judgement.stability
    return Tried(number, scores.criterion, alpha, trial.token_weights, quality, stability, chosen)


def choose_alpha(
    candidates: Sequence[Trial], trials: Trials, *, progress: Progress = SILENT
) -> tuple[Trial, tuple[Tried, ...]]:
    """Return the candidate whose alpha does best on held-out rows, and how all were judged, that one marked.

    A few hundred rows cannot separate the qualities of neighbouring alphas. So the most stable one is taken of those
    within one standard error of the best quality: the one-standard-error rule of Breiman et al. (1984) with stability
    in place of simplicity. Ties go to the better quality, then to the larger alpha. Without labels, stability decides.
    """
    sign = 1.0 if higher_is_better(trials.judge.metrics[0]) else -1.0
    judgements = [trials.judged(trial)[0] for trial in progress.track(candidates, "choose alpha")]
    qualities = [0.0 if judgement.quality is None else sign * judgement.quality for judgement in judgements]
    best = qualities.index(max(qualities))
    least = qualities[best] - judgements[best].standard_error
    good = [number for number, quality in enumerate(qualities) if quality >= least]
    alphas = [trial.scores.parameters["alpha"] for trial in candidates]
    chosen = max(good, key=lambda number: (judgements[number].stability, qualities[number], alphas[number]))
    tried = [_tried(number, trial, trials, chosen=number == chosen) for number, trial in enumerate(candidates)]
    return candidates[chosen], tuple(tried)


def choose_by_agreement(
    candidates: Sequence[Trial], weights: Sequence[float], trials: Trials, *, progress: Progress = SILENT
) -> tuple[Trial, tuple[Tried, ...]]:
    """Return the candidate that agrees most with the dense model on held-out rows, and how all were judged.

    The best candidate is then judged with other `weights` of tokens. One replaces the best so far if it agrees more
    often by two paired standard errors and its metric is not worse by more than its standard error. A few hundred rows
    cannot tell smaller differences from noise, so the order decides these.
    """
    sign = 1.0 if higher_is_better(trials.judge.metrics[0]) else -1.0

    def is_better(other: Trial, best: Trial) -> bool:
        (judgement, agreement), (best_judgement, best_agreement) = trials.judged(other), trials.judged(best)
        lost = 0.0
        if best_judgement.quality is not None and judgement.quality is not None:
            lost = sign * (best_judgement.quality - judgement.quality)
        agrees_more = clearly_better(agreement, best_agreement, trials.judge.samples)
        return agrees_more and lost <= judgement.standard_error

    for trial in progress.track(candidates, "choose criterion"):
        trials.judged(trial)
    number, chosen = 0, candidates[0]
    for other_number, other in enumerate(candidates[1:], start=1):
        if is_better(other, chosen):
            number, chosen = other_number, other
    weighted = [replace(chosen, token_weights=token_weights) for token_weights in weights]
    for other in weighted:
        if is_better(other, chosen):
            chosen = other
    numbered = [*enumerate(candidates), *((number, trial) for trial in weighted)]
    return chosen, tuple(_tried(n, trial, trials, chosen=trial is chosen) for n, trial in numbered)
