"""Say what of a model's weights stays by a selection, and make the attributes that count units follow."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..model import modeling_hies
from ..model.linear import features_of
from ..values import Kept, PrunableModule


def feature_cuts(model: nn.Module, module: PrunableModule, kept: Kept) -> list[tuple[str, int, Tensor]]:
    """Return what stays of the linear layers of a module.

    Returns:
        (name of the layer, 0 for output or 1 for input features, indices of those that stay) per layer that is cut.
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
    """Return what stays of the parameters of a module outside of its linear layers.

    Returns:
        (name of the parameter, indices of the rows that stay) per parameter that is cut.
    """
    cuts = []
    for name in module.parameters:
        rows = len(model.get_parameter(name))
        index = module.staying(name, kept, rows)
        if len(index) < rows:
            cuts.append((name, index))
    return cuts


def set_attributes(owner: nn.Module, module: PrunableModule, kept: Kept) -> dict[str, Any]:
    """Set the attributes of a module that count units to what the selection leaves.

    Args:
        owner: The module itself.
        module: Its description.
        kept: The units that stay.

    Returns:
        The new values of those that changed.
    """
    changed = {}
    for name, count in module.attributes.items():
        value = count.value(units=len(kept.units), groups=len(kept.kept_groups))
        if modeling_hies.get_attribute(owner, name) != value:
            modeling_hies.set_attribute(owner, name, value)
            changed[name] = value
    return changed
