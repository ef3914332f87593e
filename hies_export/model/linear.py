"""Treat `nn.Linear` and GPT-2's `Conv1D`, whose weight is transposed, as one kind of layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Conv1D


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an `nn.Linear` or `Conv1D`, and no subclass, which may compute something else."""
    return type(module) in (nn.Linear, Conv1D)


def weight_of(layer: nn.Module) -> Tensor:
    """Return a view of the weight as (out_features, in_features)."""
    return by_features(layer, layer.weight)  # type: ignore[arg-type]


def by_features(layer: nn.Module, values: Tensor) -> Tensor:
    """Return `values`, one for each stored weight of a layer, viewed as (out_features, in_features)."""
    return values.T if isinstance(layer, Conv1D) else values


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Return (out_features, in_features)."""
    out_features, in_features = weight_of(layer).shape
    return out_features, in_features


def select_features(layer: Any, index: Tensor, axis: int) -> nn.Module:
    """Return a new layer of the same class, dtype and device that has only some output or input features.

    `index`, (features,) int64, are the output features that stay if `axis` is 0, and the input features if it is 1.
    """
    index, bias, is_transposed = index.to(layer.weight.device), layer.bias, isinstance(layer, Conv1D)
    weight = layer.weight.detach().index_select(1 - axis if is_transposed else axis, index)
    # `Conv1D` takes (out, in) and stores (in, out); `nn.Linear` takes (in, out) and stores (out, in).
    sizes = weight.shape[1], weight.shape[0]
    with torch.device("meta"):
        new: nn.Module = Conv1D(*sizes) if is_transposed else nn.Linear(*sizes, bias=bias is not None)
    new.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    if bias is not None:
        values = bias.detach().index_select(0, index) if axis == 0 else bias.detach().clone()
        new.bias = nn.Parameter(values, requires_grad=bias.requires_grad)
    return new.train(layer.training)


def set_by_name(model: nn.Module, name: str, value: Tensor | nn.Module) -> None:
    """Replace the layer, parameter or buffer of a dotted name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, value)
