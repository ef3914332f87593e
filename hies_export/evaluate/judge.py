"""Judge predictions: metrics, their standard error, and the agreement with the dense model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import FiniteFloat

from ..data.batches import Batch
from ..data.targets import samples_of
from ..errors import DataError
from ..progress import SILENT, Progress
from .interval import CONFIDENCE, lower_share, share_ends, variance_of_mean
from .metrics import METRICS, check_metrics, quality_loss
from .predict import ChoicePredictions, Predictions, TokenPredictions, predict, predicted, references

logger = logging.getLogger(__name__)


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
class AlphaPoint:
    """How a candidate of `alpha: auto` was judged on held-out rows, as in `Judgement`."""

    alpha: FiniteFloat
    quality: float | None
    standard_error: float
    stability: FiniteFloat


@dataclass(frozen=True)
class Tried:
    """A candidate of `criterion: auto`, cut at the budget, refitted and judged on held-out rows.

    `candidate` is its position among them, `quality` the first metric, None without labels.
    """

    candidate: int
    criterion: str
    alpha: float | None
    steps: int
    token_weights: float
    quality: float | None
    stability: float
    chosen: bool = False


@dataclass(frozen=True)
class Judge:
    """Compares predictions with the labels of some batches and with the dense model's predictions.

    Without labels the dense model's predictions are the reference, so its own metrics are perfect by definition.
    """

    batches: Sequence[Batch]  # the batches to predict
    dense: Predictions  # the dense model's predictions on them
    metrics: tuple[str, ...]  # names of metrics, the most important first
    regression: bool = False  # whether the logit is the prediction, rather than the class of the largest one
    tolerance: float = 0.25  # largest absolute difference, in units of the label, at which two numbers count as equal
    confidence: float = CONFIDENCE  # of its two-sided intervals
    # Number of samples that intervals are to be as narrow as; None for those of the batches. It predicts, from other
    # rows, the interval of as many held-out ones.
    as_of: int | None = None

    @classmethod
    def on(
        cls,
        model: Any,
        batches: Sequence[Batch],
        *,
        metrics: tuple[str, ...],
        regression: bool = False,
        tolerance: float = 0.25,
        confidence: float = CONFIDENCE,
        as_of: int | None = None,
        progress: Progress = SILENT,
    ) -> Judge:
        """Run the dense model over the batches, and return the judge of other models on them."""
        dense = predict(model, batches, progress=progress)
        return cls(batches, dense, metrics, regression, tolerance, confidence, as_of)

    def of(self, predictions: Predictions) -> Quality:
        """Return all metrics and the stability of predictions of the batches."""
        metrics = compute_metrics(predictions, self._references, names=self.metrics, regression=self.regression)
        return Quality(metrics, self._stability(predictions))

    def agreement(self, predictions: Predictions) -> torch.Tensor:
        """Return which predictions equal the dense model's, (predictions,) bool."""
        return agreement(self.dense, predictions, regression=self.regression, tolerance=self.tolerance)

    def judgement(self, predictions: Predictions) -> Judgement:
        """Return the first metric of predictions with its bootstrap standard error, and their stability."""
        share = self._stability(predictions)
        if not self._labelled:
            return Judgement(None, 0.0, share)
        name, options = self.metrics[0], {"regression": self.regression}
        quality = compute_metrics(predictions, self._references, names=[name], **options)[name]
        return Judgement(quality, standard_error(predictions, self._references, name=name, **options), share)

    def kept(self, predictions: Predictions) -> tuple[float, float]:
        """Return the share of predictions that equal the dense model's, and the lower end of its interval."""
        same = self.agreement(predictions)
        return same.double().mean().item(), lower_share(same, self.samples, self.confidence, scale=self._scale)

    def kept_ends(self, predictions: Predictions) -> tuple[float, float]:
        """Return both ends of the interval of that share."""
        return share_ends(self.agreement(predictions), self.samples, self.confidence)

    def lost(self, predictions: Predictions, *, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """Return how much worse the first metric is than the dense model's, and the upper end of its interval.

        The interval is the percentile bootstrap's, over samples that are drawn for both models alike.
        """
        name, regression = self.metrics[0], self.regression

        def inputs(of: Predictions) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
            return _metric_inputs(of, self._references, names=[name], regression=regression)

        (dense, wanted, options), (slim, _, _) = inputs(self.dense), inputs(predictions)
        generator = np.random.default_rng(seed)

        def loss(rows: Any) -> float:
            values = [METRICS[name].compute(given[rows], wanted[rows], **options) for given in (dense, slim)]
            return quality_loss(name, *(0.0 if math.isnan(value) else value for value in values))

        size = round(len(wanted) * self._scale)
        losses = [loss(generator.integers(len(wanted), size=size)) for _ in range(resamples)]
        return loss(slice(None)), float(np.quantile(losses, (1 + self.confidence) / 2))

    @property
    def samples(self) -> torch.Tensor | None:
        """Sample of every prediction; None if each has its own."""
        of_tokens = isinstance(self.dense, TokenPredictions) and not self.dense.answers
        return self.dense.sample if of_tokens else None  # type: ignore[union-attr]

    @property
    def _scale(self) -> float:
        return 1.0 if self.as_of is None else self.as_of / samples_of(self.batches)

    @property
    def _labelled(self) -> bool:
        return "labels" in self.batches[0]

    @cached_property
    def _references(self) -> torch.Tensor:
        return references(self.batches) if self._labelled else predicted(self.dense, regression=self.regression)

    def _stability(self, predictions: Predictions) -> float:
        return self.agreement(predictions).double().mean().item()


def compute_metrics(
    predictions: Predictions, references: torch.Tensor, *, names: Sequence[str], regression: bool = False
) -> dict[str, float]:
    """Compute metrics of predictions, by name. An undefined one is 0.0, and a warning is logged."""
    given, wanted, options = _metric_inputs(predictions, references, names=names, regression=regression)
    values: dict[str, float] = {}
    for name in names:
        values[name] = METRICS[name].compute(given, wanted, **options)
        if math.isnan(values[name]):
            values[name] = 0.0
            sides = {"predictions": given, "references": wanted}
            constant = [side for side, array in sides.items() if (array == array[:1]).all()]
            reason = f" because all {constant[0]} are equal" if constant else ""
            logger.warning("%s is undefined%s: 0.0 is returned", name, reason)
    return values


def standard_error(
    predictions: Predictions,
    references: torch.Tensor,
    *,
    name: str,
    regression: bool = False,
    resamples: int = 100,
    seed: int = 0,
) -> float:
    """Return the bootstrap standard error of a metric: its standard deviation over resampled sets of samples.

    Every set has the original number of samples; an undefined metric counts as 0.0.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, len(predictions), (resamples, len(predictions)), generator=generator)
    given, wanted, options = _metric_inputs(predictions, references, names=[name], regression=regression)
    values = np.array([METRICS[name].compute(given[draw], wanted[draw], **options) for draw in draws.numpy()])
    return float(np.std(np.where(np.isnan(values), 0.0, values), ddof=1))


def _metric_inputs(
    predictions: Predictions, references: torch.Tensor, *, names: Sequence[str], regression: bool
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return the inputs of metrics, predictions and references of (samples,) and options, after a check."""
    if isinstance(predictions, TokenPredictions):
        check_metrics(names, task="text-generation")
        if len(predictions.tokens) != len(references):
            raise DataError(
                f"every label token needs a reference, got {len(predictions.tokens)} predictions and "
                f"{len(references)} references"
            )
        rows = np.empty(len(predictions), dtype=[("nll", np.float64), ("right", np.int64)])
        rows["nll"] = predictions.per_sample(predictions.nll)
        rows["right"] = predictions.per_sample(predictions.tokens == references)
        return rows, predictions.per_sample(torch.ones_like(predictions.nll)).long().numpy(), {}
    if isinstance(predictions, ChoicePredictions):
        check_metrics(names, task="text-generation", choices=True)
        rows = np.empty(len(predictions), dtype=[("likeliest", np.int64), ("per_character", np.int64)])
        rows["likeliest"], rows["per_character"] = predictions.chosen, predictions.chosen_per_character
        return rows, references.numpy(), {}
    check_metrics(names, regression=regression)
    if len(predictions) != len(references):
        raise DataError(
            f"every sample needs a reference, got {len(predictions)} logits and {len(references)} references"
        )
    found = predicted(predictions, regression=regression)
    if regression:
        return found.double().numpy(), references.double().numpy(), {}
    return found.numpy(), references.numpy(), {"num_labels": predictions.shape[-1]}


def agreement(
    dense: Predictions, other: Predictions, *, regression: bool = False, tolerance: float = 0.25
) -> torch.Tensor:
    """Return which predictions equal the dense model's, (predictions,) bool.

    A prediction is a sample's class, its number, its choice, or all tokens of its answer; in plain text it is a token.
    Numbers count as equal up to `tolerance`, in units of the label.
    """
    if isinstance(dense, TokenPredictions) and isinstance(other, TokenPredictions):
        if not torch.equal(dense.sample, other.sample) or len(dense) == 0:
            raise DataError(
                f"stability compares predictions of the same samples, got {len(dense.tokens)} and "
                f"{len(other.tokens)} tokens of {len(dense)} and {len(other)}"
            )
        differ = dense.tokens != other.tokens
        return dense.per_sample(differ) == 0 if dense.answers else ~differ
    if isinstance(dense, ChoicePredictions) and isinstance(other, ChoicePredictions):
        dense, other = dense.log_likelihoods, other.log_likelihoods
    assert isinstance(dense, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    if dense.shape != other.shape or len(dense) == 0:
        raise DataError(
            f"stability compares logits of the same samples, got shapes {tuple(dense.shape)} and {tuple(other.shape)}"
        )
    one, two = (predicted(logits, regression=regression) for logits in (dense, other))
    return (one - two).abs() <= tolerance if regression else one == two


def stability(dense: Predictions, other: Predictions, *, regression: bool = False, tolerance: float = 0.25) -> float:
    """Return the share, in [0, 1], of predictions that equal the dense model's; see `agreement`."""
    return agreement(dense, other, regression=regression, tolerance=tolerance).double().mean().item()


def clearly_better(one: torch.Tensor, other: torch.Tensor, samples: torch.Tensor | None = None) -> bool:
    """Return whether one model's `agreement` is above another's, beyond two paired standard errors.

    Tokens of one text are not independent: `samples` says which sample each prediction belongs to, (predictions,)
    int64; None if each has its own.
    """
    gained = one.double() - other.double()
    return gained.mean().item() > 2 * variance_of_mean(gained, samples) ** 0.5
