"""Count parameters, FLOPs and bytes of the key/value cache of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel

from ..model.copies import share_weights
from ..model.tokens import forward_inputs
from ..units import PrunableModule
from .record import Record

T = TypeVar("T", int, float)
Shape = tuple[int, int]  # (batch, sequence)


@dataclass(frozen=True, eq=False)
class Both(Record, Generic[T]):
    """One number for the dense model and one for the slim model."""

    dense: T
    slim: T

    @property
    def ratio(self) -> float:
        """The slim model's number as a share of the dense one's."""
        return self.slim / self.dense


@dataclass(frozen=True, eq=False)
class FlopCount(Both[int]):
    """Floating-point operations of one forward pass of both models, at a (batch, sequence)."""

    shape: Shape


@dataclass(frozen=True, eq=False)
class StoredBytes(Both[int]):
    """Bytes of the dense and slim weights, and of the slim model's ONNX folder (graph and weights)."""

    onnx: int


@dataclass(frozen=True)
class LayerFlops:
    """Floating-point operations of one layer in one forward pass.

    Attributes:
        layer: Dotted name of the layer; empty for the rest of the model, outside the layers with attention.
        projections: FLOPs of the linear layers before and after the attention.
        products: FLOPs of queries times keys, and of attention weights times values.
        other: FLOPs of the rest of the layer, such as the MLP.
    """

    layer: str
    projections: int
    products: int
    other: int


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters of a model; tied parameters count once.

    Args:
        model: Any module.

    Returns:
        Number of elements, not of bytes.

    Examples:
        >>> count_parameters(torch.nn.Linear(3, 4))
        16
    """
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    """Count the floating-point operations of one forward pass, attention products included.

    A multiply-add is two operations. `torch.utils.flop_counter` counts in the modules themselves, independently of the
    config. They run on tensors without data, and with eager attention, because on the CPU the counter does not see
    inside the fused kernel. A model whose forward depends on the values of its inputs runs on real tensors instead.

    Args:
        model: Any model; it is not changed.
        batch: Inputs by name; labels are ignored.

    Returns:
        Number of operations for the whole batch.

    Source: https://docs.pytorch.org/docs/stable/torch.utils.flop_counter.html

    Examples:
        >>> count_flops(slim, batches[0]) < count_flops(model, batches[0])
        True
    """
    return _flops(model, batch)[""]


def count_both_flops(
    dense: PreTrainedModel, slim: PreTrainedModel, batches: Mapping[Shape, Mapping[str, Any]]
) -> dict[Shape, FlopCount]:
    """Count the FLOPs of one forward pass of two models at each (batch, sequence)."""
    return {s: FlopCount(count_flops(dense, b), count_flops(slim, b), s) for s, b in batches.items()}


def flops_per_layer(
    model: PreTrainedModel, batch: Mapping[str, Any], modules: Sequence[PrunableModule]
) -> list[LayerFlops]:
    """Count the FLOPs of one forward pass layer by layer; the parts add up to `count_flops`.

    Args:
        model: Dense or slim; it is not changed.
        batch: As for `count_flops`.
        modules: The attention modules, of the dense model or of this one: only their names are read.

    Returns:
        One entry per layer, in the order of `modules`. A last one, with empty `layer`, is the rest of the model, such
        as embeddings and classifier.
    """
    found = _flops(model, batch)
    parts: dict[str, list[int]] = {}  # layer -> [projections, products]
    for module in modules:
        # The layer is the innermost numbered module around the attention, such as model.layers.3, else the attention.
        match = re.match(r"(.*\.\d+)(?:\.|$)", module.name)
        part = parts.setdefault(match[1] if match else module.name, [0, 0])
        children = [f"{module.name}.{name}" for name, _ in model.get_submodule(module.name).named_children()]
        part[0] += sum(found.get(name, 0) for name in {*module.producers, module.consumer})
        part[1] += found.get(module.name, 0) - sum(found.get(name, 0) for name in children)
    layers = [
        LayerFlops(layer, projections, products, found.get(layer, 0) - projections - products)
        for layer, (projections, products) in parts.items()
    ]
    outside = found[""] - sum(found.get(layer, 0) for layer in parts)
    return [*layers, LayerFlops("", projections=0, products=0, other=outside)]


def cache_bytes_per_token(model: PreTrainedModel) -> int | None:
    """Return the bytes that each token adds to the key/value cache of one sequence, in the model's dtype.

    They are read from the cache that the model itself fills, run on tensors without data.

    Args:
        model: Any model; it is not changed.

    Returns:
        Bytes per token; None for a model without a key/value cache.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        return None
    empty = share_weights(model, device="meta").eval()
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    with torch.no_grad():
        cache = empty(input_ids=ids, use_cache=True).past_key_values
    tensors = [t for layer in getattr(cache, "layers", ()) for t in (layer.keys, layer.values) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors) // ids.shape[1]


def _flops(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, int]:
    """Return FLOPs by dotted module name; those of the whole model are under the empty name."""
    inputs = forward_inputs(model, batch)
    try:
        # transformers reads the values of a padding mask, which meta tensors lack. The mask changes no FLOPs.
        meta = {name: tensor.to("meta") for name, tensor in inputs.items() if name != "attention_mask"}
        return _count(share_weights(model, device="meta"), meta)
    except (RuntimeError, NotImplementedError):
        return _count(share_weights(model), {name: tensor.to(model.device) for name, tensor in inputs.items()})


def _count(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return FLOPs as `_flops` does; the model is changed to evaluation mode and eager attention."""
    from torch.utils.flop_counter import FlopCounterMode

    model.eval().set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    root = type(model).__name__
    by_module = {
        name.removeprefix(f"{root}."): sum(operators.values())
        for name, operators in counter.get_flop_counts().items()
        if name.startswith(f"{root}.")
    }
    return {**by_module, "": int(counter.get_total_flops())}
