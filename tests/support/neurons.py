"""Describe the feed-forward blocks of known models by hand, independently of how the package finds them."""

from __future__ import annotations

from transformers import PreTrainedModel

from hies_export.kinds import MLP
from hies_export.units import PrunableModule, Slice, Span


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
