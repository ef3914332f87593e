"""Trace a vision-language model to three graphs: image encoder with projector, token embeddings, decoder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import DataError, UnsupportedModelError, root_cause
from ...model.tokens import random_images, synthetic_batch
from ..runtimes.base import Provider
from ..runtimes.ort import DECODER_FILE, EMBED_FILE, VISION_FILE
from .decoder import trace_decoder
from .trace import TOKEN_AXES, export_program


def is_vision_language(model: PreTrainedModel) -> bool:
    """Return whether a model takes images, and has an image encoder and a language model as separate modules."""
    modules = (model.get_encoder(modality="image"), model.get_decoder())
    takes_images = "pixel_values" in inspect.signature(model.forward).parameters
    return takes_images and all(module is not None and module is not model for module in modules)


def image_text_batch(
    model: PreTrainedModel, *, batch: int = 2, text: int = 8, image: Sequence[int] | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Return random images and prompts of `text` tokens, half before the image tokens, half after.

    Returns `pixel_values` (batch, *image), by default in the size of the config, and `input_ids` and `attention_mask`
    (batch, sequence). Raises UnsupportedModelError if image features need more than `pixel_values`.
    """
    pixels = random_images(model.config, batch, torch.Generator().manual_seed(seed), image)
    pixels = pixels.to(model.device, model.dtype)
    with torch.no_grad():
        tokens_per_image = _image_features(model, pixels).shape[1]
    ids = synthetic_batch(model, batch=batch, sequence=text, seed=seed)["input_ids"]
    image_ids = torch.full((batch, tokens_per_image), model.config.image_token_id)
    ids = torch.cat([ids[:, : text // 2], image_ids, ids[:, text // 2 :]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def check_vision_language(model: PreTrainedModel, given: Mapping[str, Tensor]) -> None:
    """Refuse a model that cannot be exported in parts (UnsupportedModelError), or bad prompts (DataError)."""
    if getattr(model.config, "image_token_id", None) is None:
        raise UnsupportedModelError(
            f"ONNX export needs a vision-language model whose config names the image token, and "
            f"{type(model).__name__} has no image_token_id"
        )
    if type_inputs := {"token_type_ids", "mm_token_type_ids"} & set(inspect.signature(model.forward).parameters):
        raise UnsupportedModelError(
            f"ONNX export needs a vision-language model that reads images and text alike, from left to right, and "
            f"{type(model).__name__} tells them apart by {min(type_inputs)}"
        )
    with torch.no_grad():
        features = _image_features(model, given["pixel_values"].to(model.device, model.dtype))
    image_token_mask(given["input_ids"], features, model.config.image_token_id)  # refuses prompts that do not fit


def image_token_mask(input_ids: Tensor, features: Tensor, image_token_id: int) -> Tensor:
    """Return where prompts have image tokens, (batch, sequence) bool; raises DataError unless features are as many."""
    mask = input_ids == image_token_id
    images, tokens = features.shape[:2]
    if int(mask.sum()) != images * tokens:
        raise DataError(
            f"the prompts must have {tokens} image tokens (id {image_token_id}) per image, {images * tokens} in all, "
            f"got {int(mask.sum())}"
        )
    return mask


def merge_images(embeds: Tensor, input_ids: Tensor, features: Tensor, image_token_id: int) -> Tensor:
    """Return embeddings (batch, sequence, hidden), with image features in place of those of image tokens, in order."""
    mask = image_token_mask(input_ids, features, image_token_id).unsqueeze(-1).expand_as(embeds)
    return embeds.masked_scatter(mask, features.to(embeds.dtype))


def trace_vision_language(model: PreTrainedModel, given: Mapping[str, Tensor], fusions: Provider) -> dict[str, Any]:
    """Trace a vision-language model to three graphs, each an `onnx_ir.Model`; return them by file name.

    They are the image encoder from pixel_values to image_features (images, tokens, hidden), the embedding from
    input_ids to inputs_embeds, and last the decoder, as in `trace_decoder`, on inputs_embeds. `given` has at least 2
    rows, padded on the left.
    """
    pixels, ids = given["pixel_values"].to(model.dtype), given["input_ids"]
    embedding: Any = model.get_input_embeddings()
    with torch.no_grad():
        features = _image_features(model, pixels)
        embeds = merge_images(embedding(ids), ids, features, model.config.image_token_id)
    images, tokens = {"pixel_values": pixels}, {"input_ids": ids}
    vision = export_program(_ImageEncoder(model), images, fusions, axes={"pixel_values": {0: "images"}})
    embed = export_program(_Embedding(model), tokens, fusions, axes={"input_ids": TOKEN_AXES})
    prompt = {"inputs_embeds": embeds, "attention_mask": given["attention_mask"]}
    return {VISION_FILE: vision, EMBED_FILE: embed, DECODER_FILE: trace_decoder(model, prompt, fusions)}


class _ImageEncoder(torch.nn.Module):
    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"image_features": _image_features(self.model, pixel_values)}


class _Embedding(torch.nn.Module):
    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.embedding: Any = model.get_input_embeddings()

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"inputs_embeds": self.embedding(input_ids)}


class _Projected(Exception):
    """Carries the projector's output, its only argument, out of `get_image_features`."""


def _image_features(model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
    """Return the features of images, (images, tokens, hidden); raises UnsupportedModelError if there are none.

    After the projector, `get_image_features` splits the features into a Python list, which would fix the number of
    images in a trace. So an exception leaves it as soon as the projector has returned.
    """
    typed: Any = model  # `get_image_features` is a method of some models
    owner, name = _projector(model)
    projector = getattr(owner, name)

    def project(*args: Any, **kwargs: Any) -> Any:
        raise _Projected(projector(*args, **kwargs))

    # The instance attribute shadows the module, so the tracer still sees a complete call of the module itself.
    vars(owner)[name] = project
    try:
        typed.get_image_features(pixel_values=pixel_values)
        why = "its projector was not called"
    except _Projected as projected:
        (features,) = projected.args
        if features.ndim == 3:
            return features
        why = f"its projector returns shape {tuple(features.shape)}"
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        if torch.compiler.is_exporting():  # an error of the exporter, which `export_program` reports
            raise
        why = root_cause(error)
    finally:
        del vars(owner)[name]
    raise UnsupportedModelError(
        f"ONNX export needs images to become features of shape (images, tokens, hidden) from pixel_values alone, and "
        f"{type(model).__name__} does not: {why}"
    )


def _projector(model: PreTrainedModel) -> tuple[torch.nn.Module, str]:
    """Return the module that owns the projector between image encoder and language model, and its name there."""
    for owner in (model, model.base_model):
        for name in ("multi_modal_projector", "connector", "embed_vision"):
            if name in dict(owner.named_children()):
                return owner, name
    raise UnsupportedModelError(
        f"ONNX export needs a vision-language model with a projector after its image encoder, and "
        f"{type(model).__name__} has none under a name it knows"
    )
