"""Turn the units that stay into indices of weights, and attributes that follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..model import modeling_hies
from ..model.linear import features_of
from ..values import AttentionSite, KeptHeads, Projection


def feature_cuts(model: nn.Module, site: AttentionSite, kept: KeptHeads) -> list[tuple[str, int, Tensor]]:
    """What a plan leaves of the linear layers of an attention module.

    Returns:
        (name of the layer, 0 for output or 1 for input features, indices of those that stay) per layer that is cut.
    """
    cuts = []
    for projection in site.projections:
        features = features_of(model.get_submodule(projection.name))[0]
        index = kept_features(projection, kept, features)
        if len(index) < features:
            cuts.append((projection.name, 0, index))
    if len(kept.query) < site.heads:
        cuts.append((site.output, 1, head_rows(kept.query, site.value_dim)))
    return cuts


def row_cuts(model: nn.Module, site: AttentionSite, kept: KeptHeads) -> list[tuple[str, Tensor]]:
    """What a plan leaves of the parameters of an attention module outside of its linear layers.

    Returns:
        (name of the parameter, indices of the rows that stay) per parameter that is cut.
    """
    cuts = []
    for parameter in site.parameters:
        rows = len(model.get_parameter(parameter.name))
        index = kept_features(parameter, kept, rows)
        if len(index) < rows:
            cuts.append((parameter.name, index))
    return cuts


def kept_features(projection: Projection, kept: KeptHeads, features: int) -> Tensor:
    """Indices, ascending, of the output features of a layer that belong to no head that goes."""
    stay = torch.ones(features, dtype=torch.bool)
    for per_head, heads in ((projection.query, kept.query), (projection.key_value, kept.key_value)):
        gone = [f for head, own in enumerate(per_head) if head not in heads for f in own]
        stay[gone] = False
    return stay.nonzero().flatten()


def set_attributes(module: nn.Module, site: AttentionSite, kept: KeptHeads) -> dict[str, Any]:
    """Make the attributes of an attention module that count heads follow.

    Returns:
        The new values of those that changed.
    """
    changed = {}
    for name, what in site.attributes.items():
        value = site.head_count(what, heads=len(kept.query), key_value_heads=len(kept.key_value))
        if modeling_hies.get_attribute(module, name) != value:
            modeling_hies.set_attribute(module, name, value)
            changed[name] = value
    return changed


def head_rows(heads: tuple[int, ...], width: int) -> Tensor:
    """Indices of the rows (or columns) of a projection that belong to some heads of a width."""
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()
