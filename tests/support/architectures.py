"""Build a tiny random model of every model type of transformers, with a batch for it."""

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from support.models import shake

ROWS, LENGTH, DECODER_LENGTH = 3, 11, 7
LARGEST_PARAMETERS = 40_000_000  # a config that stays larger has dimensions this file does not know

# One set of small dimensions, by the names configs give them. Six query heads, in three groups where there are groups.
_SAME = {
    48: "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size encoder_embed_dim attention_hidden_size "
    "projection_dim word_embed_proj_dim encoder_hidden_size decoder_hidden_size d_embed text_hidden_size "
    "hidden_dim_size lang_dim qkv_dim all_head_size ",
    6: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads",
    3: "num_key_value_heads num_kv_heads n_head_kv encoder_num_key_value_heads decoder_num_key_value_heads",
    8: "head_dim d_kv attention_head_dim kv_channels attention_head_size v_head_dim qk_nope_head_dim index_head_dim",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim ffn_hidden_size d_inner "
    "dim_feedforward encoder_intermediate_size decoder_intermediate_size mlp_dim filter_size "
    "max_position_embeddings n_positions max_seq_len max_source_positions max_target_positions",
    1.5: "attn_logit_softcapping",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers depth num_experts_per_tok moe_top_k "
    "num_experts_per_token moe_topk moe_k eos_token_id decoder_start_token_id sep_token_id",
    100: "vocab_size vocab_size_per_layer_input",
    16: "image_size hidden_size_per_layer_input q_lora_rank kv_lora_rank moe_intermediate_size "
    "shared_expert_intermediate_size num_mel_bins vq_embed_dim shared_intermediate_size "
    "moe_shared_expert_intermediate_size linear_key_head_dim "
    "linear_value_head_dim mamba_d_state ssm_state_size state_size",
    4: "patch_size num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim "
    "linear_num_key_heads linear_num_value_heads",
    1: "n_group topk_group n_shared_experts bos_token_id cls_token_id ",
    0: "pad_token_id",
    99: "image_token_id image_token_index",
    98: "video_token_id video_token_index audio_token_id audio_token_index",
    97: "vision_start_token_id boi_token_id boi_token_index",
    96: "vision_end_token_id eoi_token_id eoi_token_index",
}
_OFTEN_NONE = ("pad_token_id", "num_key_value_heads", "decoder_start_token_id", "head_dim", "vocab_size")
SMALL = {name: value for value, names in _SAME.items() for name in names.split()}

# Tried in order, each on top of the small dimensions, until a model can be built and a batch fits it: as it is; every
# head its own keys; four layers, of which hybrids have one with attention; larger images; three axes of positions.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {name: 6 for name in SMALL if SMALL[name] == 3},
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 4, "num_key_value_heads": 6},
    {"image_size": 64},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
)

# Dimensions that several types share.
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4}
_LEVELS = {
    "backbone_config": _RESNET | {"model_type": "rt_detr_resnet", "out_features": ["stage2", "stage3", "stage4"]},
    "encoder_in_channels": [8] * 3,
    "encoder_hidden_dim": 48,
    "decoder_in_channels": [48] * 3,
    "num_queries": 5,
}
_DETR = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET | {"out_features": ["stage4"]}}
_WINDOWS = {"depths": [2, 2], "num_heads": [3, 6], "window_size": 2}
_BOXES = {"coordinate_size": 8, "shape_size": 8, "input_size": 16}

# What these cannot say: dimensions of its own, and the class to take.
OVERRIDES: dict[str, dict[str, Any]] = {
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "deformable_detr": _DETR | {"d_model": 96},
    "detr": _DETR,
    "donut-swin": _WINDOWS,
    "layoutlmv3": _BOXES,
    "mobilevit": {"image_size": 64},
    "rt_detr": _LEVELS,
    "rt_detr_v2": _LEVELS,
    "swin": _WINDOWS,
    "table-transformer": _DETR,
    "bamba": {"mamba_n_heads": 12, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_chunk_size": 8},
    "codegen": {"n_head": 4},
    "deepseek_v2": {"num_key_value_heads": 6, "head_dim": 4, "topk_method": "greedy"},
    "diffllama": {"num_key_value_heads": 2},
    "esm": {"vocab_size": 33, "position_embedding_type": "rotary"},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 12, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"expert_ffn_hidden_size": 16, "num_key_value_heads": 6},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 48},
    "mamba2": {"num_heads": 12},
    "xmod": {"default_language": "en_XX"},
}
CLASSES: dict[str, str] = {}

# The first task a model type has is the one people prune it for; what fills in masks is better known as a classifier.
_TASKS = (
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "MASKED_LM",
)


class NoTinyModel(Exception):
    """Say that no small configuration, or no batch, is known for a model type."""


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
        if is_number or name in variant or (before is None and name in _OFTEN_NONE):
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
            return model, (batch_of or tiny_batch)(model)
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


