"""Translate kept units into rows and columns of weights, and update the attributes that count units."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..model import modeling_hies
from ..model.linear import features_of
from .units import Kept, PrunableModule


def feature_cuts(model: nn.Module, module: PrunableModule, kept: Kept) -> list[tuple[str, int, Tensor]]:
    """Return the linear layers that lose features: name, 0 (output) or 1 (input), and what stays, (features,) int64."""
    cuts = []
    for name in module.producers:
        features = features_of(model.get_submodule(name))[0]
        index = module.staying(name, kept, features)
        if len(index) < features:
            cuts.append((name, 0, index))
    if len(kept.units) < module.units:
        cuts.append((module.consumer, 1, module.columns(kept.units)))
    return cuts


def parameter_cuts(model: nn.Module, module: PrunableModule, kept: Kept) -> list[tuple[str, int, Tensor]]:
    """Return the parameters outside of linear layers that become smaller: name, axis, and what stays, (indices,)."""
    cuts = []
    for name in module.parameters:
        axis = module.axis(name)
        size = model.get_parameter(name).shape[axis]
        index = module.staying(name, kept, size)
        if len(index) < size:
            cuts.append((name, axis, index))
    return cuts


def set_attributes(owner: nn.Module, module: PrunableModule, kept: Kept) -> dict[str, Any]:
    """Set the attributes of a module that count units or groups to the numbers that stay; return those that changed."""
    changed = {}
    for name, count in module.attributes.items():
        value = count.value(units=len(kept.units), groups=len(kept.kept_groups))
        if modeling_hies.get_attribute(owner, name) != value:
            modeling_hies.set_attribute(owner, name, value)
            changed[name] = value
    return changed


def narrow_arguments(owner: nn.Module, module: PrunableModule, kept: Kept) -> dict[str, list[Any]]:
    """Let a module take from shared arguments the heads that stay; return what its `narrowed` entry becomes."""
    before = getattr(owner, "narrowed", {})
    narrowed = {}
    for name, (axis, total) in module.narrowed.items():
        heads = before[name][2] if name in before else range(total)
        narrowed[name] = [axis, total, [heads[unit] for unit in kept.units]]
    modeling_hies.narrow(owner, narrowed)
    return narrowed
