"""Make cuts that depend on nothing but a seed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import Constraints, find_attention, prune_units, select_units
from hies_export.calibrate.moments import LayerMoments, Moments, MomentStore
from hies_export.calibrate.readings import Gradients, LayerEffects, effects_of
from hies_export.score.criteria import Scores
from hies_export.select.plan import PruningPlan, library_versions
from hies_export.units.units import Kept, PrunableModule, Units


def plan_of(
    scores: Scores,
    modules: Sequence[Units],
    *,
    heads: float,
    seed: int = 0,
    calibration: Mapping[str, Any] | None = None,
    **constraints: Any,
) -> PruningPlan:
    """Return the plan of what `select_units` selects; `constraints` are the fields of `Constraints`."""
    kept = select_units(scores, modules, heads=heads, constraints=Constraints(**constraints))
    return PruningPlan(
        scores.criterion,
        kept=kept,
        alpha=scores.parameters.get("alpha"),
        seed=seed,
        calibration=dict(calibration or {}),
        versions=library_versions(),
    )


def random_plan(sites: Sequence[PrunableModule], *, uniform: bool) -> PruningPlan:
    """Return a plan that removes four heads of ten, in whole groups where there are several."""
    generator = torch.Generator().manual_seed(0)
    scores = {s.name: torch.rand(s.units, generator=generator, dtype=torch.float64) for s in sites}
    return plan_of(
        Scores("random", {}, scores),
        sites,
        heads=0.4,
        allocation="uniform" if uniform else "global",
        unit="query" if all(s.groups == 1 for s in sites) else "group",
    )


def random_cut(
    dense: PreTrainedModel, batch: dict[str, Tensor], *, uniform: bool = False
) -> tuple[PreTrainedModel, PruningPlan, tuple[PrunableModule, ...]]:
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


def effects(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], modules: Sequence[PrunableModule]
) -> dict[str, LayerEffects]:
    """Return the effects of all modules, in their order."""
    found: dict[str, LayerEffects] = {}
    walk = Gradients(model, batches, modules, "effect")
    walk.collect(lambda inside, read: found.update(effects_of(model, batches, inside, read)))
    return {module.name: found[module.name] for module in modules}


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Return the moments of x (tokens, inputs) and y (tokens, outputs)."""
    found = Moments.zeros(x.shape[1], x.device, y.shape[1])
    found.add(x, y)
    found.complete()
    return found


def moments_by_module(
    model: PreTrainedModel, modules: Sequence[PrunableModule], batches: Sequence[dict[str, Tensor]], **how: Any
) -> dict[str, LayerMoments]:
    """Return the moments of all modules, in their order."""
    found: dict[str, LayerMoments] = {}
    MomentStore(model, modules, batches, keep=False, **how).each(lambda _, sums: found.update(sums))
    return {module.name: found[module.name] for module in modules}
