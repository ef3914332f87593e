"""Count the FLOPs that every module saves per bundle of units removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..measure import counts
from ..model.copies import share_weights
from ..select.budget import CostTable
from ..select.bundles import bundle_count
from ..slim.cut import prune_units
from ..units import Kept, PrunableModule, Units


def flops_table(
    model: PreTrainedModel, modules: Sequence[PrunableModule], *, batch: Mapping[str, Any], unit: str = "group"
) -> CostTable:
    """Return the table of FLOPs saved by removing bundles from every module, attention products included.

    Args:
        model: The dense model.
        modules: The modules that may lose units.
        batch: Inputs of the shape at which to count.
        unit: As in `Constraints`.
    """
    dense = counts.count_flops(model, batch)
    saved = {}
    for module in modules:
        count = bundle_count(module, unit)
        one = 0.0
        if count > 1:
            without = cut_bundles(model, modules, {module.name: 1}, unit=unit)
            one = (dense - counts.count_flops(without, batch)) / dense
        # 0 to count - 1 bundles: the last one of a module is never removed.
        saved[module.name] = tuple(one * k for k in range(count))
    return CostTable("FLOPs", saved)


def cut_bundles(
    model: PreTrainedModel, modules: Sequence[PrunableModule], removed: Mapping[str, int], *, unit: str
) -> PreTrainedModel:
    """Return a copy of the model, which shares its weights, with the first bundles of every module kept.

    Which bundles are kept does not change the cost.

    Args:
        model: The dense model; it is not changed.
        modules: The modules that may lose units.
        removed: Number of bundles to remove by module name; modules without an entry lose none.
        unit: As in `Constraints`.
    """
    kept = {
        module.name: keep_first(module, bundle_count(module, unit) - removed.get(module.name, 0), unit)
        for module in modules
    }
    return prune_units(share_weights(model), kept, modules, inplace=True)


def keep_first(module: Units, bundles: int, unit: str) -> Kept:
    """Return the units to keep so that the first bundles of a module stay.

    Args:
        module: The module.
        bundles: Number of bundles to keep: key/value groups, or with unit "query", query heads of every group.
        unit: As in `Constraints`.
    """
    whole_groups = unit == "group" or module.group_size == 1
    groups = range(bundles if whole_groups else module.groups)
    per_group = range(module.group_size if whole_groups else bundles)
    return module.kept(group * module.group_size + place for group in groups for place in per_group)
