"""Describe the shapes of a slim model: by fields of a stock config, or by a `hies_export` block and a slim class."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import nn
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError
from ..kinds import ATTENTION, MLP
from ..model import modeling_hies
from ..model.internals import (
    attention_undecided,
    auto_classes,
    configs_in,
    empty_model,
    has_auto_base,
    heads_on,
    layers_unwarned,
    select_attention,
    share_tensors,
)
from ..model.modeling_hies import describe_layers
from ..units.units import PrunableModule, Selection

_IDENTITY = ("model_type", "architectures", "transformers_version")  # what a config is, not what it computes
# Kind of units -> possible names of the field with their number. For heads see `_head_settings`.
_FIELDS = {MLP: ("intermediate_size", "ffn_dim", "hidden_dim")}
# Fields with that number, or a multiple or share of it, in families whose layers cannot differ by fields.
_RARE = (
    *("n_inner", "d_inner", "dim_ff", "dff", "mlp_dim", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_ratio"),
    "block_multiple_of",
)

PerLayer = dict[str, dict[str, int]]
"""Index of a layer -> field of the config -> its value in that layer."""

Settings = dict[int, dict[str, Any]]
"""Position of a config in `configs_in` -> its new fields."""


def as_mistral(model: PreTrainedModel, settings: Settings) -> PreTrainedModel | None:
    """Return a Mistral with the tensors of a cut LLaMA.

    Mistral computes the same, and takes heads that do not divide the width. `settings` are the fields that the cut
    changed. None if the model is no LLaMA, or if no Mistral has its fields and the shapes of its tensors.
    """
    config = _mistral_config(model.config, settings.get(0, {}))
    mistral = getattr(transformers, type(model).__name__.replace("Llama", "Mistral", 1), None)
    if config is None or mistral is None:
        return None
    twin = empty_model(mistral, config, model.dtype)
    if tensor_shapes(twin) != tensor_shapes(model):
        return None
    share_tensors(twin, model)
    if model.can_generate():
        twin.generation_config = model.generation_config
    return twin.train(model.training)


def config_field(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of a config; None if it lacks the field, or if layers differ in it."""
    with suppress(RuntimeError):  # AmbiguousGlobalPerLayerAttributeError, from a family whose layers already differ
        return getattr(config, name, None)
    return None


def tensor_shapes(model: nn.Module) -> dict[str, Any]:
    """Return the shape of every parameter and buffer, by name; some buffers depend on the number of heads."""
    return {n: t.shape for n, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}


def _mistral_config(config: PreTrainedConfig, settings: Mapping[str, Any]) -> MistralConfig | None:
    """Return a LLaMA's config with the fields in `settings` as a Mistral's; None if it is no LLaMA's, or cannot be."""
    if config.model_type != "llama":
        return None
    defaults, known = LlamaConfig(), {field.name for field in dataclasses.fields(MistralConfig)}
    lost = {field.name for field in dataclasses.fields(config)} - known  # which Mistral lacks
    if any(getattr(config, name) != getattr(defaults, name) for name in lost):  # one of them is in use
        return None
    values = {**config.to_dict(), **settings, "sliding_window": None}  # a LLaMA sees all tokens
    try:
        mistral = MistralConfig(**{n: v for n, v in values.items() if n not in lost and n not in _IDENTITY})
        with attention_undecided([mistral]):
            mistral.validate()
    except Exception:  # whatever a config's own code raises on values it does not take
        return None
    select_attention(mistral, like=config)
    return mistral


def per_layer_config(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]
) -> PerLayer | None:
    """Return the fields in which layers differ from the model's config after the cut; None if fields cannot say it.

    The config has the numbers of the dense model, except those of a uniform cut of heads that its fields describe.
    Fields cannot describe heads of another width than the dense config says, a config with other names for the numbers
    or with own numbers for every layer, or a model with several stacks of layers.
    """
    if model.config.is_heterogeneous:
        return None
    layers: PerLayer = {}
    seen = set()
    for module in modules:
        numbers = [part for part in module.name.split(".") if part.isdecimal()]
        config = getattr(model.get_submodule(module.name), "config", model.config)
        if len(numbers) != 1 or config is not model.config or (numbers[0], module.kind) in seen:
            return None
        if (fields := _layer_fields(model.config, numbers[0], module, selection)) is None:
            return None
        seen.add((numbers[0], module.kind))
        if changed := {name: value for name, value in fields.items() if getattr(model.config, name) != value}:
            layers.setdefault(numbers[0], {}).update(changed)
    return layers


