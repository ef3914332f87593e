"""Choose the shapes to measure a model at, and refuse those at which it does not run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.processors import image_shape_of, load_processor
from ..errors import DataError, RequestError, quoted, root_cause
from ..model.tokens import longest_sequence, sequence_length, synthetic_batch
from ..tasks import TASKS
from .counts import Shape, count_flops

# More tokens than any machine runs at once; a larger batch would fill the memory before a model sees it.
MOST_TOKENS = 2**24
# Tokens to a multiple of which the length of a data set's rows is rounded up.
ROUNDED = 8


def row_length(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of tokens that stands for the rows of batches of text where a request names none.

    It is the median, rounded up to a multiple of `ROUNDED`, at most the model's longest sequence. None for images,
    whose size gives the tokens.
    """
    if model.main_input_name == "pixel_values":
        return None
    lengths: list[int] = []
    for batch in batches:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).flatten(0, -2)
        # Documents are embedded once, and queries while somebody waits, so these alone count.
        is_query = batch["query"] >= 0 if "query" in batch else torch.ones(len(mask), dtype=torch.bool)
        lengths += mask[is_query].sum(-1).tolist()
    longest = longest_sequence(model.config) or math.inf
    return int(min(ROUNDED * math.ceil(statistics.median(lengths) / ROUNDED), longest))


def model_shapes(
    model: PreTrainedModel,
    shapes: Sequence[Sequence[int]],
    *,
    sequence: int | None = None,
    image: Sequence[int] | None = None,
) -> list[Shape]:
    """Return the (batch, sequence) pairs to measure; for an image model, the sequence follows from the image's shape.

    By default, the `image`, (channels, height, width), has the size in the config, and the shapes are a batch of 1 and
    of 8, of `sequence` tokens (128, or the most that the model takes).

    Raises RequestError for a text's shape without a sequence, or with one that is too long, or by `check_sizes`.
    """
    check_sizes(shapes)
    if model.main_input_name == "pixel_values":
        one_image = synthetic_batch(model, batch=1, image=image)
        check_runs(model, one_image, f"one random image of {' x '.join(map(str, one_image['pixel_values'].shape[1:]))}")
        tokens = sequence_length(model, one_image)
        return [(rows, tokens) for rows in dict.fromkeys(shape[0] for shape in shapes or ((1,), (8,)))]  # each once
    for shape in shapes:
        if len(shape) != 2:
            raise RequestError(f"a text model's shape must be batch and sequence, got {list(shape)}")
        synthetic_batch(model, batch=1, sequence=shape[1])  # refuses a sequence that is too long
    if shapes:
        return [(shape[0], shape[1]) for shape in shapes]
    sequence = sequence or min(128, longest_sequence(model.config) or 128)
    return [(1, sequence), (8, sequence)]


def check_sizes(shapes: Sequence[Sequence[int]]) -> None:
    """Refuse, by a RequestError, shapes of no rows or tokens, or of more than `MOST_TOKENS`."""
    for shape in shapes:
        if min(shape) < 1:
            raise RequestError(f"a shape must have at least 1 row and 1 token, got {quoted(list(shape))}")
        if math.prod(shape) > MOST_TOKENS:
            raise RequestError(f"a shape must have at most {MOST_TOKENS:,} tokens or images, got {quoted(list(shape))}")


def image_shape_at(folder: str | Path, model: PreTrainedModel) -> tuple[int, ...] | None:
    """Return `image_shape_of` for the processor in a model's folder; None without one, or for a model of text."""
    if model.main_input_name == "pixel_values":
        with suppress(DataError):
            return image_shape_of(load_processor(folder, task=TASKS["image-classification"]), model)
    return None


def check_runs(model: PreTrainedModel, batch: Mapping[str, Any], what: str) -> None:
    """Refuse, by a RequestError, a model that raises an error on a batch; the message calls the batch `what`.

    The batch has no data, only shapes, unless the model's forward reads the data.
    """
    try:
        count_flops(model, batch)
    except Exception as error:  # whatever a model's code raises on inputs it does not expect
        raise RequestError(
            f"a model must run on {what}, but {type(model).__name__} raises {root_cause(error)}"
        ) from error


def check_shapes(model: PreTrainedModel, batches: Mapping[Shape, Mapping[str, Any]]) -> None:
    """Refuse a model that does not run on the largest of the batches to be measured; see `check_runs`."""
    rows, tokens = max(batches)
    check_runs(model, batches[rows, tokens], f"{rows} x {tokens} random inputs to be measured")
