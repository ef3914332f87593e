"""The evaluation stage: logits of batches, metrics of logits, and the agreement of two models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .errors import DataError, NonFiniteError
from .metrics import check_metrics, load_metric
from .modes import evaluating

Batch = Mapping[str, torch.Tensor]
Progress = Callable[[Sequence[Any]], Iterable[Any]]


def predict(model: Any, batches: Sequence[Batch], *, progress: Progress | None = None) -> torch.Tensor:
    """Run a model over batches, in evaluation mode and without gradients.

    The labels are left out, so no loss is computed. Every module's training flag is put back afterwards.

    Args:
        model: A classification or regression model; the batches are moved to its device.
        batches: What `make_batches` returned.
        progress: Wraps the iteration over the batches, for example in a progress bar.

    Returns:
        The logits, (samples, labels), float32, on the CPU.

    Raises:
        DataError: there are no batches.
        NonFiniteError: a logit is NaN or infinite; the message names the batch.
    """
    if not batches:
        raise DataError("predict needs at least one batch, got none")
    device = next(model.parameters()).device
    logits = []
    with evaluating(model), torch.inference_mode():
        for index, batch in enumerate(progress(batches) if progress else batches):
            inputs = {key: value.to(device) for key, value in batch.items() if key != "labels"}
            output = model(**inputs).logits  # (batch, labels)
            if not torch.isfinite(output).all():
                raise NonFiniteError(
                    f"logits must be finite, but batch {index} (from 0) of {len(batches)} has NaN or "
                    f"infinity; try dtype float32"
                )
            logits.append(output.float().cpu())
    # Outside inference mode, so that the result may take part in a backward pass.
    return torch.cat(logits)


def references(batches: Sequence[Batch]) -> torch.Tensor:
    """Return the labels of batches in one tensor, (samples,): int64 classes, or float32 for regression.

    Raises:
        DataError: the batches have no labels.
    """
    if not batches or any("labels" not in batch for batch in batches):
        raise DataError("metrics need labels, but the batches have none; name the column in data.label")
    return torch.cat([batch["labels"].cpu() for batch in batches])


def compute_metrics(
    logits: torch.Tensor, references: torch.Tensor, *, names: Sequence[str], regression: bool
) -> dict[str, float]:
    """Compute metrics of logits.

    Args:
        logits: (samples, labels); for regression (samples, 1).
        references: (samples,).
        names: Names of metrics.
        regression: Whether the logit is the prediction, rather than the class of the largest one.

    Returns:
        Name -> value, in the order of names.

    Raises:
        RecipeError: a metric does not exist or does not fit the model.
        DataError: logits and references are not of the same number of samples.
    """
    check_metrics(names, regression=regression)
    if len(logits) != len(references):
        raise DataError(f"every sample needs a reference, got {len(logits)} logits and {len(references)} references")
    predictions = _predictions(logits, regression=regression).numpy()
    results: dict[str, float] = {}
    for name in names:
        metric = load_metric(name)
        results |= metric.compute(predictions=predictions, references=references.numpy(), num_labels=logits.shape[-1])
    return results


def standard_error(
    logits: torch.Tensor, references: torch.Tensor, *, name: str, regression: bool, resamples: int = 100, seed: int = 0
) -> float:
    """Bootstrap standard error of a metric: its standard deviation over resampled sets of as many samples.

    Args:
        logits: (samples, labels).
        references: (samples,).
        name: Name of the metric.
        regression: As in `compute_metrics`.
        resamples: How many sets are drawn.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, len(logits), (resamples, len(logits)), generator=generator)
    values = [compute_metrics(logits[d], references[d], names=[name], regression=regression)[name] for d in draws]
    return torch.tensor(values, dtype=torch.float64).std().item()


def stability(
    dense_logits: torch.Tensor, other_logits: torch.Tensor, *, regression: bool, tolerance: float = 0.25
) -> float:
    """Return the share of samples, in [0, 1], whose prediction equals the dense model's.

    Args:
        dense_logits: (samples, labels).
        other_logits: (samples, labels), of the same samples in the same order.
        regression: Compare numbers rather than classes.
        tolerance: Largest absolute difference, in units of the label, at which two numbers count as equal.

    Raises:
        DataError: the logits differ in shape, or there are none.
    """
    if dense_logits.shape != other_logits.shape or len(dense_logits) == 0:
        raise DataError(
            f"stability compares logits of the same samples, got shapes {tuple(dense_logits.shape)} and "
            f"{tuple(other_logits.shape)}"
        )
    dense = _predictions(dense_logits, regression=regression)
    other = _predictions(other_logits, regression=regression)
    same = (dense - other).abs() <= tolerance if regression else dense == other
    return same.double().mean().item()


def _predictions(logits: torch.Tensor, *, regression: bool) -> torch.Tensor:
    """(samples, labels) -> (samples,): the number itself, or the class of the largest logit."""
    return logits.flatten() if regression else logits.argmax(dim=-1)
