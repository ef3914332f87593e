"""Describe the feed-forward blocks of known models by hand, independently of how the package finds them.

A case is a tiny model, its modules of both kinds, and a batch.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hies_export import find_attention
from hies_export.kinds import MLP
from hies_export.units import PrunableModule, Slice, Span
from support.models import bert, causal_lm, text_batch

Case = tuple[PreTrainedModel, tuple[PrunableModule, ...], dict[str, torch.Tensor]]


def block(name: str, units: int, *, producers: tuple[str, ...], consumer: str) -> PrunableModule:
    """Return a block in which neuron i owns row i of every producer and column i of the consumer."""
    rows = (Span(0, units, 0, 1, 1),)
    return PrunableModule(
        name=name,
        units=units,
        kind=MLP,
        unit_width=1,
        consumer=consumer,
        slices=tuple(Slice(producer, 0, rows) for producer in producers),
    )


def bert_blocks(model: PreTrainedModel) -> tuple[PrunableModule, ...]:
    """Return the blocks of a BERT with a head, whose modules are the layers themselves."""
    return tuple(
        block(
            f"bert.encoder.layer.{i}",
            model.config.intermediate_size,
            producers=(f"bert.encoder.layer.{i}.intermediate.dense",),
            consumer=f"bert.encoder.layer.{i}.output.dense",
        )
        for i in range(model.config.num_hidden_layers)
    )


def llama_blocks(model: PreTrainedModel) -> tuple[PrunableModule, ...]:
    """Return the gated blocks of a LLaMA with a head."""
    return tuple(
        block(
            f"model.layers.{i}.mlp",
            model.config.intermediate_size,
            producers=(f"model.layers.{i}.mlp.gate_proj", f"model.layers.{i}.mlp.up_proj"),
            consumer=f"model.layers.{i}.mlp.down_proj",
        )
        for i in range(model.config.num_hidden_layers)
    )


def bert_case() -> Case:
    """Return a BERT, with its attention modules in front of its blocks."""
    model, batch = bert(), text_batch(2, 12, padding=False, labels=False)
    return model, (*find_attention(model, batch), *bert_blocks(model)), batch


def llama_case() -> Case:
    """Return a decoder with grouped queries and tied embeddings, with modules of both kinds in turn."""
    model, batch = causal_lm(tie_word_embeddings=True), {"input_ids": torch.randint(5, 30, (2, 9))}
    modules = zip(find_attention(model, batch), llama_blocks(model), strict=True)
    return model, tuple(module for pair in modules for module in pair), batch
