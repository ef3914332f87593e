"""Describe a uniformly cut model by the fields of its config alone, if possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..kinds import ATTENTION, MLP
from ..model.internals import configs_in
from ..model.linear import features_of
from ..units import PrunableModule, Selection
from .siblings import as_sibling, changed_config, config_field, tensor_shapes

Settings = dict[int, dict[str, Any]]
"""Position of a config in `configs_in` -> its new fields."""

# A field below this may be a ratio of the number of neurons to the width of the model.
_LARGEST_RATIO = 64
# Different numbers of neurons that are tried for one field, such as those of an encoder and of a decoder.
_MOST_COUNTS = 4


def plain_model(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]
) -> PreTrainedModel | None:
    """Return a uniformly cut model with a config that alone describes it, or None if there is no such config.

    A config is tried first: the stock class, built from it on the meta device, must have the slim model's shapes. Each
    config and sub-config describes the modules that hold it, so the towers of a model may differ. If the model's own
    config refuses the result, a sibling's is tried; the returned model then has the sibling's class and shares the
    tensors.
    """
    if getattr(model.config, "hies_export", None) is not None or not all(selection[m.name].units for m in modules):
        return None
    settings = _head_settings(model, selection, [m for m in modules if m.kind == ATTENTION])
    if settings is None:
        return None
    neurons = [m for m in modules if m.kind == MLP and len(selection[m.name].units) < m.units]
    if neurons:
        found = _NeuronFields(model, selection, neurons).settings()
        if found is None:
            return None
        settings = {key: settings.get(key, {}) | found.get(key, {}) for key in (*settings, *found)}
    stock, shapes = _stock(model, settings), tensor_shapes(model)
    if stock is None:
        return as_sibling(model, settings, shapes)
    if tensor_shapes(stock) != shapes:
        return None
    for position, config in enumerate(configs_in(model.config)):
        for name, value in settings.get(position, {}).items():
            setattr(config, name, value)
    return model


def _head_settings(model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]) -> Settings | None:
    """Return the fields for the heads, or None if modules with the same config keep different numbers."""
    configs = configs_in(model.config)
    positions = {id(config): position for position, config in reversed(list(enumerate(configs)))}
    owned: dict[int, list[PrunableModule]] = {}
    for module in modules:
        config = getattr(model.get_submodule(module.name), "config", model.config)
        owned.setdefault(positions.get(id(config), 0), []).append(module)
    settings: Settings = {}
    for key, group in owned.items():
        counts = {(len(selection[m.name].units), len(selection[m.name].kept_groups)) for m in group}
        widths = {(m.key_width, m.unit_width) for m in group}
        if len(counts) != 1 or len(widths) != 1:
            return None
        heads, key_value_heads = counts.pop()
        if heads == group[0].units:
            continue
        settings[key] = {"num_attention_heads": heads, "head_dim": widths.pop()[0]}
        if hasattr(configs[key], "num_key_value_heads"):
            settings[key]["num_key_value_heads"] = key_value_heads
    return settings


class _NeuronFields:
    """The fields of a config that give the numbers of neurons, found by changing them one at a time.

    A field is the right one if the stock model built with its new value differs from the dense one only in the shapes
    of feed-forward blocks, which have the kept numbers of neurons.
    """

    def __init__(self, model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]):
        self._model, self._modules = model, modules
        self._stays = {module.name: len(selection[module.name].units) for module in modules}
        self._owned = {f"{n}.{p}" for m in modules for n in m.layers for p in ("weight", "bias")}
        self._owned |= {name for m in modules for name in m.parameters}

    def settings(self) -> Settings | None:
        """Return fields that give every module the number of neurons that stay, or None if there are none."""
        dense = _stock(self._model, {})
        if dense is None:
            return None
        shapes = tensor_shapes(dense)
        settings: Settings = {}
        left = {module.name for module in self._modules}
        for position, name, values in self._candidates():
            governed = left & self._governed(position, name, values[0], shapes).keys()
            if not governed:
                continue
            # Once a field is found, the modules that it governs either agree on its value, or there is none.
            for value in values:
                given = self._governed(position, name, value, shapes)
                if given and all(self._stays[module] == units for module, units in given.items()):
                    settings.setdefault(position, {})[name] = value
                    left -= given.keys()
                    break
            else:
                return None
            if not left:
                return settings
        return None

    def _governed(self, position: int, name: str, value: Any, dense: Mapping[str, torch.Size]) -> dict[str, int]:
        """Return module -> its neurons with another value of a field; empty if that changes other shapes too."""
        stock = _stock(self._model, {position: {name: value}})
        if stock is None:
            return {}
        shapes = tensor_shapes(stock)
        changed = {name for name in dense.keys() | shapes.keys() if dense.get(name) != shapes.get(name)}
        if not changed <= self._owned:
            return {}
        return {
            module.name: features_of(stock.get_submodule(module.consumer))[1]
            for module in self._modules
            if f"{module.consumer}.weight" in changed
        }

    def _candidates(self) -> Iterator[tuple[int, str, list[Any]]]:
        """Yield position of a config, field and new values: fields equal to a number of neurons, ratios, unset ones."""
        counts = list(dict.fromkeys((module.units, self._stays[module.name]) for module in self._modules))
        counts = counts[:_MOST_COUNTS]
        fields = [
            (position, field, config_field(config, field.name))
            for position, config in enumerate(configs_in(self._model.config))
            for field in dataclasses.fields(config)
        ]
        for position, field, value in fields:
            if type(value) is int and (values := [stays for units, stays in counts if value == units]):
                yield position, field.name, values
        for position, field, value in fields:
            if type(value) is float and 1 <= value <= _LARGEST_RATIO:
                # A model may round the product down, so the second lies a little above.
                yield position, field.name, [value * (counts[0][1] + more) / counts[0][0] for more in (0, 0.25)]
            elif type(value) is int and 1 <= value <= _LARGEST_RATIO and value * counts[0][1] % counts[0][0] == 0:
                yield position, field.name, [value * counts[0][1] // counts[0][0]]
        for position, field, value in fields:
            if value is None and "int" in str(field.type):
                yield position, field.name, [stays for _, stays in counts]


def _stock(model: PreTrainedModel, settings: Settings) -> PreTrainedModel | None:
    """Return the stock model, on the meta device, of a model's config with other fields; None if there is none."""
    try:
        candidate = changed_config(model.config, settings)
        with torch.device("meta"):
            return type(model)(candidate)
    except Exception:  # whatever a model's own code raises on a config it does not expect
        return None
