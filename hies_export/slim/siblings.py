"""Write a model as another stock family that computes the same, if its own config refuses the result of a cut.

Some configs take only numbers of heads that divide the width of the model, though their code would run with others.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..model.internals import (
    attention_undecided,
    configs_in,
    empty_model,
    save_as_loaded,
    select_attention,
    share_tensors,
)


@dataclass(frozen=True)
class Sibling:
    """A family that computes what another one does, if the fields that the other lacks have these values."""

    model_type: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# tests/slim/test_siblings.py runs every pair on the same weights.
SIBLINGS: dict[str, tuple[Sibling, ...]] = {
    "llama": (Sibling("mistral", {"sliding_window": None}),),
    "cwm": (Sibling("ministral"),),
}
# Keys of a config that say what it is, not what it computes.
_IDENTITY = ("model_type", "architectures", "transformers_version")


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
            config = _config(own[position], fields, sibling)
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


def _config(config: PreTrainedConfig, settings: Mapping[str, Any], sibling: Sibling) -> PreTrainedConfig | None:
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
    """Give a model the tensors of another one with the same names, the same generation config, mode and devices."""
    share_tensors(twin, model)
    if type(twin) is type(model):
        save_as_loaded(twin, model)
    if model.can_generate():
        twin.generation_config = model.generation_config
    if getattr(model, "hf_device_map", None):
        from accelerate import dispatch_model

        twin = dispatch_model(twin, model.hf_device_map)
        twin.hf_device_map = model.hf_device_map  # which accelerate sets for several devices only
    return twin.train(model.training)
