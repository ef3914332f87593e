"""Describe the shapes of a slim model: by fields of a stock config, or by a `hies_export` block and a slim class."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

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
    layers_differ,
    layers_unwarned,
    save_as_loaded,
    select_attention,
    share_tensors,
)
from ..model.linear import features_of
from ..model.modeling_hies import describe_layers
from ..units.units import PrunableModule, Selection


@dataclass(frozen=True)
class Sibling:
    """A family that computes what another one does, if the fields that the other lacks have these values."""

    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)


# tests/slim/test_siblings.py runs every pair on the same weights.
SIBLINGS: dict[str, tuple[Sibling, ...]] = {
    "llama": (Sibling("mistral", {"sliding_window": None}),),
    "cwm": (Sibling("ministral"),),
}
# Keys of a config that say what it is, not what it computes.
_IDENTITY = ("model_type", "architectures", "transformers_version")
# What configs call the number of neurons.
_NEURONS = ("intermediate_size", "ffn_dim", "hidden_dim")
# A field below this may be a ratio of the number of neurons to the width of the model.
_LARGEST_RATIO = 64
# Different numbers of neurons that are tried for one field, such as those of an encoder and of a decoder.
_MOST_COUNTS = 4

PerLayer = dict[str, dict[str, int]]
"""Index of a layer -> field of the config -> its value in that layer."""

Settings = dict[int, dict[str, Any]]
"""Position of a config in `configs_in` -> its new fields."""


def as_sibling(
    model: PreTrainedModel, settings: Mapping[int, Mapping[str, Any]], shapes: Mapping[str, Any]
) -> PreTrainedModel | None:
    """Return a cut model as one of another family, with the same tensors; None if no family takes it.

    In a model of several parts, one part changes its family, such as the language model of a LLaVA. `settings` maps the
    position of a config in `configs_in` to the fields that the cut changed, with their new values.
    """
    own = configs_in(model.config)
    for position, fields in settings.items():
        for sibling in SIBLINGS.get(own[position].model_type, ()):
            config = _sibling_config(own[position], fields, sibling)
            twin = None if config is None else _empty_twin(model, config, position, settings)
            if twin is not None and tensor_shapes(twin) == shapes:
                return _with_weights(twin, model)
    return None


def config_field(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of a config; None if it lacks the field, or if layers differ in it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError, from a family whose layers already differ
        return None


def changed_config(
    config: PreTrainedConfig,
    fields: Mapping[int, Mapping[str, Any]],
    parts: Mapping[int, PreTrainedConfig] | None = None,
) -> PreTrainedConfig:
    """Return a copy of a config with other fields, and other configs as its parts, by position in `configs_in`.

    It is validated, as an invalid one cannot be saved (LLaMA: hidden size not a multiple of heads).
    """
    whole = copy.deepcopy(config)
    places = configs_in(whole)
    for position, values in fields.items():
        for name, value in values.items():
            setattr(places[position], name, value)
    for position, other in (parts or {}).items():
        for place in places:
            for key in place.sub_configs:
                if getattr(place, key, None) is places[position]:
                    setattr(place, key, other)
    with attention_undecided(configs_in(whole)):
        for place in configs_in(whole):
            place.validate()
    return whole


@dataclass(frozen=True)
class Family:
    """Model types of both models; they differ if the slim one was written as a sibling."""

    dense: str
    slim: str

    @property
    def note(self) -> str:
        """A note about a model that was written as a sibling; empty if it was not."""
        if self.dense == self.slim:
            return ""
        return (
            f"Written as {self.slim}, which computes the same: a config of {self.dense} does not take this number of "
            "heads."
        )


def families(dense: PreTrainedConfig, slim: PreTrainedConfig) -> Family:
    """Return the model types, before and after, of the part that was written as a sibling; of the whole if none was."""
    types = [(a.model_type, b.model_type) for a, b in zip(configs_in(dense), configs_in(slim), strict=True)]
    return Family(*next((pair for pair in types if pair[0] != pair[1]), types[0]))


def tensor_shapes(model: nn.Module) -> dict[str, Any]:
    """Return the shape of every parameter and buffer; some buffers are computed from the number of heads."""
    return {n: t.shape for n, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}


def _sibling_config(config: PreTrainedConfig, settings: Mapping[str, Any], sibling: Sibling) -> PreTrainedConfig | None:
    """Return the sibling's config with the same meaning, or None if it lacks a field that is in use, or refuses one."""
    target = CONFIG_MAPPING[sibling.model_type]
    known = {field.name for field in dataclasses.fields(target)}
    usual = type(config)()
    lost = {field.name for field in dataclasses.fields(config)} - known
    if any(getattr(config, name, None) != getattr(usual, name, None) for name in lost):
        return None
    values = {**config.to_dict(), **settings, **sibling.fields}
    try:
        made: PreTrainedConfig = target(**{n: v for n, v in values.items() if n not in lost and n not in _IDENTITY})
        with attention_undecided([made]):
            made.validate()
    except Exception:  # whatever a config's own code raises on values it does not take
        return None
    select_attention(made, like=config)
    return made


def _empty_twin(
    model: PreTrainedModel, config: PreTrainedConfig, position: int, settings: Mapping[int, Mapping[str, Any]]
) -> PreTrainedModel | None:
    """Return a model without weights, with a sibling's config at a position of `configs_in`; None if there is none."""
    if position == 0:
        own, other = (type(c).__name__.removesuffix("Config") for c in (model.config, config))
        stock = getattr(transformers, type(model).__name__.replace(own, other, 1), None)
        return None if stock is None or stock is type(model) else empty_model(stock, config, model.dtype)
    others = {place: values for place, values in settings.items() if place != position}
    try:
        return empty_model(type(model), changed_config(model.config, others, {position: config}), model.dtype)
    except Exception:  # whatever a model's own code raises on a config it does not expect
        return None


