"""Mask units without removing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.watch import intercept
from ..units import PrunableModule, Selection
from ..values import PruningPlan, selection_of


@contextmanager
def masked_units(
    model: PreTrainedModel, plan: PruningPlan | Selection, modules: Sequence[PrunableModule]
) -> Iterator[None]:
    """Multiply the outputs of the removed units by zero where their consumers read them, inside the block.

    Args:
        model: The dense model; restored after the block.
        plan: The units that stay.
        modules: From `find_modules` on this model.

    Examples:
        >>> with masked_units(model, plan, modules):
        ...     logits = model(**batches[0]).logits
    """
    selection = selection_of(plan)
    masks = {}
    for module in modules:
        kept = selection[module.name]
        if len(kept.units) < kept.total:
            masks[module.name] = torch.zeros(module.units * module.unit_width)
            masks[module.name][module.columns(kept.units)] = 1

    def masked(name: str, x: Tensor) -> Tensor:
        return x * masks[name].to(x)

    with intercept(model, {m.name: m.consumer for m in modules if m.name in masks}, masked):
        yield