def _set_layers(config: Any, layers: PerLayer | None) -> None:
    """Write the sizes of layers into a config's `per_layer_config`; remove it if there are none, or if it cannot load.

    A config without `head_dim` gets the dense model's: readers would compute it from a layer's own number of heads.
    """

    def write(config: Any, layers: PerLayer | None) -> None:
        if layers and any("num_attention_heads" in fields for fields in layers.values()):
            config.head_dim = head_width(config)
        describe_layers(config, layers)

    if layers:
        trial = copy.deepcopy(config)
        write(trial, layers)
        try:
            with layers_unwarned():
                type(config).from_dict(trial.to_dict())
        except Exception:  # whatever a config's own code raises on layers that differ
            layers = None
    write(config, layers)


def head_width(config: PreTrainedConfig) -> int | None:
    """Return the width of a dense model's heads by its config; None if the config does not say."""
    width, hidden, heads = (config_field(config, name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if width is None and type(hidden) is int and type(heads) is int and heads > 0 and hidden % heads == 0:
        width = hidden // heads
    return width if type(width) is int else None


def _layer_fields(config: Any, layer: str, module: PrunableModule, selection: Selection) -> dict[str, int] | None:
    """Return the fields that describe the units that a layer's module keeps; None if the config lacks one of them."""
    kept = selection[module.name]
    numbers: dict[str, tuple[int, int]] = {}  # field -> its value before and after the cut
    if module.kind == ATTENTION:
        if not module.key_width == module.unit_width == head_width(config):
            return None
        numbers["num_attention_heads"] = (module.units, len(kept.units))
        if type(config_field(config, "num_key_value_heads")) is int:
            numbers["num_key_value_heads"] = (module.groups, len(kept.kept_groups))
        elif module.units != module.groups:
            return None
    else:
        names = _FIELDS.get(module.kind, ())
        name = next((field.name for field in dataclasses.fields(config) if field.name in names), None)
        if name is None:
            return None
        numbers[name] = (module.units, len(kept.units))
    earlier = (getattr(config, "hies_export", None) or {}).get("per_layer_config", {}).get(layer, {})
    # A field with another value means something else, such as the neurons of an expert.
    known = all(earlier.get(name, config_field(config, name)) in pair for name, pair in numbers.items())
    return {name: after for name, (_, after) in numbers.items()} if known else None


def slim_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the slim version of a model class; refuse classes that transformers does not export."""
    if not hasattr(modeling_hies, stock.__name__):
        raise UnsupportedModelError(
            f"a slim checkpoint names its model class, which transformers must export, but it does not export "
            f"{stock.__name__}; cut a model of another class, or uniformly where its config can say it"
        )
    return getattr(modeling_hies, stock.__name__)


def is_slim(model: PreTrainedModel) -> bool:
    """Return whether a model's config has a `hies_export` block, which describes its shapes."""
    return getattr(model.config, "hies_export", None) is not None


@dataclass
class Shapes:
    """The shapes and attributes that a cut changed; keys are dotted names."""

    linear: dict[str, list[int]] = field(default_factory=dict)  # layer -> [out_features, in_features]
    parameters: dict[str, list[int]] = field(default_factory=dict)  # parameter outside of linear layers -> its shape
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # module -> attribute -> its value
    narrowed: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # module -> argument -> heads that it takes

    def __bool__(self) -> bool:
        return any(vars(self).values())


def become_slim(model: PreTrainedModel, shapes: Shapes, layers: PerLayer | None) -> None:
    """Write the `hies_export` block into the config of a cut model, and change its class to the slim version.

    `layers`, from `per_layer_config`, are config fields that describe the same as `shapes`; None if fields cannot.
    """
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."  # names in the block are below the base
    new: dict[str, Any] = {"format": 1, "linear": {}, "attributes": {}, "per_layer_config": {}}
    block = copy.deepcopy(getattr(model.config, "hies_export", None)) or new
    for key in ("linear", "parameters", "narrowed"):
        if changed := {name.removeprefix(prefix): value for name, value in getattr(shapes, key).items()}:
            block.setdefault(key, {}).update(changed)
    for name, values in shapes.attributes.items():
        block["attributes"].setdefault(name.removeprefix(prefix), {}).update(values)
    if layers is None:
        block.pop("per_layer_config", None)
    elif "per_layer_config" in block:  # a block without it has a cut that fields cannot describe
        for layer, fields in layers.items():
            block["per_layer_config"].setdefault(layer, {}).update(fields)
    stock = next(c for c in type(model).__mro__ if c.__module__.startswith("transformers."))  # it may be slim already
    model.config.hies_export = block
    _set_layers(model.config, block.get("per_layer_config"))
    # What may load the checkpoint: the stock class, its base by `AutoModel`, and other heads on it, for fine-tuning.
    names = dict.fromkeys(auto_classes(stock.__name__, model.config.model_type), stock.__name__)
    if has_auto_base(model):
        names["AutoModel"] = type(model.base_model).__name__
        names = heads_on(stock, model.config.model_type) | names
    file = modeling_hies.__name__.rpartition(".")[2]
    model.config.auto_map = {auto_class: f"{file}.{name}" for auto_class, name in names.items()}
    model.__class__ = slim_class(stock)


def plain_model(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]
) -> PreTrainedModel | None:
    """Return a model whose modules of one kind are cut alike, with a config that alone says it; None if none can.

    The stock class, built from the config on the meta device, must have the slim model's shapes. Each config and
    sub-config describes the modules that hold it, so the towers of a model may differ. If a LLaMA's own config refuses
    the result, a Mistral's is tried; the returned model then has that class and shares the tensors.
    """
    if is_slim(model):
        return None
    settings_of = _head_settings if modules[0].kind == ATTENTION else _unit_settings
    settings = settings_of(model, selection, modules)
    if settings is None:
        return None
    if (stock := _stock_model(model, settings)) is None:
        return as_mistral(model, settings)
    if tensor_shapes(stock) != tensor_shapes(model):
        return None
    for position, config in enumerate(configs_in(model.config)):
        for name, value in settings.get(position, {}).items():
            setattr(config, name, value)
    return model


def _head_settings(model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]) -> Settings | None:
    """Return the fields for the heads; None if modules with the same config keep different numbers."""
    configs, first = configs_in(model.config), dict[int, tuple[PrunableModule, tuple[int | None, ...]]]()
    for module in modules:
        kept, own = selection[module.name], getattr(model.get_submodule(module.name), "config", model.config)
        position = next((position for position, config in enumerate(configs) if config is own), 0)
        numbers = (len(kept.units), len(kept.kept_groups), module.unit_width, module.key_width)
        if first.setdefault(position, (module, numbers))[1] != numbers:
            return None
    settings: Settings = {}
    for position, (module, (heads, key_value_heads, _, width)) in first.items():
        if heads != module.units:
            settings[position] = {"num_attention_heads": heads, "head_dim": width}
            if hasattr(configs[position], "num_key_value_heads"):
                settings[position]["num_key_value_heads"] = key_value_heads
    return settings


