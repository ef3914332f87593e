"""Make cuts that depend on nothing but a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.legacy import AttentionSite, select_heads
from hies_export.prunable.attention import find_attention
from hies_export.slim.cut import prune_units
from hies_export.units import Kept, PrunableModule
from hies_export.values import PruningPlan, Scores


def random_plan(sites: Sequence[AttentionSite], *, uniform: bool, seed: int = 0) -> PruningPlan:
    """Return a plan that removes four heads of ten, in whole groups where there are several."""
    generator = torch.Generator().manual_seed(seed)
    scores = {s.name: torch.rand(s.heads, generator=generator, dtype=torch.float64) for s in sites}
    return select_heads(
        Scores("random", {}, scores),
        sites,
        heads=0.4,
        allocation="uniform" if uniform else "global",
        unit="query" if all(s.key_value_heads == 1 for s in sites) else "group",
    )


def random_cut(
    dense: PreTrainedModel, batch: dict[str, Tensor], *, uniform: bool = False
) -> tuple[PreTrainedModel, PruningPlan, tuple[AttentionSite, ...]]:
    """Cut a model by a random plan; return the slim model, the plan and the dense model's attention modules."""
    sites = find_attention(dense, batch)
    plan = random_plan(sites, uniform=uniform)
    return prune_units(dense, plan, sites), plan, sites


def random_neurons(modules: Sequence[PrunableModule], *, uniform: bool, seed: int = 0) -> dict[str, Kept]:
    """Return a selection that removes about a third of the neurons, and of the head groups, of every module."""
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for module in modules:
        most = module.groups
        stay = most * 2 // 3 if uniform else int(torch.randint(most // 3 + 1, most + 1, (1,), generator=generator))
        groups = set(torch.randperm(most, generator=generator)[: max(1, stay)].tolist())
        kept[module.name] = module.kept(u for u in range(module.units) if u // module.group_size in groups)
    return kept
