"""Count what a unit of every module costs in FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..measure import counts
from ..model.copies import share_weights
from ..select.constraints import bundle_count
from ..select.knapsack import CostTable
from ..slim.cut import prune_heads
from ..values import AttentionSite, KeptHeads, PruningPlan


def flops_table(
    model: PreTrainedModel, sites: Sequence[AttentionSite], *, batch: Mapping[str, Any], unit: str = "group"
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
    for site in sites:
        count = bundle_count(site, unit)
        one = 0.0
        if count > 1:
            without = cut_bundles(model, sites, {site.name: 1}, unit=unit)
            one = (dense - counts.count_flops(without, batch)) / dense
        # A module's last bundle stays.
        saved[site.name] = tuple(one * k for k in range(count))
    return CostTable("FLOPs", saved)


def cut_bundles(
    model: PreTrainedModel, sites: Sequence[AttentionSite], removed: Mapping[str, int], *, unit: str
) -> PreTrainedModel:
    """Cut a copy of the model that shares its weights; which heads go does not matter to cost.

    Args:
        model: The dense model; it is not changed.
        sites: The modules that may lose heads.
        removed: By the name of a module, how many bundles it loses; the others lose none.
        unit: As in `select_heads`.
    """
    kept = {site.name: keep_first(site, bundle_count(site, unit) - removed.get(site.name, 0), unit) for site in sites}
    plan = PruningPlan(kept=kept, criterion="cost", alpha=None, seed=0)
    return prune_heads(share_weights(model), plan, tuple(sites), inplace=True)


def keep_first(site: AttentionSite, bundles: int, unit: str) -> KeptHeads:
    """Keep the first bundles of a module.

    Args:
        site: The module.
        bundles: How many stay: key/value groups, or under `unit: query` query heads of every group.
        unit: As in `select_heads`.
    """
    whole_groups = unit == "group" or site.group_size == 1
    groups = range(bundles if whole_groups else site.key_value_heads)
    per_group = range(site.group_size if whole_groups else bundles)
    return KeptHeads(
        query=tuple(group * site.group_size + head for group in groups for head in per_group),
        key_value=tuple(groups),
        heads=site.heads,
        key_value_heads=site.key_value_heads,
    )
