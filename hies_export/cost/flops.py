"""Count what a unit of every module costs in FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..legacy import select_heads
from ..measure import counts
from ..model.copies import share_weights
from ..select.budget import CostTable
from ..select.bundles import bundle_count
from ..slim.cut import prune_units
from ..values import PrunableModule, PruningPlan, Scores


def flops_table(
    model: PreTrainedModel, sites: Sequence[PrunableModule], *, batch: Mapping[str, Any], unit: str = "group"
) -> CostTable:
    """Count what a bundle of every module costs, attention products included.

    Args:
        model: The dense model.
        sites: The modules that may lose heads.
        batch: Inputs of the shape to count at.
        unit: As in `select_heads`.
    """
    dense = counts.count_flops(model, batch)
    saved = {}
    for index, site in enumerate(sites):
        count = bundle_count(site, unit)
        one = 0.0
        if count > 1:
            plan = plan_of_counts(sites, [int(i == index) for i in range(len(sites))], unit)
            without = prune_units(share_weights(model), plan, tuple(sites), inplace=True)
            one = (dense - counts.count_flops(without, batch)) / dense
        # A module's last bundle stays.
        saved[site.name] = tuple(one * k for k in range(count))
    return CostTable("FLOPs", saved)


def plan_of_counts(sites: Sequence[PrunableModule], counts: Sequence[int], unit: str) -> PruningPlan:
    """A plan of the right size; which heads go does not matter to cost."""
    zeros = Scores("none", {}, {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in sites})
    return select_heads(zeros, sites, counts=counts, unit=unit)
