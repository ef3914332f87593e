"""Cut a given number of bundles from every module, no matter which: the cost depends only on the number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from ...model.copies import share_weights
from ...select.bundles import bundle_count
from ...slim.cut import prune_units
from ...units import Kept, PrunableModule, Units


def cut_bundles(
    model: PreTrainedModel, modules: Sequence[PrunableModule], removed: Mapping[str, int], *, unit: str
) -> PreTrainedModel:
    """Return a copy of the model that shares its weights, without some bundles of modules, no matter which."""
    kept = {
        module.name: keep_first(module, bundle_count(module, unit) - removed.get(module.name, 0), unit)
        for module in modules
    }
    return prune_units(share_weights(model), kept, modules, inplace=True)


def keep_first(module: Units, bundles: int, unit: str) -> Kept:
    """Return the units to keep so that the first bundles of a module stay."""
    whole_groups = unit == "group" or module.group_size == 1
    groups = range(bundles if whole_groups else module.groups)
    per_group = range(module.group_size if whole_groups else bundles)
    return module.kept(group * module.group_size + place for group in groups for place in per_group)
