"""Predict batches with a model, in one process or many: logits, or what a task makes of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.batches import Batch
from ..errors import DataError, NonFiniteError
from ..model.modes import evaluating, output_alone
from ..model.threads import threads_for
from ..processes import mapped
from ..progress import SILENT, Progress
from ..tasks import Behaviour
from ..tasks.by_shape import BY_SHAPE
from ..tasks.models import behaviour_of
from ..tasks.predictions import Predictions

# Predicts batches with a model.
Predictor = Callable[[PreTrainedModel, Sequence[Batch]], Predictions]


def predict(model: Any, batches: Sequence[Batch], *, progress: Progress = SILENT) -> Predictions:
    """Run a model over batches, in evaluation mode and without gradients.

    The labels are left out, so the model computes no loss; token labels say which predictions count. Every module's
    training flag is put back afterwards. Several processes share the batches, and all have all predictions.

    Returns the logits, (samples, labels), float32, on the CPU, or what the model's behaviour makes of them.
    """
    behaviour = behaviour_of(model)
    _check(batches, behaviour)
    forward = partial(behaviour.prediction, model)
    with evaluating(model), output_alone(model), torch.inference_mode(), threads_for(model, batches):
        kept = mapped(batches, partial(_kept, forward, behaviour, len(batches)), "predict", progress)
    return behaviour.joined(kept, batches)


def predict_by(forward: Callable[[Batch], torch.Tensor], batches: Sequence[Batch], behaviour: Behaviour) -> Predictions:
    """Predict batches as `predict` does, in this process alone, by a function from a batch to its prediction."""
    _check(batches, behaviour)
    kept = [_kept(forward, behaviour, len(batches), index, batch) for index, batch in enumerate(batches)]
    return behaviour.joined(kept, batches)


def _check(batches: Sequence[Batch], behaviour: Behaviour) -> None:
    if not batches:
        raise DataError("predict needs at least one batch, got none")
    behaviour.check(batches)


def _kept(
    forward: Callable[[Batch], torch.Tensor], behaviour: Behaviour, count: int, index: int, batch: Batch
) -> tuple[torch.Tensor, ...]:
    """Return what the behaviour keeps of the prediction of a batch, on the CPU."""
    kept = behaviour.kept(forward(batch), batch)
    if not all(torch.isfinite(values).all() for values in kept):
        raise NonFiniteError(
            f"logits must be finite, but batch {index} (from 0) of {count} has NaN or infinity; try dtype float32"
        )
    return tuple((values.float() if values.is_floating_point() else values).cpu() for values in kept)


def references(batches: Sequence[Batch], behaviour: Behaviour = BY_SHAPE) -> torch.Tensor:
    """Return the labels of batches in one tensor, as the behaviour compares them."""
    if not batches or any("labels" not in batch for batch in batches):
        raise DataError("metrics need labels, but the batches have none; name the column in data.label")
    return behaviour.references(batches)
