"""Judge predictions: metrics, their standard errors, and the agreement with the dense model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from ..data.batches import GROUP_KEY, Batch, is_of_documents, samples_of
from ..recipe.budget import Budget, Found
from ..tasks import Predictions, Task
from .interval import CONFIDENCE, ratio_ends, share_ends, variance_of_mean
from .metrics import METRICS, check_metrics, find_metric, quality_loss, value_of
from .ranking import Ranked, RankedGroups, RankedTexts, Rankings, RowsKind, kind_of_rows

logger = logging.getLogger(__name__)

# The arguments of a metric: predictions and references, (samples,) each, or (pairs,) of pairs of texts, and options.
_Inputs = tuple[np.ndarray, np.ndarray, dict[str, Any]]
# Bootstrap samples behind the interval of a metric.
_RESAMPLES = 1000
# The index that embeddings are judged on.
Index = Literal["dense", "slim"] | None


@dataclass(frozen=True)
class Quality:
    """How well a model predicts."""

    metrics: Mapping[str, float]  # name -> value
    stability: float  # share, in [0, 1], of predictions that equal the dense model's


@dataclass(frozen=True)
class Judgement:
    """The numbers that pruning plans are compared by, on rows that heads were not scored on."""

    quality: float | None  # the first metric; None if there are no labels
    standard_error: float  # standard error of that metric, for the same number of samples
    stability: float  # share, in [0, 1], of predictions that equal the dense model's


@dataclass(frozen=True)
class Tried:
    """A candidate of `alpha: auto` or `criterion: auto`, cut and refitted by the recipe, judged on held-out rows."""

    candidate: int  # position among the candidates
    criterion: str
    alpha: float | None
    token_weights: float
    quality: float | None  # the first metric; None without labels
    stability: float
    chosen: bool = False


@dataclass(frozen=True)
class Judge:
    """Compare predictions with the labels of some batches and with the dense model's predictions.

    Without labels the dense model's predictions are the reference, so its own metrics are perfect by definition.

    An embedding model or a reranker is judged by its rankings (`ranking.py`). A prediction is then the ranking of a
    query, and equal if its first candidate is the dense model's; what is kept is the first metric, relative to the
    dense model's. Embeddings have two indices: queries search the dense model's vectors of the documents ("dense"), or
    the model's own ("slim"). For pairs of texts with a score, `spearman` and `pearson` ignore the index: both texts
    have the model's own vectors.
    """

    batches: Sequence[Batch]  # the batches to predict
    dense: Predictions  # the dense model's predictions on them
    metrics: tuple[str, ...]  # names of metrics, the most important first
    task: Task  # of the models: what they predict, and when two predictions are the same
    confidence: float = CONFIDENCE  # of its two-sided intervals
    # Number of samples that intervals are computed for; by default, that of the batches. It is set where fewer or more
    # rows than will be judged in the end are used to predict how wide the interval on those will be.
    as_of: int | None = None
    # The index that embeddings are judged on. With "dense", documents of queries need no prediction. None also judges
    # on the dense index, but all rows are predicted, so that `ranking` has the numbers of both indices.
    index: Index = "dense"
    ranked: Ranked | None = None  # what the dense model ranks; by default that of `batches` and `dense`

    def on_dense_index(self) -> Judge:
        """Return a judge of the queries alone, on the dense model's index; itself if it has none or is one already."""
        if self._kind != "queries" or self.ranked is not None:
            return self
        rows = replace(RankedTexts.of(self.dense.values, self.batches, self.task.similarity), only_queries=True)
        batches = [batch for batch in self.batches if not is_of_documents(batch)]
        dense = replace(self.dense, values=self.dense.values[rows.queries])
        return replace(self, batches=batches, dense=dense, index="dense", ranked=rows)

    def of(self, predictions: Predictions) -> Quality:
        """Return all metrics and the stability of predictions of the batches."""
        metrics = {name: _value(name, *self._inputs(name, predictions)) for name in self.metrics}
        return Quality(metrics, self.agreement(predictions).double().mean().item())

    def agreement(self, predictions: Predictions) -> torch.Tensor:
        """Return which predictions equal the dense model's, (predictions,) bool; of rankings, (queries,)."""
        if self._ranked is not None:
            return self.rankings(predictions).top1
        return self.task.same(self.dense, predictions)

    def judgement(self, predictions: Predictions) -> Judgement:
        """Return the first metric of predictions with its bootstrap standard error, and their stability.

        Without labels, there is no metric, unless rankings are judged.
        """
        stability, name = self.agreement(predictions).double().mean().item(), self.metrics[0]
        if self._ranked is None and "labels" not in self.batches[0]:
            return Judgement(None, 0.0, stability)
        inputs = self._inputs(name, predictions)
        return Judgement(_value(name, *inputs), standard_error(name, *inputs), stability)

    def kept(self, predictions: Predictions) -> tuple[float, float]:
        """Return the share that is kept of the dense model's quality, and the lower end of its interval.

        The share is that of predictions that equal the dense model's, unless the first metric has `terms` or rankings
        are judged. It is then the first metric divided by the dense model's; with `terms` its interval is that of
        `ratio_ends`, else the percentile bootstrap's. The interval is for as many samples as `as_of` says.
        """
        share, low, _ = self._kept_interval(predictions, self._scale)
        return share, low

    def found(self, budget: Budget, predictions: Predictions) -> Found:
        """Return what decides whether a promise is kept: `lost` if the budget limits a loss, else `kept`."""
        value, bound = self.lost(predictions) if budget.share is None else self.kept(predictions)
        return Found(value, bound)

    def kept_ends(self, predictions: Predictions) -> tuple[float, float]:
        """Return both ends of the interval of the share that `kept` returns; `as_of` is ignored."""
        _, low, high = self._kept_interval(predictions)
        return low, high

    def agreement_ends(self, predictions: Predictions) -> tuple[float, float]:
        """Return both ends of the interval of the share of predictions that equal the dense model's."""
        return share_ends(self.agreement(predictions), self.samples, self.confidence)

    def _kept_interval(self, predictions: Predictions, scale: float = 1.0) -> tuple[float, float, float]:
        """Return the share of `kept`, and the lower and upper end of its interval for `scale` times the samples."""
        name = self.metrics[0]
        terms = find_metric(name).terms
        if terms is not None:
            given, wanted, _ = self._inputs(name, predictions)
            slim, dense = (torch.from_numpy(np.array(values, np.float64)) for values in terms(given, wanted))
            low, high = ratio_ends(slim, dense, self.confidence, scale=scale)
            return _ratio(name, dense.mean().item(), slim.mean().item()), low, high
        if self._ranked is None:
            same = self.agreement(predictions)
            return same.double().mean().item(), *share_ends(same, self.samples, self.confidence, scale=scale)
        share, resampled = self._bootstrap(_ratio, predictions, scale)
        low, high = np.quantile(resampled, ((1 - self.confidence) / 2, (1 + self.confidence) / 2)).tolist()
        return share, low, high

    def lost(self, predictions: Predictions) -> tuple[float, float]:
        """Return how much worse the first metric is than the dense model's, and the upper end of its interval.

        The interval is the percentile bootstrap's, over samples that are drawn for both models alike.
        """
        loss, resampled = self._bootstrap(quality_loss, predictions, self._scale)
        return loss, float(np.quantile(resampled, (1 + self.confidence) / 2))

    def _bootstrap(
        self, compare: Callable[[str, float, float], float], predictions: Predictions, scale: float
    ) -> tuple[float, list[float]]:
        """Return `compare(name, dense, slim)` of the first metric, on all samples and on each of `_RESAMPLES` sets.

        Each set has `scale` times as many samples; an undefined metric counts as 0.0.
        """
        name = self.metrics[0]
        dense, wanted, options = self._inputs(name, self.dense)
        slim, _, _ = self._inputs(name, predictions)
        generator = np.random.default_rng(0)

        def compared(rows: Any) -> float:
            values = [value_of(name, given[rows], wanted[rows], options) for given in (dense, slim)]
            return compare(name, *(0.0 if math.isnan(value) else value for value in values))

        size = round(len(wanted) * scale)
        resampled = [compared(generator.integers(len(wanted), size=size)) for _ in range(_RESAMPLES)]
        return compared(slice(None)), resampled

    def rankings(self, predictions: Predictions) -> Rankings:
        """Return how the ranking of each query compares with what is relevant and with the dense model's."""
        assert self._ranked is not None
        # The dense model's and the last ones are kept, because callers ask for several numbers of the same in turn.
        key = "dense" if predictions is self.dense else "last"
        if key not in self._cache or self._cache[key][0] is not predictions:
            rankings = self._ranked.rankings(predictions.values, old_index=self.index != "slim")
            self._cache[key] = predictions, rankings
        return self._cache[key][1]

    def ranking(self, predictions: Predictions) -> dict[str, dict[str, float]]:
        """Return the means of `Rankings` by index; empty for models that do not rank.

        `slim_index` has the numbers with every text re-embedded, and `dense_index` those of queries on the dense
        model's vectors; a reranker's are in `candidates`. `slim_index` is missing if only queries were predicted, and
        its `cosine` is that of documents. For pairs, `spearman` is added, the correlation with their scores.
        """
        if self._ranked is None:
            return {}
        by_index = self._ranked.by_index(predictions.values)
        if isinstance(self._ranked, RankedTexts) and self._ranked.pairs is not None:
            for index, means in by_index.items():
                on_dense = index == "dense_index"
                means["spearman"] = _value("spearman", *self._pair_inputs(predictions, old_index=on_dense))
        return by_index

    @property
    def samples(self) -> torch.Tensor | None:
        """Number of the sample that each prediction belongs to, (predictions,); None if each has its own."""
        return None if self.dense.joint else self.dense.sample

    @property
    def _scale(self) -> float:
        """The number of samples that intervals are computed for, as a multiple of those in the batches; see `as_of`."""
        return 1.0 if self.as_of is None else self.as_of / samples_of(self.batches)

    @cached_property
    def _references(self) -> torch.Tensor:
        """The labels of the batches; without labels, the dense model's decisions."""
        labelled = "labels" in self.batches[0]
        return self.task.references(self.batches) if labelled else self.task.decide(self.dense)

    @cached_property
    def _ranked(self) -> Ranked | None:
        """What the dense model ranks; None for a model that does not rank."""
        if self.ranked is not None or self._kind is None:
            return self.ranked
        if GROUP_KEY in self.batches[0]:
            return RankedGroups.of(self.dense.values, self.batches)
        return RankedTexts.of(self.dense.values, self.batches, self.task.similarity)

    @property
    def _kind(self) -> RowsKind | None:
        """What the rows of the batches are to each other; None for a model that does not rank."""
        return kind_of_rows(self.batches, embeds=self.task.predicts == "embeddings")

    @cached_property
    def _cache(self) -> dict[str, tuple[Predictions, Rankings]]:
        """Predictions and their rankings, of the dense model ("dense") and of the model judged last ("last")."""
        return {}

    def _inputs(self, name: str, predictions: Predictions) -> _Inputs:
        """Return the arguments of a metric; a RecipeError refuses one that does not fit them."""
        if self._ranked is None:
            wanted = self.task.decide(self.dense) if find_metric(name).own else self._references
            check_metrics([name], predicts=predictions.kind, trimmed=predictions.characters is not None)
            options = {"num_labels": predictions.values.shape[-1]} if predictions.kind == "classes" else {}
            return *self.task.table(predictions, wanted), options
        check_metrics([name], rows=self._kind)
        if METRICS[name].of == "numbers":
            return self._pair_inputs(predictions)
        return self.rankings(predictions).table, self.rankings(self.dense).table, {}

    def _pair_inputs(self, predictions: Predictions, *, old_index: bool = False) -> _Inputs:
        """Return the arguments of a metric of pairs of texts: their similarities, and the labels of these."""
        assert isinstance(self._ranked, RankedTexts)
        similarities, labels = self._ranked.similarities(predictions.values, old_index=old_index)
        return similarities.numpy(), labels.numpy(), {}


