"""Judge predictions: metrics, their standard error, and the agreement with the dense model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import DataError
from .metrics import check_metrics, load_metric
from .predict import Predictions, TokenPredictions, predicted


def compute_metrics(
    predictions: Predictions, references: torch.Tensor, *, names: Sequence[str], regression: bool = False
) -> dict[str, float]:
    """Compute metrics of predictions.

    Args:
        predictions: From `predict`.
        references: From `references`.
        names: Names of metrics.
        regression: Whether the logit is the prediction, rather than the class of the largest one.

    Returns:
        Name -> value, in the order of names.

    Raises:
        RecipeError: a metric does not exist or does not fit the model.
        DataError: predictions and references are not of the same number of samples or tokens.
    """
    given, wanted, options = _given_to_metrics(predictions, references, names=names, regression=regression)
    results: dict[str, float] = {}
    for name in names:
        results |= load_metric(name).of_arrays(given, wanted, **options)
    return results


def standard_error(
    predictions: Predictions,
    references: torch.Tensor,
    *,
    name: str,
    regression: bool = False,
    resamples: int = 100,
    seed: int = 0,
) -> float:
    """Bootstrap standard error of a metric: its standard deviation over resampled sets of as many samples.

    Args:
        predictions: From `predict`.
        references: From `references`.
        name: Name of the metric.
        regression: As in `compute_metrics`.
        resamples: How many sets are drawn.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, len(predictions), (resamples, len(predictions)), generator=generator)
    given, wanted, options = _given_to_metrics(predictions, references, names=[name], regression=regression)
    metric = load_metric(name)
    values = [metric.of_arrays(given[draw], wanted[draw], **options)[name] for draw in draws.numpy()]
    return float(np.std(values, ddof=1))


def _given_to_metrics(
    predictions: Predictions, references: torch.Tensor, *, names: Sequence[str], regression: bool
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """What metrics take as predictions and references, (samples,) each, after checking that all of it fits."""
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
    check_metrics(names, regression=regression)
    if len(predictions) != len(references):
        raise DataError(
            f"every sample needs a reference, got {len(predictions)} logits and {len(references)} references"
        )
    found = predicted(predictions, regression=regression)
    # Numbers as `evaluate` hands them to a metric.
    given, wanted = (part.double() if part.is_floating_point() else part for part in (found, references))
    return given.numpy(), wanted.numpy(), {"num_labels": predictions.shape[-1]}


def stability(dense: Predictions, other: Predictions, *, regression: bool = False, tolerance: float = 0.25) -> float:
    """Return the share, in [0, 1], of predictions that equal the dense model's.

    They are counted per sample: its class, its number, or all tokens of its answer; of plain text, per token.

    Args:
        dense: From `predict`.
        other: From `predict`, of the same samples in the same order.
        regression: Compare numbers rather than classes.
        tolerance: Largest absolute difference, in units of the label, at which two numbers count as equal.

    Raises:
        DataError: the predictions differ in shape, or there are none.
    """
    if isinstance(dense, TokenPredictions) and isinstance(other, TokenPredictions):
        if not torch.equal(dense.sample, other.sample) or len(dense) == 0:
            raise DataError(
                f"stability compares predictions of the same samples, got {len(dense.tokens)} and "
                f"{len(other.tokens)} tokens of {len(dense)} and {len(other)}"
            )
        differ = dense.tokens != other.tokens
        same = dense.per_sample(differ) == 0 if dense.answers else ~differ
        return same.double().mean().item()
    assert isinstance(dense, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    if dense.shape != other.shape or len(dense) == 0:
        raise DataError(
            f"stability compares logits of the same samples, got shapes {tuple(dense.shape)} and {tuple(other.shape)}"
        )
    one, two = (predicted(logits, regression=regression) for logits in (dense, other))
    same = (one - two).abs() <= tolerance if regression else one == two
    return same.double().mean().item()
