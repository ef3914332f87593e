"""Describe how many heads and neurons each layer keeps, in transformers' schema for layers that differ.

`config.per_layer_config` of transformers maps a layer to the fields in which it differs from the config, as in
{"5": {"num_key_value_heads": 2, "intermediate_size": 8192}}. The key must not be in config.json itself: transformers
5.23 then raises `AmbiguousGlobalPerLayerAttributeError` when a LLaMA's config is read, and when a BERT or a ViT is
built, because their code reads one number for all layers. So it is in the `hies_export` block, for tools that read it.
A family that supports it can use `config.per_layer_config = config.hies_export["per_layer_config"]`.

Source: `transformers/integrations/heterogeneity/configuration_utils.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ..kinds import ATTENTION
from ..units import PrunableModule, Selection
from .siblings import config_field

PerLayer = dict[str, dict[str, int]]
"""Index of a layer -> field of the config -> its value in that layer."""


def per_layer_config(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]
) -> PerLayer | None:
    """Return the fields in which layers differ from the config of the model, after the cut.

    The config has the numbers of the dense model, except those of a uniform cut of heads that its fields describe.

    None if fields cannot describe it: the config has no head width that is independent of the number of heads, or other
    names for the numbers, or the model has several stacks of layers.
    """
    found: PerLayer = {}
    seen = set()
    for module in modules:
        layer = [part for part in module.name.split(".") if part.isdecimal()]
        own = getattr(model.get_submodule(module.name), "config", model.config)
        fields = _fields(model.config, module, selection)
        if len(layer) != 1 or own is not model.config or fields is None or (layer[0], module.kind) in seen:
            return None
        seen.add((layer[0], module.kind))
        changed = {name: value for name, value in fields.items() if getattr(model.config, name) != value}
        if changed:
            found.setdefault(layer[0], {}).update(changed)
    return found


def _fields(config: Any, module: PrunableModule, selection: Selection) -> dict[str, int] | None:
    """Return the fields that describe what a module keeps, or None if the config lacks one of them."""
    kept = selection[module.name]
    if not kept.units:  # the schema's `skip` names classes of layers, and no family reads it yet
        return None
    if module.kind == ATTENTION:
        fields = {"num_attention_heads": len(kept.units), "num_key_value_heads": len(kept.kept_groups)}
        # Otherwise the width is computed from the number.
        if config_field(config, "head_dim") != module.key_width:
            return None
    else:
        fields = {"intermediate_size": len(kept.units)}
    return fields if all(type(config_field(config, name)) is int for name in fields) else None
