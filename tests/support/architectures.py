"""Build a tiny random model of every model type of transformers, with a batch for it."""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from support.dimensions import CLASSES, OFTEN_NONE, OVERRIDES, SMALL, VARIANTS
from support.inputs import NoTinyModel, tiny_batch
from support.models import shake

LARGEST_PARAMETERS = 40_000_000  # a config that stays larger has dimensions this file does not know

# The first task a model type has is the one people prune it for; what fills in masks is better known as a classifier.
_TASKS = (
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "MASKED_LM",
)


def model_types() -> list[str]:
    """Return every model type that has a model."""
    names = modeling_auto.MODEL_MAPPING_NAMES
    return sorted(t for t in CONFIG_MAPPING if t in names or any(t in _names(task) for task in _TASKS))


def tiny_config(
    config_class: type[PreTrainedConfig], variant: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Return a config with small dimensions, whatever the class calls them; its sub-configs are small as well."""
    overrides = dict(overrides or {})
    default = config_class()
    dimensions = SMALL | dict(variant)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name = field.name
        if not field.init or name not in dimensions:
            continue
        try:
            before = getattr(default, name)
        except Exception:  # an attribute that layers may have one by one has no value of its own
            before = field.default
        size = dimensions[name]
        if name == "image_size" and isinstance(before, (list, tuple)):
            values[name] = [size] * len(before)
            continue
        is_number = isinstance(before, (int, float)) and not isinstance(before, bool)
        if is_number or name in variant or (before is None and name in OFTEN_NONE):
            values[name] = copy.deepcopy(size)
    for name in config_class.sub_configs:
        child = getattr(default, name, None)
        whole = "model_type" in overrides.get(name, {})  # of another type than the default
        if isinstance(child, PreTrainedConfig) and not whole:
            values[name] = tiny_config(type(child), variant, overrides.pop(name, {})).to_dict()
    return config_class(**(values | overrides))


def tiny(
    model_type: str, name: str | None = None, batch_of: Callable[[PreTrainedModel], dict[str, Tensor]] | None = None
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a random model of a type, of the class of that name, in evaluation mode, and a batch that fits it."""
    reasons: list[str] = []
    for variant in VARIANTS:
        try:
            model = _build(model_type, name or class_name(model_type), variant)
            batch = (batch_of or tiny_batch)(model)
            _set_batch_norms(model, batch)
            return model, batch
        except ImportError as error:
            raise NoTinyModel(" ".join(str(error).split())) from error
        except Exception as error:  # whatever a model's code raises on dimensions it does not expect
            kind = "" if isinstance(error, NoTinyModel) else f"{type(error).__name__}: "
            reasons.append(kind + " ".join(str(error).split())[:300])
    raise NoTinyModel(reasons[0])


def _build(model_type: str, name: str, variant: Mapping[str, Any]) -> PreTrainedModel:
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise NoTinyModel(f"transformers does not export {name}")
    config = tiny_config(CONFIG_MAPPING[model_type], variant, OVERRIDES.get(model_type))
    config.num_labels = 3
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # as every checkpoint has it
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if parameters > LARGEST_PARAMETERS:
        raise NoTinyModel(f"its small configuration has {parameters / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = model_class(config)
    # What no checkpoint holds, such as sinusoids, must stay what the class makes of it.
    names = [*(model._keys_to_ignore_on_save or ()), *(model._keys_to_ignore_on_load_missing or ())]
    unsaved = [re.compile(pattern) for pattern in names]
    fixed = {
        name: p.clone()
        for name, p in model.named_parameters()
        if not p.requires_grad or any(u.search(name) for u in unsaved)
    }
    shake(model)
    with torch.no_grad():
        for name, value in fixed.items():
            model.get_parameter(name).copy_(value)
    return model


def _set_batch_norms(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    """Give batch norms the mean and variance of a batch; with those of a new model, deep features vanish."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    if norms:
        with torch.no_grad():
            model(**batch)
    for norm in norms:
        norm.eval()


def class_name(model_type: str) -> str:
    """Return the class that a model type is tested with: that of a task, or else its base class."""
    if model_type in CLASSES:
        return CLASSES[model_type]
    tasks = list(_TASKS)
    if model_type in _names("MASKED_LM"):
        tasks.remove("CAUSAL_LM")
    for task in tasks:
        if model_type in _names(task):
            return _first(_names(task)[model_type])
    return _first(modeling_auto.MODEL_MAPPING_NAMES[model_type])


def _names(task: str) -> Mapping[str, Any]:
    return getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")


def _first(name: Any) -> str:
    return name if isinstance(name, str) else name[0]
