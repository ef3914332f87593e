"""Predict batches with a model, in one process or many: logits, or what a task makes of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.batches import Batch
from ..errors import DataError, NonFiniteError
from ..model.modes import evaluating, output_alone, wide_products
from ..processes import mapped
from ..progress import SILENT, Progress
from ..tasks import Predictions, Task, task_of

# Predicts batches with a model.
Predictor = Callable[[PreTrainedModel, Sequence[Batch]], Predictions]


def predict(
    model: Any, batches: Sequence[Batch], *, task: Task | None = None, progress: Progress = SILENT
) -> Predictions:
    """Return a model's predictions of batches, in evaluation mode and without gradients.

    The model gets no labels and computes no loss; labels of tokens only say which predictions are kept. Every module's
    training flag is put back afterwards. Several processes share the batches, and each gets all predictions. The task
    is by default that of the model's class.

    Raises:
        DataError: There are no batches.
        NonFiniteError: A prediction is NaN or infinite.
    """
    if not batches:
        raise DataError("predict needs at least one batch, got none")
    task = task or task_of(model)
    task.check_batches(batches)
    predict_batch = partial(_kept_output, partial(task.output, model), task, len(batches))
    with evaluating(model), output_alone(model), torch.inference_mode(), wide_products(model):
        kept = mapped(batches, predict_batch, "predict", progress)  # calls predict_batch(index, batch)
    return task.join(kept, batches)


def predict_by(
    forward: Callable[[Batch], torch.Tensor],
    batches: Sequence[Batch],
    task: Task,
    *,
    name: str = "predict",
    progress: Progress = SILENT,
) -> Predictions:
    """Return predictions as `predict` does, in this process alone, of a function from a batch to its logits."""
    task.check_batches(batches)
    tracked = enumerate(progress.track(batches, name))
    return task.join([_kept_output(forward, task, len(batches), index, batch) for index, batch in tracked], batches)


def logits_by(forward: Callable[[Batch], torch.Tensor], batches: Sequence[Batch]) -> torch.Tensor:
    """Return the logits of all batches in one float32 tensor on the CPU; a NonFiniteError refuses NaN and infinity."""
    return torch.cat([_finite((forward(batch),), len(batches), index)[0] for index, batch in enumerate(batches)])


def _kept_output(
    forward: Callable[[Batch], torch.Tensor], task: Task, count: int, index: int, batch: Batch
) -> tuple[torch.Tensor, ...]:
    """Return what the task keeps of the output of batch `index` of `count`, computed part by part (`Task.parts`)."""
    kept = [_finite(task.keep(forward(part), part), count, index) for part in task.parts(batch)]
    return kept[0] if len(kept) == 1 else tuple(torch.cat(values) for values in zip(*kept, strict=True))


def _finite(outputs: tuple[torch.Tensor, ...], count: int, index: int) -> tuple[torch.Tensor, ...]:
    """Move a batch's outputs to the CPU, floats as float32; a NonFiniteError refuses NaN and infinity."""
    if not all(torch.isfinite(values).all() for values in outputs):
        raise NonFiniteError(
            f"logits must be finite, but batch {index} (from 0) of {count} has NaN or infinity; try dtype float32"
        )
    return tuple((values.float() if values.is_floating_point() else values).cpu() for values in outputs)