def _unit_settings(model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]) -> Settings | None:
    """Return the fields for other units; None if no field is known, or if modules keep different numbers of one.

    A field belongs to the innermost config around a module. Whether it says what its name does, the shapes will show.
    """
    configs, settings = configs_in(model.config), Settings()
    for module in (m for m in modules if selection[m.name].removed):
        parts = module.name.split(".")
        around = (getattr(model.get_submodule(".".join(parts[:n])), "config", None) for n in range(len(parts), 0, -1))
        position = next((i for config in around for i, other in enumerate(configs) if other is config), 0)
        field_and_value = _unit_field(configs[position], module, len(selection[module.name].units))
        if field_and_value is None:
            return None
        name, value = field_and_value
        if settings.setdefault(position, {}).setdefault(name, value) != value:  # another module keeps another number
            return None
    return settings


def _unit_field(config: Any, module: PrunableModule, kept: int) -> tuple[str, int | float] | None:
    """Return the first field that may say the number of units, with its value after a cut; None if there is none."""
    known, units = {field.name for field in dataclasses.fields(config)}, module.units
    for name in (*_FIELDS.get(module.kind, ()), *_RARE):
        value = config_field(config, name)
        if name in known and value is None:  # the field overrides a number that the model derives
            return name, kept
        if type(value) is int and value * kept % units == 0:
            return name, value * kept // units
        if type(value) is float:  # a ratio, a little above because a model may round the product down
            return name, value * (kept + 0.25) / units
    return None


def _stock_model(model: PreTrainedModel, settings: Settings) -> PreTrainedModel | None:
    """Return a model of a model's class, without weights, from its config with other fields.

    None if there is none, or if that config cannot be saved, as a LLaMA's hidden size that is no multiple of its heads.
    """
    try:
        config = copy.deepcopy(model.config)
        configs = configs_in(config)
        for position, values in settings.items():
            for name, value in values.items():
                setattr(configs[position], name, value)
        with attention_undecided(configs):
            for each in configs:
                each.validate()
        return empty_model(type(model), config, model.dtype)
    except Exception:  # whatever a model's own code raises on a config it does not expect
        return None
