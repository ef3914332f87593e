"""Make batches of text for models that generate."""

import io
from collections.abc import Sequence

import numpy as np
import PIL.Image
import torch
from torch import Tensor


def padded(lengths: Sequence[int], side: str, *, answers: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return texts of different lengths; `answers` is how many tokens at each end are labels, by default all."""
    width = max(lengths)
    batch = {
        "input_ids": torch.zeros(len(lengths), width, dtype=torch.int64),
        "attention_mask": torch.zeros(len(lengths), width, dtype=torch.int64),
        "labels": torch.full((len(lengths), width), -100),
    }
    for row, length in enumerate(lengths):
        start = width - length if side == "left" else 0
        ids = torch.randint(5, 32, (length,))
        batch["input_ids"][row, start : start + length] = ids
        batch["attention_mask"][row, start : start + length] = 1
        counted = length if answers is None else answers[row]
        counted = min(counted, length - 1) if start else counted
        batch["labels"][row, start + length - counted : start + length] = ids[length - counted :]
    if side == "left":
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch


def with_images(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with an image of 16 tokens after the first real token of each sample."""
    size = len(batch["input_ids"])

    def insert(key: str, value: int) -> Tensor:
        out = []
        for row, mask in zip(batch[key], batch["attention_mask"], strict=True):
            at = int(mask.argmax()) + 1
            out.append(torch.cat([row[:at], torch.full((16,), value), row[at:]]))
        return torch.stack(out)

    wide = {"input_ids": insert("input_ids", 4), "attention_mask": insert("attention_mask", 1)}
    wide |= {"labels": insert("labels", -100), "pixel_values": torch.randn(size, 3, 16, 16)}
    if "position_ids" in batch:
        wide["position_ids"] = (wide["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return wide


def png(seed: int = 0) -> bytes:
    """Return a random picture of 20 x 20 pixels, as a PNG file has it."""
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()
