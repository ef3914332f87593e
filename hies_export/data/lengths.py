"""Group samples of similar length into batches: models spend as much time on padding as on tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .targets import IGNORED


def by_length(batches: Sequence[dict[str, Tensor]], *, config: Any) -> list[dict[str, Tensor]]:
    """Make batches of the same samples and sizes, shortest samples first, padded no further than they need.

    Batches are of text: tensors like `attention_mask`, (batch, tokens), or (batch,), padded on either side by the
    config's padding token. Others (images, images with text) are returned as they are. Samples of equal length keep
    their order. A model predicts the same for each of them.
    """
    if not batches or not all(_is_text(batch) for batch in batches):
        return list(batches)
    samples = [
        {key: value[row] for key, value in batch.items()} for batch in batches for row in range(len(batch["input_ids"]))
    ]
    lengths = [int(sample["attention_mask"].sum()) for sample in samples]
    left = any(bool((batch["attention_mask"][:, 0] == 0).any()) for batch in batches)
    pad = getattr(config.get_text_config(), "pad_token_id", None) or 0
    fill = {"input_ids": pad, "labels": IGNORED}
    order = sorted(range(len(samples)), key=lambda i: lengths[i])
    size = max(len(batch["input_ids"]) for batch in batches)
    found = []
    for start in range(0, len(order), size):
        chosen = [samples[i] for i in order[start : start + size]]
        width = max(lengths[i] for i in order[start : start + size])
        columns = {
            key: [_fitted(sample[key], sample["attention_mask"], width, fill.get(key, 0), left) for sample in chosen]
            for key in chosen[0]
        }
        found.append({key: torch.stack(rows) for key, rows in columns.items()})
    return found


def _is_text(batch: Mapping[str, Tensor]) -> bool:
    mask = batch.get("attention_mask")
    if mask is None or "input_ids" not in batch:
        return False
    return all(value.dim() == 1 or value.shape == mask.shape for value in batch.values())


def _fitted(values: Tensor, mask: Tensor, width: int, fill: int, left: bool) -> Tensor:
    """Return the values of real tokens, (tokens,), padded with `fill` to a width; a value without tokens as it is."""
    if values.shape != mask.shape:
        return values
    real = values[mask != 0]
    padding = real.new_full((width - len(real),), fill)
    return torch.cat([padding, real] if left else [real, padding])
