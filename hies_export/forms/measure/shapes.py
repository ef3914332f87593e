"""Choose the shapes to measure a model at, and refuse those at which it does not run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ...errors import RequestError, quoted, root_cause
from ...model.tokens import longest_sequence, sequence_length, synthetic_batch
from .counts import Shape, count_flops

# More tokens than any machine runs at once; a larger batch would fill the memory before a model sees it.
MOST_TOKENS = 2**24


def model_shapes(model: PreTrainedModel, shapes: Sequence[Sequence[int]]) -> list[Shape]:
    """Return the (batch, sequence) pairs to measure. For an image model, the sequence follows from the image size.

    Raises RequestError if the shape of a text model has no sequence, or one longer than its positions, or a shape has
    more than `MOST_TOKENS`.
    """
    for shape in shapes:
        if math.prod(shape) > MOST_TOKENS:
            raise RequestError(f"a shape must have at most {MOST_TOKENS:,} tokens or images, got {quoted(list(shape))}")
    if model.main_input_name == "pixel_values":
        image = synthetic_batch(model, batch=1)
        check_runs(model, image, "one random image")
        tokens = sequence_length(model, image)
        return [(batch, tokens) for batch in dict.fromkeys(shape[0] for shape in shapes or ((1,), (8,)))]
    for shape in shapes:
        if len(shape) != 2:
            raise RequestError(f"a text model's shape must be batch and sequence, got {list(shape)}")
        synthetic_batch(model, batch=1, sequence=shape[1])
    if shapes:
        return [(shape[0], shape[1]) for shape in shapes]
    sequence = min(128, longest_sequence(model.config) or 128)
    return [(1, sequence), (8, sequence)]


def check_runs(model: PreTrainedModel, batch: Mapping[str, Any], what: str) -> None:
    """Refuse, by a RequestError, a model that raises an error on a batch, which `what` names.

    It is tried on tensors without data if the model's forward can do without.
    """
    try:
        count_flops(model, batch)
    except Exception as error:  # whatever a model's code raises on inputs it does not expect
        raise RequestError(
            f"a model must run on {what}, but {type(model).__name__} raises {root_cause(error)}"
        ) from error


def check_shapes(model: PreTrainedModel, batches: Mapping[Shape, Mapping[str, Any]]) -> None:
    """Refuse a model that does not run on the largest of the batches to be measured; see `check_runs`."""
    size, sequence = max(batches)
    check_runs(model, batches[size, sequence], f"{size} x {sequence} random inputs to be measured")
