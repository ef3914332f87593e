"""Add up a number per weight by unit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.linear import weight_of
from ..units.units import PrunableModule, Slice


def weight_l2(model: PreTrainedModel, module: PrunableModule) -> Tensor:
    """Return the L2 norm of every unit's weights in the producers and the consumer, (units,) float64."""

    def squares(name: str) -> Tensor:
        return weight_of(model.get_submodule(name)).detach().double().pow(2)

    return sum_by_unit(module, squares).sqrt()


def sum_by_unit(module: PrunableModule, elements: Callable[[str], Tensor]) -> Tensor:
    """Return the sum of a number per weight over every unit, (units,) float64 on CPU.

    A group's sum counts for each of its units. `elements` gives the numbers of a layer by its name, (out_features,
    in_features) float64 on any device, one layer at a time.
    """
    of_units = elements(module.consumer).sum(0).cpu().view(module.units, -1).sum(1)
    of_groups = torch.zeros(module.groups, dtype=torch.float64)
    for name in module.producers:
        rows = elements(name).sum(1).cpu()
        for part in slices_of(module, name):
            total = of_groups if part.per_group else of_units
            for span in part.spans:
                owned = span.start + torch.arange(span.units)[:, None] * span.step + torch.arange(span.width)
                total[span.first : span.first + span.units] += rows[owned].sum(1)
    return of_units + of_groups.repeat_interleave(module.group_size)


def slices_of(module: PrunableModule, producer: str) -> list[Slice]:
    """Return the slices of a producer, those owned by units before those owned by groups."""
    return sorted((part for part in module.slices if part.tensor == producer), key=lambda part: part.per_group)
