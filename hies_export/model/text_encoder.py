"""An encoder with what turns its token embeddings into one embedding per text: pooling, dense layers, normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

# The names that sentence-transformers gives its ways of pooling.
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
# And those by which embeddings are compared; distances are negative there.
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass
class EmbeddingOutput(ModelOutput):
    """Embeddings of tokens, (texts, tokens, width), and of texts, (texts, dimension)."""

    last_hidden_state: Tensor | None = None
    sentence_embedding: Tensor | None = None


class Pooling(nn.Module):
    """Pools the embeddings of the real tokens of a text, in one way or in several that are joined.

    Source: the module Pooling of sentence-transformers, whose results these are.
    """

    def __init__(self, modes: Sequence[PoolingMode], *, include_prompt: bool = True):
        super().__init__()
        self.modes, self.include_prompt = tuple(modes), include_prompt

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings, (texts, modes * width), of tokens, (texts, tokens, width), and their mask."""
        found = [_pooled(mode, tokens, mask) for mode in self.modes]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _pooled(mode: PoolingMode, tokens: Tensor, mask: Tensor) -> Tensor:
    real = mask.unsqueeze(-1).to(tokens.dtype)
    if mode in ("cls", "lasttoken"):
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask
        # The first real token has the smallest place that is not zero; padding may be on either side.
        place = places.argmax(-1) if mode == "lasttoken" else mask.argmax(-1)
        return tokens.gather(1, place[:, None, None].expand(-1, 1, tokens.shape[-1]))[:, 0]
    if mode == "max":
        return tokens.masked_fill(real == 0, torch.finfo(tokens.dtype).min).amax(1)
    if mode == "weightedmean":
        real = real * mask.cumsum(-1).unsqueeze(-1).to(tokens.dtype)
    count = real.sum(1).clamp(min=1e-9)
    return (tokens * real).sum(1) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


class Dense(nn.Module):
    """A linear layer with an activation, as sentence-transformers' module of this name."""

    def __init__(self, linear: nn.Linear, activation: nn.Module):
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, x: Tensor) -> Tensor:
        """Return (texts, out_features) of (texts, in_features)."""
        found: Tensor = self.activation(self.linear(x))
        return found


class Normalize(nn.Module):
    """Scales embeddings to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (texts, dimension) of the same."""
        return nn.functional.normalize(x, p=2.0, dim=-1)


@dataclass(frozen=True)
class SentenceSettings:
    """What a SentenceTransformer is besides its encoder.

    Attributes:
        readout: What follows the encoder: a `Pooling`, then any of `Dense`, `Normalize`, `LayerNorm` and `Dropout`.
        folder: Where it was read from; None if it was made in memory.
        encoder: Where the encoder's files are, mostly the folder itself; None if it was made in memory.
        max_length: Longest text in tokens, special tokens included; None for no limit.
        prompts: What precedes a text: of kind "query", "document" and "text" (any other), where there is one.
        lower: Whether texts are lowercased before the tokenizer's own rules.
        lengths: Longest text of a kind, by the names of prompts, where it is not `max_length`.
        special_tokens: Whether the tokenizer adds its special tokens.
        tokenizer: Attributes that the tokenizer is given, such as `truncation_side`.
        similarity: By what embeddings are compared.
        truncate_dim: How many numbers of an embedding are kept, from the first; None for all.
        text: Fields of `sentence_bert_config.json` that are written again as they were.
        options: The content of `config_sentence_transformers.json`.
    """

    readout: tuple[nn.Module, ...]
    folder: Path | None = None
    encoder: Path | None = None
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    lower: bool = False
    lengths: Mapping[str, int] = field(default_factory=dict)
    special_tokens: bool = True
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    similarity: Similarity = "cosine"
    truncate_dim: int | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class TextEncoder(PreTrainedModel):
    """An encoder of transformers and its readout, a `Pooling` and further layers, as one model.

    It is not saved as such: a checkpoint holds the encoder, and `modules.json` names the rest. `settings` say how its
    texts are read; their readout is empty, as the model has its own.
    """

    base_model_prefix = "auto_model"
    # What the encoder itself supports is checked when it is loaded.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self, auto_model: PreTrainedModel, readout: Sequence[nn.Module], settings: SentenceSettings | None = None
    ):
        super().__init__(auto_model.config)
        self.settings = SentenceSettings(()) if settings is None else replace(settings, readout=())
        self.readout = nn.ModuleList(readout)
        self.hold(auto_model)
        self.train(auto_model.training)

    @property
    def dimension(self) -> int:
        """The width of the embeddings of texts."""
        width: int = self.config.get_text_config().hidden_size
        for module in self.readout:
            if isinstance(module, Pooling):
                width *= len(module.modes)
            elif isinstance(module, Dense):
                width = module.linear.out_features
        return min(width, self.settings.truncate_dim or width)

    def hold(self, auto_model: PreTrainedModel) -> None:
        """Take an encoder in place of the one there is."""
        self.auto_model, self.config = auto_model, auto_model.config

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> EmbeddingOutput:
        """Return the embeddings of tokens, (texts, tokens), of which the mask says which are real."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        tokens: Tensor = self.auto_model(**inputs)[0]
        pooling, *rest = self.readout
        embedding = pooling(tokens, attention_mask)
        for module in rest:
            embedding = module(embedding)
        if self.settings.truncate_dim is not None:
            embedding = embedding[..., : self.settings.truncate_dim]
        return EmbeddingOutput(last_hidden_state=tokens, sentence_embedding=embedding)
