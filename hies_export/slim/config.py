"""Describe a slim model in its config, by a `hies_export` block and a slim class; `uniform` uses plain fields."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..model import modeling_hies
from ..model.internals import auto_classes, has_auto_base, heads_on
from .per_layer import PerLayer, set_layers


def slim_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the slim version of a model class of transformers, which must export it: checkpoints name it."""
    if not hasattr(modeling_hies, stock.__name__):
        raise UnsupportedModelError(
            f"a slim checkpoint names its model class, which transformers must export, but it does not export "
            f"{stock.__name__}; cut a model of another class, or uniformly where its config can say it"
        )
    return getattr(modeling_hies, stock.__name__)


def stock_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a model class's stock class of transformers: itself, or the one that it is the slim version of."""
    return next(c for c in model_class.__mro__ if c.__module__.startswith("transformers."))


def is_slim(model: PreTrainedModel) -> bool:
    """Return whether a model's config has a `hies_export` block, which its shapes depend on."""
    return getattr(model.config, "hies_export", None) is not None


@dataclass
class Shapes:
    """The shapes and attributes that a cut changed; keys are dotted names."""

    linear: dict[str, list[int]] = field(default_factory=dict)  # layer -> [out_features, in_features]
    parameters: dict[str, list[int]] = field(default_factory=dict)  # outside of linear layers
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    narrowed: dict[str, dict[str, list[Any]]] = field(
        default_factory=dict
    )  # module -> argument -> which heads it takes
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)  # attention without heads -> how it is skipped

    def __bool__(self) -> bool:
        """Return whether a cut changed anything."""
        return bool(self.linear or self.parameters or self.attributes or self.narrowed or self.skipped)


def become_slim(model: PreTrainedModel, shapes: Shapes, layers: PerLayer | None) -> None:
    """Write the `hies_export` block into the config of a cut model, and change its class to the slim version.

    `layers`, from `per_layer_config`, describes the same as `shapes` in config fields; None if fields cannot describe
    it.
    """
    prefix = model.base_model_prefix + "."
    under_base = (lambda name: name.removeprefix(prefix)) if model.base_model is not model else (lambda name: name)
    new: dict[str, Any] = {"format": 1, "linear": {}, "attributes": {}, "per_layer_config": {}}
    block = copy.deepcopy(getattr(model.config, "hies_export", None)) or new
    block["linear"].update({under_base(name): shape for name, shape in shapes.linear.items()})
    if shapes.parameters:
        named = {under_base(name): shape for name, shape in shapes.parameters.items()}
        block.setdefault("parameters", {}).update(named)
    if shapes.narrowed:
        block.setdefault("narrowed", {}).update({under_base(name): taken for name, taken in shapes.narrowed.items()})
    if shapes.skipped:
        block.setdefault("skipped", {}).update({under_base(name): how for name, how in shapes.skipped.items()})
    for name, changed in shapes.attributes.items():
        block["attributes"].setdefault(under_base(name), {}).update(changed)
    if layers is None:
        block.pop("per_layer_config", None)
    elif "per_layer_config" in block:  # otherwise an earlier cut would be lost
        for layer, fields in layers.items():
            block["per_layer_config"].setdefault(layer, {}).update(fields)
    stock = stock_class(type(model))
    model.config.hies_export = block
    set_layers(model.config, block.get("per_layer_config"))
    model.config.auto_map = _auto_map(stock, model)
    model.__class__ = slim_class(stock)


def _auto_map(stock: type, model: PreTrainedModel) -> dict[str, str]:
    """Return Auto class -> "file.class": every Auto class of the stock class, and `AutoModel` for its base model.

    An encoder or decoder can be loaded with any other head too, to be fine-tuned.
    """
    module = modeling_hies.__name__.rpartition(".")[2]
    names = dict.fromkeys(auto_classes(stock.__name__, model.config.model_type), stock.__name__)
    if has_auto_base(model):
        names["AutoModel"] = type(model.base_model).__name__
        if not model.config.is_encoder_decoder:
            names = heads_on(stock, model.config.model_type) | names
    return {auto_class: f"{module}.{name}" for auto_class, name in names.items()}
