"""Translate kept units into rows and columns of weights, and update the attributes that count units."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..model import modeling_hies
from ..model.linear import features_of
from ..units import Kept, PrunableModule


def feature_cuts(model: nn.Module, module: PrunableModule, kept: Kept) -> list[tuple[str, int, Tensor]]:
    """Return which features of the linear layers of a module stay.

    Returns:
        One tuple per layer that loses features: its name, 0 for output or 1 for input features, and the indices of the
        features that stay, (features,) int64.
    """
    cuts = []
    for name in module.producers:
        features = features_of(model.get_submodule(name))[0]
        index = module.staying(name, kept, features)
        if len(index) < features:
            cuts.append((name, 0, index))
    if len(kept.units) < module.units:
        cuts.append((module.consumer, 1, module.columns(kept.units)))
    return cuts


def row_cuts(model: nn.Module, module: PrunableModule, kept: Kept) -> list[tuple[str, Tensor]]:
    """Return which rows of the parameters of a module, outside of its linear layers, stay.

    Returns:
        One tuple per parameter that loses rows: its name, and the indices of the rows that stay, (rows,) int64.
    """
    cuts = []
    for name in module.parameters:
        rows = len(model.get_parameter(name))
        index = module.staying(name, kept, rows)
        if len(index) < rows:
            cuts.append((name, index))
    return cuts


def set_attributes(owner: nn.Module, module: PrunableModule, kept: Kept) -> dict[str, Any]:
    """Set the attributes that count units or groups to the numbers that stay.

    Args:
        owner: The torch module that has the attributes.
        module: Its description.
        kept: The units that stay.

    Returns:
        Attribute -> its new value, for those that changed.
    """
    changed = {}
    for name, count in module.attributes.items():
        value = count.value(units=len(kept.units), groups=len(kept.kept_groups))
        if modeling_hies.get_attribute(owner, name) != value:
            modeling_hies.set_attribute(owner, name, value)
            changed[name] = value
    return changed
