"""Export a classifier of texts by torch.onnx, for tools that start from a plain ONNX graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def load(checkpoint: Path) -> Any:
    """Load a checkpoint with eager attention, whose products every tracer and optimiser knows."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(checkpoint, attn_implementation="eager").eval()


def export(model: Any, file: Path) -> Path:
    """Write a graph with a batch and a sequence of any size."""
    # Padding, so that the mask is not folded into a constant.
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0
    given = {"input_ids": torch.ones_like(mask), "attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}
    torch.onnx.export(
        model,
        (),
        str(file),
        kwargs=given,
        input_names=list(INPUTS),
        output_names=["logits"],
        dynamic_axes={name: {0: "batch", 1: "sequence"} for name in INPUTS},
        dynamo=False,
    )
    return file
