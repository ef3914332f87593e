"""Describe a slim model in its config: by a uniform config alone, or by a `hies_export` block and a slim class."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..model import modeling_hies
from ..model.auto import auto_classes, has_auto_base
from ..units import PrunableModule, Selection


def slim_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the slim version of a model class of transformers.

    Raises:
        UnsupportedModelError: transformers does not export the class, so no checkpoint can name it.
    """
    if not hasattr(modeling_hies, stock.__name__):
        raise UnsupportedModelError(
            f"a slim checkpoint names its model class, which transformers must export, but it does not export "
            f"{stock.__name__}; cut a model of another class, or uniformly where its config can say it"
        )
    return getattr(modeling_hies, stock.__name__)


def is_slim(model: PreTrainedModel) -> bool:
    """Return whether a model's config has a `hies_export` block, without which its shapes are not known."""
    return getattr(model.config, "hies_export", None) is not None


@dataclass
class Shapes:
    """The shapes and attributes that a cut changed; keys are dotted names.

    Attributes:
        linear: Linear layer -> its new [out_features, in_features].
        parameters: Parameter outside of linear layers -> its new shape.
        attributes: Module -> attribute -> its new value.
    """

    linear: dict[str, list[int]] = field(default_factory=dict)
    parameters: dict[str, list[int]] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_uniform_config(model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]) -> bool:
    """Change the config of a uniformly cut model so that it alone describes the model, if it can.

    The changed config is tried first: the stock class, built from it on the meta device, must have the slim model's
    shapes. Each config and sub-config describes the modules that hold it, so the towers of a model may differ.

    Returns:
        Whether the config was changed and now describes the model.
    """
    if is_slim(model):
        return False
    configs = {id(config): config for config in _configs(model.config)}
    settings = _uniform_settings(model, selection, modules, configs)
    if settings is None:
        return False
    candidate = copy.deepcopy(model.config)
    try:
        for config, copied in zip(_configs(model.config), _configs(candidate), strict=True):
            for name, value in settings.get(id(config), {}).items():
                setattr(copied, name, value)
            copied.validate()  # an invalid config cannot be saved (LLaMA: hidden size not a multiple of heads)
        with torch.device("meta"):
            stock = type(model)(candidate)
    except (StrictDataclassError, ValueError, AttributeError, TypeError, RuntimeError):
        return False
    if _shapes(stock) != _shapes(model):
        return False
    for key, values in settings.items():
        for name, value in values.items():
            setattr(configs[key], name, value)
    return True


def _uniform_settings(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule], configs: Mapping[int, Any]
) -> dict[int, dict[str, Any]] | None:
    """Return id of a config -> its new fields, or None if modules with the same config keep different numbers."""
    owned: dict[int, list[PrunableModule]] = {}
    for module in modules:
        config = getattr(model.get_submodule(module.name), "config", model.config)
        owned.setdefault(id(config) if id(config) in configs else id(model.config), []).append(module)
    settings: dict[int, dict[str, Any]] = {}
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


def _configs(config: Any) -> list[Any]:
    """Return a config and all its sub-configs."""
    children = [getattr(config, key, None) for key in config.sub_configs]
    return [config, *(c for child in children if child is not None for c in _configs(child))]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    # Buffers too, because some, such as rotary frequencies, are computed from the number of heads.
    return {n: t.shape for n, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}


def become_slim(model: PreTrainedModel, shapes: Shapes) -> None:
    """Write the `hies_export` block into a model's config, and change the model's class to its slim version."""
    prefix = model.base_model_prefix + "."
    under_base = (lambda name: name.removeprefix(prefix)) if model.base_model is not model else (lambda name: name)
    block = copy.deepcopy(getattr(model.config, "hies_export", None)) or {"format": 1, "linear": {}, "attributes": {}}
    block["linear"].update({under_base(name): shape for name, shape in shapes.linear.items()})
    if shapes.parameters:
        named = {under_base(name): shape for name, shape in shapes.parameters.items()}
        block.setdefault("parameters", {}).update(named)
    for name, changed in shapes.attributes.items():
        block["attributes"].setdefault(under_base(name), {}).update(changed)
    stock = next(c for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    model.config.hies_export = block
    model.config.auto_map = _auto_map(stock, model)
    model.__class__ = slim_class(stock)


def _auto_map(stock: type, model: PreTrainedModel) -> dict[str, str]:
    """Return Auto class -> "file.class": every Auto class of the stock class, and `AutoModel` for its base model."""
    module = modeling_hies.__name__.rpartition(".")[2]
    names = dict.fromkeys(auto_classes(stock.__name__, model.config.model_type), stock.__name__)
    if has_auto_base(model):
        names["AutoModel"] = type(model.base_model).__name__
    return {auto_class: f"{module}.{name}" for auto_class, name in names.items()}
