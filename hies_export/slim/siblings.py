"""Write a model as another stock family that computes the same, where its own config refuses the result of a cut.

Some configs take only numbers of heads that divide the width of the model, though their code would run with others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..model.internals import empty_model


@dataclass(frozen=True)
class Sibling:
    """A family of models that computes what another one does.

    Attributes:
        model_type: Of the family's config.
        fields: Fields of its config that the other family's lacks, with the values by which both compute the same.
    """

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
    model: PreTrainedModel, settings: Mapping[str, Any], shapes: Mapping[str, Any]
) -> PreTrainedModel | None:
    """Return a cut model as one of another family, with the same weights; None if no family takes it.

    Args:
        model: The cut model; its own config describes it before the cut.
        settings: The fields of its config that the cut changed, with their new values.
        shapes: Shape of every parameter and buffer of the cut model; see `tensor_shapes`.

    Returns:
        A model that shares the tensors of `model` and is in its mode, dtype and place.
    """
    for sibling in SIBLINGS.get(model.config.model_type, ()):
        config = _config(model.config, settings, sibling)
        twin = None if config is None else _empty_twin(model, config)
        if twin is not None and tensor_shapes(twin) == shapes:
            return _with_weights(twin, model)
    return None


def family_note(own: str, written: str) -> str:
    """Return what a run says of a model that was written as a sibling: model types of the dense and the slim model.

    Empty where they are the same.
    """
    if own == written:
        return ""
    return f"Written as {written}, which computes the same: a config of {own} does not take this number of heads."


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
        made.validate()
    except Exception:  # whatever a config's own code raises on values it does not take
        return None
    made._attn_implementation = config._attn_implementation
    return made


def _empty_twin(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the sibling's class for the same task, without weights; None if the family has none."""
    own, other = (type(c).__name__.removesuffix("Config") for c in (model.config, config))
    stock = getattr(transformers, type(model).__name__.replace(own, other, 1), None)
    return None if stock is None or stock is type(model) else empty_model(stock, config, model.dtype)


def _with_weights(twin: PreTrainedModel, model: PreTrainedModel) -> PreTrainedModel:
    """Give a model the tensors of another one with the same names, the same generation config, mode and devices."""
    for name, module in model.named_modules():
        if module._parameters or module._buffers:
            place = twin.get_submodule(name)
            place._parameters.update(module._parameters)
            place._buffers.update(module._buffers)
    if model.can_generate():
        twin.generation_config = model.generation_config
    if getattr(model, "hf_device_map", None):
        from accelerate import dispatch_model

        twin = dispatch_model(twin, model.hf_device_map)
        twin.hf_device_map = model.hf_device_map  # which accelerate sets for several devices only
    return twin.train(model.training)
