"""Mask units without cutting them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.attention import AttentionCall, use_attention
from ..model.kernels import VisibleKeys, attend
from ..values import PruningPlan


@contextmanager
def masked_heads(model: PreTrainedModel, plan: PruningPlan) -> Iterator[None]:
    """Inside the block, the outputs of the heads that `plan` removes are multiplied by zero; nothing is cut.

    Args:
        model: The dense model; as it was, after the block.
        plan: Which heads stay.

    Examples:
        >>> with masked_heads(model, plan):
        ...     logits = model(**batches[0]).logits
    """
    masks = {}
    for name, kept in plan.kept.items():
        mask = torch.zeros(1, kept.heads, 1, 1)
        mask[:, list(kept.query)] = 1
        masks[model.get_submodule(name)] = mask
    visible = VisibleKeys()

    def function(call: AttentionCall) -> Tensor:
        output = attend(call, visible)
        mask = masks.get(call.module)
        return output if mask is None else output * mask.to(output)

    with use_attention(model, function):
        yield
