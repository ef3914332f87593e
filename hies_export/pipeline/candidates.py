"""Score the units of a prepared model by the criteria that are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..calibrate.collect import DEFAULT_NEEDS, collect_statistics
from ..calibrate.moments import MomentStream
from ..calibrate.stream import LIMIT_BYTES
from ..data.batches import Batch
from ..data.targets import size_of
from ..model.tokens import count_tokens
from ..progress import Progress
from ..recipe import PruneSection
from ..score.compensated import score_compensated
from ..score.criteria import AUTO, COMPENSATED, COMPENSATED_NAMES, needs_of, score_units, uses_alpha
from ..values import Scores, Statistics
from .prepare import Prepared
from .search import ALPHAS

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
                if name != "hies" or "attention" in kinds
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
        that number is reached. Both are drawn in the same order. For a language model only calibration rows are used,
        because its prediction depends on the labels.
        """
        calibration, more = self.prepared.rows.calibration, self.prepared.rows.compensation
        if self.prepared.task.generative or sum(map(size_of, more)) <= sum(map(size_of, calibration)):
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
        limit = LIMIT_BYTES if how is None else how.limit_bytes
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
