"""Remove heads for real, and prove that the result computes what the masked model computes."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..model.linear import features_of, select_features, set_parameter
from ..prunable.units import feature_cuts, row_cuts, set_attributes
from ..values import AttentionSite, PruningPlan
from .check import check_plan, check_weights, weight_norms
from .config import _config_can_say_it, _make_slim_class


def prune_heads(
    model: PreTrainedModel, plan: PruningPlan, sites: tuple[AttentionSite, ...], *, inplace: bool = False
) -> PreTrainedModel:
    """Cut the heads a plan does not keep out of the weights.

    The layers in front of the attention lose rows, the one behind it columns, head-count attributes follow. Where the
    config alone can describe the result (uniform ViT, LLaMA, ...), the config is updated and the model stays of its
    stock class; otherwise its class becomes the slim twin of the stock class (`modeling_hies`), which `save_pretrained`
    writes next to the weights.

    Args:
        model: The dense model.
        plan: The heads that stay.
        sites: From `find_attention` on this model.
        inplace: Cut `model` itself instead of a copy.

    Returns:
        The slim model, an ordinary `PreTrainedModel`.

    Raises:
        PlanError: The plan is not for this model, or for other weights.

    Examples:
        >>> slim = prune_heads(model, plan, sites)
        >>> sum(site.heads for site in find_attention(slim, batches[0]))
        9
    """
    check_plan(plan, sites)
    if not any(parameter.is_meta for parameter in model.parameters()):
        check_weights(plan, weight_norms(model, sites))
    slim = model if inplace else copy.deepcopy(model)
    resized: dict[str, list[int]] = {}
    parameters: dict[str, list[int]] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for site in sites:
        kept = plan.kept[site.name]
        for name, axis, index in feature_cuts(slim, site, kept):
            layer = select_features(slim.get_submodule(name), index, axis)
            owner, _, attribute = name.rpartition(".")
            setattr(slim.get_submodule(owner), attribute, layer)
            resized[name] = list(features_of(layer))
        for name, index in row_cuts(slim, site, kept):
            old = slim.get_parameter(name)
            rows = old.detach().index_select(0, index.to(old.device))
            set_parameter(slim, name, nn.Parameter(rows, requires_grad=old.requires_grad))
            parameters[name] = list(rows.shape)
        changed = set_attributes(slim.get_submodule(site.name), site, kept)
        if changed:
            attributes[site.name] = changed
    if not _config_can_say_it(slim, plan, sites):
        _make_slim_class(slim, resized, parameters, attributes)
    return slim
