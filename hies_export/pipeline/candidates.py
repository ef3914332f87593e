"""Score the units of a prepared model by the criteria that are asked for, and choose among scores."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ..calibrate.moments import MomentStream
from ..calibrate.statistics import DEFAULT_NEEDS, Statistics, collect_statistics
from ..data.batches import Batch, size_of
from ..evaluate.judge import Judgement, Tried, clearly_better
from ..evaluate.metrics import higher_is_better
from ..model.tokens import count_tokens
from ..progress import SILENT, Progress
from ..score.compensated import score_compensated
from ..score.criteria import AUTO, COMPENSATED, COMPENSATED_NAMES, Scores, needs_of, score_units, uses_alpha
from ..units.units import Selection
from .prepare import Prepared
from .recipe import PruneSection
from .search import HeldOut

logger = logging.getLogger(__name__)

# The alphas that `alpha: auto` tries.
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# Criteria that `criterion: auto` tries beside `compensated`, and the alphas of HIES. Fewer alphas than `alpha: auto`
# tries, because each is cut and refitted.
AUTO_CRITERIA = ("fisher", "hies", "his")
AUTO_ALPHAS = (0.3, 0.6, 0.9, 0.99)
# Tokens whose gradients greedy removal uses, if there are enough unlabelled rows: with half of its FLOPs, MiniLM
# fine-tuned on STS-B kept 90 % of the predictions with 7,000 tokens, and 94 % with 14,000 (dev/LOG.md).
EFFECT_TOKENS = 16384


@dataclass(frozen=True)
class Candidates:
    """The scores that units can be chosen by; statistics and the greedy order are computed once."""

    prepared: Prepared
    options: PruneSection
    progress: Progress
    moments: MomentStream | None = None  # of the model's consumers, if its compensation rows were read already

    @cached_property
    def statistics(self) -> Statistics:
        """The statistics of the calibration rows."""
        self.progress.stage("score units: calibration rows forward and backward")
        tried = AUTO_CRITERIA if self.options.criterion == AUTO else (self.options.criterion,)
        return collect_statistics(
            self.prepared.model,
            self.prepared.rows.calibration,
            self.prepared.scored,
            needs=(*DEFAULT_NEEDS, *needs_of(*tried)),
            progress=self.progress,
        )

    def by(self, criterion: str) -> list[Scores]:
        """Return the scores to choose from: one per alpha under `alpha: auto`, more for the criterion `auto`."""
        options = self.options
        if criterion in COMPENSATED_NAMES:
            return [self.compensated]
        if criterion == AUTO:
            kinds = set(options.modules)
            simple = [
                self._by(name, alpha)
                for name in AUTO_CRITERIA
                if name != "hies" or ("attention" in kinds and "entropy" in self.statistics.values)
                for alpha in (AUTO_ALPHAS if name == "hies" else (0.0,))
            ]
            # The first is taken unless another is clearly better. It assumes a refit.
            return [self.compensated, *simple] if options.compensation else [*simple, self.compensated]
        if not isinstance(options.alpha, str):
            return [self._by(criterion, options.alpha)]
        return [self._by(criterion, alpha) for alpha in (ALPHAS if uses_alpha(criterion) else (0.0,))]

    def _by(self, criterion: str, alpha: float) -> Scores:
        return score_units(
            self.statistics,
            self.prepared.scored,
            criterion=criterion,
            alpha=alpha,
            normalize=self.options.normalize,
            seed=self.prepared.seed,
        )

    @cached_property
    def effect_batches(self) -> list[Batch]:
        """The batches whose gradients greedy removal takes.

        These are the calibration rows. If they have fewer than `EFFECT_TOKENS` tokens, rows to refit on are added until
        that number is reached. Both are drawn in the same order. Where labels say what is predicted, as those of a
        language model do, only calibration rows are used.
        """
        calibration, more = self.prepared.rows.calibration, self.prepared.rows.compensation
        if self.prepared.task.places_by_labels or sum(map(size_of, more)) <= sum(map(size_of, calibration)):
            return calibration
        enough: list[Batch] = []
        samples = tokens = 0
        for batch in more:
            if samples >= sum(map(size_of, calibration)) and tokens >= EFFECT_TOKENS:
                break
            enough.append(batch)
            samples, tokens = samples + size_of(batch), tokens + count_tokens(self.prepared.model, batch)
        return enough

    @cached_property
    def compensated(self) -> Scores:
        """The scores of greedy removal, module by module within the memory limit of the compensation."""
        prepared, how = self.prepared, self.options.compensation
        limit = None if how is None else how.limit_bytes
        moments = self.moments
        if moments is None and (rows := prepared.rows.compensation):
            moments = MomentStream(prepared.model, prepared.scored, rows, limit_bytes=limit, progress=self.progress)
        self.progress.stage("rank units by greedy removal")
        return score_compensated(
            prepared.model,
            self.effect_batches,
            prepared.scored,
            moments=moments,
            per_sample=not prepared.task.generative,
            limit_bytes=limit,
            progress=self.progress,
        )


def criterion_of(scores: Scores, options: PruneSection) -> str:
    """Return the name of the criterion of scores, as the options spell it if they name one."""
    same = scores.criterion == COMPENSATED and options.criterion in COMPENSATED_NAMES
    return options.criterion if same else scores.criterion


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
    sign = 1.0 if higher_is_better(held_out.metric) else -1.0

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