def tiny_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the first candidate batch that the model accepts."""
    reasons = []
    for batch in _candidates(model):
        try:
            with torch.no_grad():
                output = model(**batch)[0]
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
            continue
        if not torch.isfinite(output).all():
            reasons.append("its output is not finite")
            continue
        return batch
    raise NoTinyModel(f"no batch fits it ({'; '.join(dict.fromkeys(reasons))})")


def _candidates(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    accepted = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = min(90, _first_number(model.config.get_text_config(), ("vocab_size",), 90))
    text = {
        "input_ids": torch.randint(3, tokens, (ROWS, LENGTH), generator=generator),
        "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64),
    }
    for row in range(1, ROWS):
        text["attention_mask"][row, LENGTH - 2 * row :] = 0
    decoder = {}
    if model.config.is_encoder_decoder and "decoder_input_ids" in accepted:
        decoder["decoder_input_ids"] = torch.randint(3, 90, (ROWS, DECODER_LENGTH), generator=generator)
    if "pixel_values" in accepted:
        vision = getattr(model.config, "vision_config", model.config)
        # Detectors have a backbone that leaves one token of a small image.
        size = getattr(vision, "image_size", 64 if hasattr(vision, "num_queries") else 16)
        height, width = (size, size) if isinstance(size, int) else size if isinstance(size, (list, tuple)) else (16, 16)
        channels = getattr(vision, "num_channels", 3)
        if "spatial_shapes" in accepted:  # images as sequences of patches, which may differ in number
            patches = normal(ROWS, 16, channels * vision.patch_size**2)
            mask, shapes = torch.ones(ROWS, 16, dtype=torch.int64), torch.full((ROWS, 2), 4)
            images = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
            yield images | (text if "input_ids" in accepted else {})
        pixels = normal(ROWS, channels if isinstance(channels, int) else 3, height, width)
        if "noise" in accepted:
            # What a model would draw at random to mask some patches.
            yield {"pixel_values": pixels, "noise": torch.rand(ROWS, 16, generator=generator)}
        if "input_ids" not in accepted:
            yield {"pixel_values": pixels} | decoder
            frames = _first_number(model.config, ("num_frames", "frames_per_clip"), 2)
            yield {"pixel_values": pixels[:, None].repeat(1, frames, 1, 1, 1)}
            if not hasattr(vision, "image_size"):  # each stage makes them smaller
                yield {"pixel_values": normal(ROWS, channels, 64, 64)}
        else:
            yield from _text_and_images(model, text, pixels)
    if "input_features" in accepted:
        mels = _first_number(
            model.config, ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"), 16
        )
        positions = getattr(model.config, "max_source_positions", LENGTH)
        yield {"input_features": normal(ROWS, mels, 2 * positions)} | decoder
        yield {"input_features": normal(ROWS, 4 * LENGTH, mels)} | decoder
    if "input_values" in accepted:
        yield {"input_values": normal(ROWS, 4000)} | decoder
        yield {"input_values": normal(ROWS, 1, 4000)}
        frames = _first_number(model.config, ("max_length",), 64)
        yield {"input_values": normal(ROWS, frames, _first_number(model.config, ("num_mel_bins",), 16))}
    if "grid_thw" in accepted:  # images of a whole batch as one sequence of patches
        config = model.config
        width = getattr(config, "in_channels", 3) * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        yield {next(iter(accepted)): normal(ROWS * 16, width), "grid_thw": torch.tensor([[1, 4, 4]] * ROWS)}
    if "input_ids" in accepted:
        yield text | decoder
        if "bbox" in accepted:
            yield text | {"bbox": torch.zeros(ROWS, LENGTH, 4, dtype=torch.int64)} | decoder
        yield {"input_ids": text["input_ids"]} | decoder


def _first_number(config: PreTrainedConfig, names: tuple[str, ...], otherwise: int) -> int:
    """Return the first of the named attributes of a config that is a number."""
    return next((v for name in names if isinstance(v := getattr(config, name, None), int)), otherwise)


def _text_and_images(model: PreTrainedModel, text: dict[str, Tensor], pixels: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield images with text that begins with their image tokens, then images with text that has none."""
    ids, mask = text["input_ids"], text["attention_mask"]
    token = _first_number(model.config, ("image_token_id", "image_token_index"), 99)
    try:
        with torch.no_grad():
            features = model.get_image_features(pixel_values=pixels)
        features = getattr(features, "pooler_output", features)
        if isinstance(features, (list, tuple)):
            features = torch.cat([f.reshape(-1, f.shape[-1]) for f in features])
        count = features.reshape(-1, features.shape[-1]).shape[0] // ROWS
        image = torch.full((ROWS, count), token)
        yield {
            "input_ids": torch.cat([image, ids], 1),
            "attention_mask": torch.cat([torch.ones_like(image), mask], 1),
            "pixel_values": pixels,
        }
    except Exception:  # not all models make features of plain images
        pass
    yield text | {"pixel_values": pixels}
