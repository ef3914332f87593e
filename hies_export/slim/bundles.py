"""Count the FLOPs and the parameters that every module saves with a number of bundles, whichever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..model.copies import share_weights
from ..model.linear import features_of
from ..select.constraints import bundle_count
from ..select.cost import CostTable
from ..units.counts import count_parameters, flops_by_module, innermost
from ..units.rehearse import feature_cuts, parameter_cuts
from ..units.units import Kept, PrunableModule, Units
from .cut import prune_units

# Bundles that modules lose in turn, in the cut that checks the counts.
UNEVEN = (1, 3, 0, 2, 5)


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


def flops_table(
    model: PreTrainedModel, modules: Sequence[PrunableModule], *, batch: Mapping[str, Any], unit: str = "group"
) -> CostTable:
    """Return the table of FLOPs saved by removing bundles from every module, attention products included.

    All bundles of a module save as much as its first one. All modules of a kind lose one in one cut, and the saved
    operations are attributed to the modules that did them. As a check, an uneven cut of all modules is counted too: if
    the attribution does not predict it exactly, every module is cut by itself.

    Args:
        model: The dense model.
        modules: The modules that may lose units, of one kind or both.
        batch: Inputs of the shape at which to count.
        unit: As in `Constraints`.

    Returns:
        A table: module -> share of the dense model's FLOPs that it saves by losing 0, 1, 2, ... bundles.

    Examples:
        >>> table = flops_table(model, modules, batch=batches[0])
        >>> selection = select_units(scores, modules, table=table, ratio=0.9)
        >>> table.ratio({name: len(kept.removed) for name, kept in selection.items()}) <= 0.9
        True
    """
    try:
        dense, one = _saved_per_bundle(share_weights(model, device="meta"), modules, batch, unit)
    except RuntimeError:  # the forward depends on the values of its inputs
        dense, one = _saved_per_bundle(model, modules, batch, unit)
    saved = {m.name: tuple(one[m.name] / dense * k for k in range(bundle_count(m, unit) + 1)) for m in modules}
    return CostTable("FLOPs", saved)


def _saved_per_bundle(
    model: PreTrainedModel, modules: Sequence[PrunableModule], batch: Mapping[str, Any], unit: str
) -> tuple[int, dict[str, int]]:
    """Return the FLOPs of the dense model, and what a bundle of each module saves of them."""

    def count(removed: Mapping[str, int]) -> dict[str, int]:
        return flops_by_module(cut_bundles(model, modules, removed, unit=unit), batch)

    dense = flops_by_module(model, batch)
    most = {module.name: bundle_count(module, unit) - 1 for module in modules}
    # A module of one bundle saves all that it does.
    one = _attributed([module for module in modules if not most[module.name]], dense, {})
    able = [module for module in modules if most[module.name]]
    for kind in dict.fromkeys(module.kind for module in able):
        of_kind = [module for module in able if module.kind == kind]
        one |= _attributed(of_kind, dense, count(dict.fromkeys((module.name for module in of_kind), 1)))
    uneven = {module.name: min(UNEVEN[i % len(UNEVEN)], most[module.name]) for i, module in enumerate(able)}
    if dense[""] - sum(one[name] * lost for name, lost in uneven.items()) != count(uneven)[""]:
        one |= {module.name: dense[""] - count({module.name: 1})[""] for module in able}
    return dense[""], one


def _attributed(modules: Sequence[PrunableModule], dense: Mapping[str, int], cut: Mapping[str, int]) -> dict[str, int]:
    """Return how the FLOPs that a cut of all modules of a kind saves are attributed to these modules.

    A linear layer belongs to the module whose producer or consumer it is, anything else to the innermost module around
    it. Operations that belong to none are left out.
    """
    linear = {name: module.name for module in modules for name in module.layers}
    names = {module.name for module in modules}
    found = dict.fromkeys(names, 0)
    before, after = _own(dense), _own(cut)
    for name in before:
        if saved := before[name] - after.get(name, 0):
            owner = linear.get(name) or innermost(name, names)
            if owner is not None:
                found[owner] += saved
    return found


def _own(flops: Mapping[str, int]) -> dict[str, int]:
    """Return the FLOPs of each module by its dotted name, without those of the modules inside it."""
    own = dict(flops)
    for name, count in flops.items():
        if name:
            outer = name.rpartition(".")[0]
            while outer not in own:  # a container such as a ModuleList, which is never called
                outer = outer.rpartition(".")[0]
            own[outer] -= count
    return own


def parameters_table(model: PreTrainedModel, modules: Sequence[PrunableModule], *, unit: str = "group") -> CostTable:
    """Return the table of parameters saved by removing bundles from every module.

    All bundles of a module own as many rows and columns. No weight is cut or read, so the model may be on `meta`.

    Args:
        model: The dense model; its tied parameters count once.
        modules: The modules that may lose units.
        unit: As in `Constraints`.

    Returns:
        Module -> share of the dense model's parameters that it saves by losing 0, 1, 2, ... bundles.

    Examples:
        >>> table = parameters_table(model, modules)
        >>> [len(saved) for saved in table.saved.values()]
        [7, 7, 7]
    """
    dense = count_parameters(model)
    saved = {}
    for module in modules:
        count = bundle_count(module, unit)
        one = _removed(model, module, keep_first(module, count - 1, unit)) / dense
        saved[module.name] = tuple(one * k for k in range(count + 1))
    return CostTable("parameters", saved)


def _removed(model: nn.Module, module: PrunableModule, kept: Kept) -> int:
    """Return the number of parameters, weights and biases, that a module loses with the units that are not kept."""
    removed = 0
    for name, axis, index in feature_cuts(module, kept):
        layer = model.get_submodule(name)
        features = features_of(layer)
        has_bias = axis == 0 and layer.bias is not None  # an output feature has a bias, an input feature has none
        removed += (features[axis] - len(index)) * (features[1 - axis] + has_bias)
    for name, axis, index in parameter_cuts(module, kept):
        parameter = model.get_parameter(name)
        removed += (parameter.shape[axis] - len(index)) * (parameter.numel() // parameter.shape[axis])
    return removed
