"""Describe how many heads and neurons each layer keeps, in transformers' schema for layers that differ.

`per_layer_config` of a config maps a layer to the fields in which it differs from the config, as in
{"5": {"num_key_value_heads": 2, "intermediate_size": 8192}}. vLLM sizes the cache of every layer by it. It stands in
the `hies_export` block and at the top of config.json (`modeling_hies.describe_layers`).

Source: `transformers/integrations/heterogeneity/configuration_utils.py`
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..kinds import ATTENTION
from ..model.internals import layers_differ, layers_unwarned
from ..model.modeling_hies import describe_layers
from ..units import PrunableModule, Selection
from .siblings import config_field

PerLayer = dict[str, dict[str, int]]
"""Index of a layer -> field of the config -> its value in that layer."""

# What configs call the number of neurons.
_NEURONS = ("intermediate_size", "ffn_dim", "hidden_dim")


def per_layer_config(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]
) -> PerLayer | None:
    """Return the fields in which layers differ from the config of the model, after the cut.

    The config has the numbers of the dense model, except those of a uniform cut of heads that its fields describe.

    None if fields cannot describe it: heads have another width than the dense config says, the config has other names
    for the numbers, or numbers of its own for every layer, or the model has several stacks of layers.
    """
    if layers_differ(model.config) or model.config.is_encoder_decoder:
        return None
    found: PerLayer = {}
    seen = set()
    for module in modules:
        layer = [part for part in module.name.split(".") if part.isdecimal()]
        own = getattr(model.get_submodule(module.name), "config", model.config)
        if len(layer) != 1 or own is not model.config or (layer[0], module.kind) in seen:
            return None
        fields = _fields(model.config, layer[0], module, selection)
        if fields is None:
            return None
        seen.add((layer[0], module.kind))
        changed = {name: value for name, value in fields.items() if getattr(model.config, name) != value}
        if changed:
            found.setdefault(layer[0], {}).update(changed)
    return found


def set_layers(config: PreTrainedConfig, layers: PerLayer | None) -> None:
    """Let a config say at its top what its layers have; nothing if there is nothing to say, or if it refuses to.

    A config without a width of heads gets the dense one: readers would compute it from a layer's own number of heads.
    """
    if layers:
        trial = copy.deepcopy(config)
        _say(trial, layers)
        try:
            with layers_unwarned():
                type(config).from_dict(trial.to_dict())
        except Exception:  # whatever a config's own code raises on layers that differ
            layers = None
    _say(config, layers)


def _say(config: Any, layers: PerLayer | None) -> None:
    if layers and any("num_attention_heads" in fields for fields in layers.values()):
        config.head_dim = head_width(config)
    describe_layers(config, layers)


def head_width(config: PreTrainedConfig) -> int | None:
    """Return the width of the heads of a dense model by its config; None if the config does not say."""
    width, hidden, heads = (config_field(config, name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if width is None and type(hidden) is int and type(heads) is int and heads > 0 and hidden % heads == 0:
        width = hidden // heads
    return width if type(width) is int else None


def _fields(config: Any, layer: str, module: PrunableModule, selection: Selection) -> dict[str, int] | None:
    """Return the fields that describe what a module of a layer keeps, or None if the config lacks one of them."""
    kept = selection[module.name]
    if not kept.units:  # the schema's `skip` names classes of layers, and no family reads it yet
        return None
    # Of each field its number before and after the cut.
    numbers: dict[str, tuple[int, int]] = {}
    if module.kind == ATTENTION:
        if not module.key_width == module.unit_width == head_width(config):
            return None
        numbers["num_attention_heads"] = (module.units, len(kept.units))
        if type(config_field(config, "num_key_value_heads")) is int:
            numbers["num_key_value_heads"] = (module.groups, len(kept.kept_groups))
        elif module.units != module.groups:
            return None
    else:
        name = next((field.name for field in dataclasses.fields(config) if field.name in _NEURONS), None)
        if name is None:
            return None
        numbers[name] = (module.units, len(kept.units))
    earlier = (getattr(config, "hies_export", None) or {}).get("per_layer_config", {}).get(layer, {})
    for name, pair in numbers.items():
        # A field that had some other number means something else, such as the neurons of an expert.
        if earlier.get(name, config_field(config, name)) not in pair:
            return None
    return {name: after for name, (_, after) in numbers.items()}
