"""A SentenceTransformer as one model of transformers: its encoder, and its own modules behind it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from . import modeling_hies
from .internals import attributes_set
from .tokens import longest_sequence, shortest_limit

# By what embeddings are compared in sentence-transformers; distances are negative there.
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
# Kind of text -> the prompts that `encode_query`, `encode_document` and `encode` look for, the first one first.
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus"), "text": ()}
# Types of encoder-decoders -> the class that sentence-transformers loads in place of that of `AutoModel`.
ENCODERS = {
    **{"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel", "longt5": "LongT5EncoderModel"},
    **{"switch_transformers": "SwitchTransformersEncoderModel", "t5gemma": "T5GemmaEncoderModel"},
}


@dataclass
class EmbeddingOutput(ModelOutput):
    """Embeddings of tokens, (texts, tokens, width), and of texts, (texts, dimension)."""

    last_hidden_state: Tensor | None = None
    sentence_embedding: Tensor | None = None


class TextReader:
    """Reads texts as a SentenceTransformer does. Copies of a `TextEncoder` share its reader.

    Attributes:
        given: The SentenceTransformer, which is not changed.
    """

    def __init__(self, given: Any) -> None:
        self.given = given

    def __deepcopy__(self, memo: dict[int, Any]) -> TextReader:
        return self

    @property
    def prompts(self) -> list[str]:
        """The texts that may be put in front of a text."""
        return [prompt for prompt in self.given.prompts.values() if prompt]

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens, special tokens included; None for no limit."""
        return shortest_limit(self.given.max_seq_length, longest_sequence(self.given[0].config))

    def read(self, kind: str, texts: Sequence[str], max_length: int | None = None) -> dict[str, Tensor]:
        """Return the model's inputs for texts, by name, as the SentenceTransformer makes them.

        `kind` is "query", "document" or "text", for what `encode_query`, `encode_document` and `encode` read;
        `max_length` is a limit in tokens below the model's own.
        """
        transformer, prompts = self.given[0], self.given.prompts
        prompt_name = next((name for name in _PROMPTS[kind] if name in prompts), self.given.default_prompt_name)
        task = None if kind == "text" else kind
        options: dict[str, Any] = {"prompt": prompts.get(prompt_name) if prompt_name else None, "task": task}
        if max_length is not None:
            own_limit = getattr(transformer, f"{kind}_length", None)
            options["max_length"] = shortest_limit(max_length, own_limit, self.max_length)
        # Otherwise texts for Flash Attention would be one row.
        with attributes_set([(transformer, "can_flatten_inputs", False)]):
            inputs = self.given.preprocess(list(texts), **options)
        names = ["input_ids", "attention_mask"]
        # A model of fewer than two segments has no use for segment ids, or no embedding for the second.
        if getattr(transformer.config, "type_vocab_size", 0) >= 2:
            names.append("token_type_ids")
        return {name: inputs[name] for name in names if name in inputs}


class TextEncoder(PreTrainedModel):
    """The encoder of a SentenceTransformer and the modules behind it, as one model of transformers.

    `wrapped` turns it into a SentenceTransformer, which embeds texts and saves itself. `reader` reads them.
    """

    base_model_prefix = "auto_model"
    # What the encoder itself supports is checked when it is loaded.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, given: Any) -> None:
        transformer, *behind = given
        super().__init__(transformer.model.config)
        self.reader = TextReader(given)
        self.readout = nn.ModuleList(behind)
        self.hold(transformer.model)
        self.train(transformer.model.training)

    @property
    def dimension(self) -> int:
        """The width of the embeddings of texts."""
        return self.reader.given.get_embedding_dimension()

    def hold(self, auto_model: PreTrainedModel) -> None:
        """Replace the encoder, in place."""
        self.auto_model, self.config = auto_model, auto_model.config

    def read_by(self, tokenizer: Any) -> None:
        """Read texts with another tokenizer from now on."""
        self.reader = TextReader(self.wrapped(tokenizer))

    def wrapped(self, tokenizer: Any = None) -> Any:
        """Return a SentenceTransformer that shares this model's weights, with a tokenizer, by default its own."""
        transformer, *behind = self.reader.given
        # deepcopy takes what its memo, id -> copy, already holds for the finished copy.
        memo: dict[int, Any] = {id(transformer.model): self.auto_model}
        memo |= {id(module): own for module, own in zip(behind, self.readout, strict=True)}
        if tokenizer is not None:
            memo[id(transformer.tokenizer)] = tokenizer
        copied = copy.deepcopy(self.reader.given, memo)
        config = self.auto_model.config
        if getattr(config, "hies_export", None) and config.model_type in ENCODERS:
            # The class of sentence-transformers would load a stock one, whose layers have other sizes.
            copied[0].__class__ = modeling_hies.Transformer
        return copied

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> EmbeddingOutput:
        """Return the embeddings of `input_ids`, (texts, tokens), and of the texts; a mask is 1 for real tokens."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        tokens: Tensor = self.auto_model(**inputs)[0]
        features: dict[str, Any] = {"token_embeddings": tokens, "attention_mask": attention_mask}
        for module in self.readout:
            features = module(features)
        embedding = features["sentence_embedding"][..., : self.reader.given.truncate_dim]
        return EmbeddingOutput(last_hidden_state=tokens, sentence_embedding=embedding)


@dataclass(frozen=True)
class Unwrapped:
    """A model of transformers, and how to put a slim one in place of it.

    Attributes:
        model: The model to prune, which shares its weights with what was given.
        processor: The tokenizer of what was given; None for a plain model.
        wrap: Turns a slim model, and a tokenizer or None, into a new object of the class that was given.
        max_length: Longest pair of texts in tokens that a CrossEncoder reads; None for no limit.
        folder: Where the files of the model are; None in memory.
    """

    model: Any
    processor: Any = None
    wrap: Callable[[Any, Any], Any] = lambda slim, _: slim
    max_length: int | None = None
    folder: Path | None = None