def warn_if_no_better_than_commonest(task: Task, dense: Predictions, batches: Sequence[Batch]) -> None:
    """Warn if the dense model is right no more often than a constant answer: labels may be numbered differently."""
    if task.predicts not in ("classes", "words") or "labels" not in batches[0]:
        return
    labels = task.references(batches)
    right, commonest = (task.decide(dense) == labels).sum().item(), labels.mode().values.item()
    right_by_constant = (labels == commonest).sum().item()
    if right <= right_by_constant < len(labels):
        logger.warning(
            "the dense model is right on %s of %s labels, and always answering the commonest class, %d, on %s: check "
            "that the labels are those that it was trained with, numbered as in its id2label",
            *(f"{right:,}", f"{len(labels):,}", commonest, f"{right_by_constant:,}"),
        )


def _value(name: str, given: np.ndarray, wanted: np.ndarray, options: Mapping[str, Any]) -> float:
    """Return the value of a metric; if it is undefined, log a warning and return 0.0."""
    value = value_of(name, given, wanted, options)
    if not math.isnan(value):
        return value
    logger.warning("%s is undefined: 0.0 is returned", name)
    return 0.0


def standard_error(name: str, given: np.ndarray, wanted: np.ndarray, options: Mapping[str, Any]) -> float:
    """Return the bootstrap standard error of a metric, over 100 resampled sets of as many samples; undefined is 0.0."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(0, len(given), (100, len(given)), generator=generator)
    values = np.array([value_of(name, given[draw], wanted[draw], options) for draw in draws.numpy()])
    return float(np.std(np.where(np.isnan(values), 0.0, values), ddof=1))


def _ratio(name: str, dense: float, slim: float) -> float:
    """Return slim / dense, at least 0; if dense is at most 0, 1 where slim reaches it, else 0; `name` is unused."""
    return max(0.0, slim / dense) if dense > 0 else float(slim >= dense)


def clearly_better(model: torch.Tensor, other: torch.Tensor, samples: torch.Tensor | None = None) -> bool:
    """Return whether `model` agrees more than `other`, (predictions,) bool each, by two paired standard errors.

    Both are a model's `Judge.agreement`; `samples` is as in `interval.lower_share`.
    """
    gained = model.double() - other.double()
    return gained.mean().item() > 2 * variance_of_mean(gained, samples) ** 0.5