def _with_weights(twin: PreTrainedModel, model: PreTrainedModel) -> PreTrainedModel:
    """Let a twin without weights share the model's tensors, take over its generation config and mode; return it."""
    share_tensors(twin, model)
    if type(twin) is type(model):  # else it has names of its own for its tensors in a file
        save_as_loaded(twin, model)
    if model.can_generate():
        twin.generation_config = model.generation_config
    return twin.train(model.training)


def per_layer_config(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]
) -> PerLayer | None:
    """Return the fields in which layers differ from the config of the model, after the cut.

    The config has the numbers of the dense model, except those of a uniform cut of heads that its fields describe.

    None if fields cannot describe it: heads have another width than the dense config says, the config has other names
    for the numbers, or numbers of its own for every layer, or the model has several stacks of layers.
    """
    if layers_differ(model.config):
        return None
    found: PerLayer = {}
    seen = set()
    for module in modules:
        layer = [part for part in module.name.split(".") if part.isdecimal()]
        own = getattr(model.get_submodule(module.name), "config", model.config)
        if len(layer) != 1 or own is not model.config or (layer[0], module.kind) in seen:
            return None
        fields = _layer_fields(model.config, layer[0], module, selection)
        if fields is None:
            return None
        seen.add((layer[0], module.kind))
        changed = {name: value for name, value in fields.items() if getattr(model.config, name) != value}
        if changed:
            found.setdefault(layer[0], {}).update(changed)
    return found


def set_layers(config: PreTrainedConfig, layers: PerLayer | None) -> None:
    """Write the sizes of layers into a config's `per_layer_config`; remove it if there are none, or if it cannot load.

    A config without `head_dim` gets the dense model's: readers would compute it from a layer's own number of heads.
    """
    if layers:
        trial = copy.deepcopy(config)
        _write_layers(trial, layers)
        try:
            with layers_unwarned():
                type(config).from_dict(trial.to_dict())
        except Exception:  # whatever a config's own code raises on layers that differ
            layers = None
    _write_layers(config, layers)


def _write_layers(config: Any, layers: PerLayer | None) -> None:
    if layers and any("num_attention_heads" in fields for fields in layers.values()):
        config.head_dim = head_width(config)
    describe_layers(config, layers)


def head_width(config: PreTrainedConfig) -> int | None:
    """Return the width of the heads of a dense model by its config; None if the config does not say."""
    width, hidden, heads = (config_field(config, name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if width is None and type(hidden) is int and type(heads) is int and heads > 0 and hidden % heads == 0:
        width = hidden // heads
    return width if type(width) is int else None


def _layer_fields(config: Any, layer: str, module: PrunableModule, selection: Selection) -> dict[str, int] | None:
    """Return the fields that describe what a module of a layer keeps, or None if the config lacks one of them."""
    kept = selection[module.name]
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
    # Module -> argument -> which heads it takes.
    narrowed: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether a cut changed anything."""
        return bool(self.linear or self.parameters or self.attributes or self.narrowed)


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

    It can be loaded with any other head too, to be fine-tuned.
    """
    module = modeling_hies.__name__.rpartition(".")[2]
    names = dict.fromkeys(auto_classes(stock.__name__, model.config.model_type), stock.__name__)
    if has_auto_base(model):
        names["AutoModel"] = type(model.base_model).__name__
        names = heads_on(stock, model.config.model_type) | names
    return {auto_class: f"{module}.{name}" for auto_class, name in names.items()}


def plain_model(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]
) -> PreTrainedModel | None:
    """Return a uniformly cut model with a config that alone describes it, or None if there is no such config.

    A config is tried first: the stock class, built from it on the meta device, must have the slim model's shapes. Each
    config and sub-config describes the modules that hold it, so the towers of a model may differ. If the model's own
    config refuses the result, a sibling's is tried; the returned model then has the sibling's class and shares the
    tensors.
    """
    if getattr(model.config, "hies_export", None) is not None:
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
    stock, shapes = _stock_model(model, settings), tensor_shapes(model)
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
        dense = _stock_model(self._model, {})
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
        stock = _stock_model(self._model, {position: {name: value}})
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
        for position, known, value in fields:
            if type(value) is int and (values := [stays for units, stays in counts if value == units]):
                yield position, known.name, values
        for position, known, value in fields:
            if type(value) is float and 1 <= value <= _LARGEST_RATIO:
                # A model may round the product down, so the second lies a little above.
                yield position, known.name, [value * (counts[0][1] + more) / counts[0][0] for more in (0, 0.25)]
            elif type(value) is int and 1 <= value <= _LARGEST_RATIO and value * counts[0][1] % counts[0][0] == 0:
                yield position, known.name, [value * counts[0][1] // counts[0][0]]
        for position, known, value in fields:
            if value is None and "int" in str(known.type):
                yield position, known.name, [stays for _, stays in counts]


def _stock_model(model: PreTrainedModel, settings: Settings) -> PreTrainedModel | None:
    """Return the stock model, on the meta device, of a model's config with other fields; None if there is none."""
    try:
        candidate = changed_config(model.config, settings)
        with torch.device("meta"):
            return type(model)(candidate)
    except Exception:  # whatever a model's own code raises on a config it does not expect
        return None
