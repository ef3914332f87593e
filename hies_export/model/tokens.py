"""Make synthetic batches, and describe the tokens of a batch: which are real, their positions, how many fit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import RecipeError
from .copies import share_weights

# These models number positions from pad_token_id + 1, so their first pad_token_id + 1 position embeddings are unused.
_POSITIONS_START_AFTER_PAD = {
    *("camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


def longest_sequence(config: Any) -> int | None:
    """Return the longest sequence, in tokens, that a model of this configuration takes; None if there is no limit.

    For a composite model, the limit is its language model's.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None or positions < 1:  # some configurations write -1 for no limit
        return None
    if text.model_type in _POSITIONS_START_AFTER_PAD and text.pad_token_id is not None:
        positions -= text.pad_token_id + 1
    return positions


def real_tokens(model: PreTrainedModel, name: str, batch: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """Return a mask of the tokens of an attention module's output that are not padding.

    Args:
        model: The whole model.
        name: Dotted name of the attention module.
        batch: The inputs of the forward pass.
        y: The module's output, (batch, tokens, width).

    Returns:
        Booleans, (batch, tokens). The `attention_mask` describes text only: all patches of an image are real, even if
        an image has as many patches as the text has tokens.
    """
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == y.shape[:2] and _reads_text(model, name):
        return mask.bool().to(y.device)
    return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)


def _reads_text(model: PreTrainedModel, name: str) -> bool:
    """Return whether the innermost `PreTrainedModel` around a module takes text."""
    while name:
        owner = model.get_submodule(name)
        if isinstance(owner, PreTrainedModel):
            return owner.main_input_name == "input_ids"
        name = name.rpartition(".")[0]
    return model.main_input_name == "input_ids"


def synthetic_batch(
    model: PreTrainedModel, *, batch: int, sequence: int | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Make random inputs of one shape.

    Args:
        model: Its main input decides between text and images, its config the vocabulary or image size.
        batch: Number of rows.
        sequence: Tokens per row, required for text and ignored for images.
        seed: Seed of the values.

    Returns:
        `input_ids` and a mask of ones, both (batch, sequence), or `pixel_values` of shape
        (batch, channels, height, width).

    Raises:
        RecipeError: batch or sequence is below 1, or sequence is missing or longer than the model allows.
    """
    if batch < 1:
        raise RecipeError([f"batch must be at least 1, got {batch}"])
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (batch, model.config.num_channels, height, width)
        return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float32)}
    longest = longest_sequence(model.config)
    if sequence is None or sequence < 1 or (longest is not None and sequence > longest):
        allowed = f"1..{'any' if longest is None else longest}"
        raise RecipeError([f"sequence must be in {allowed} for {type(model).__name__}, got {sequence}"])
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (batch, sequence), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def first_samples(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first two samples of a batch, which are enough to find the heads or to trace a graph."""
    return {key: value[:2] for key, value in batch.items()}


def sequence_length(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    """Return the number of tokens per row that the attention sees: text tokens, or image patches and special tokens."""
    if "input_ids" in batch:
        return int(batch["input_ids"].shape[1])
    base = share_weights(model.base_model, device="meta").eval()
    inputs = {name: tensor.to("meta") for name, tensor in forward_inputs(base, batch).items()}
    with torch.no_grad():
        return int(base(**inputs).last_hidden_state.shape[1])


def count_tokens(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    """Return the number of real tokens of a batch; of images, the number of patches and special tokens."""
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    return len(next(iter(batch.values()))) * sequence_length(model, batch)


def forward_inputs(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch that the model's forward takes, in the order of its parameters, without labels."""
    accepted = [name for name in inspect.signature(model.forward).parameters if name != "labels"]
    return {name: batch[name] for name in accepted if isinstance(batch.get(name), torch.Tensor)}


def positions_of(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the position of every token, counted from the first real token; padding on the left has position 0.

    Args:
        attention_mask: Ones and zeros, (batch, sequence).

    Returns:
        Integers, (batch, sequence).
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
