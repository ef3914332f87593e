"""Round a decoder's matrices to the levels of Q4_0 by calibration rows, before a file is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...model.copies import copy_with
from ...model.linear import features_of, is_linear
from ..rounding import Blocks, fit_blocks, read_layers, spreads
from .tensors import BLOCK


def rounded(model: PreTrainedModel, rows: Sequence[Mapping[str, Any]]) -> PreTrainedModel:
    """Return a copy whose linear layers are on levels of Q4_0, which writing the file leaves as they are.

    Layers whose rows are no multiple of 32 long, and the head, are left to the file's other types.
    """
    inner: Any = model.base_model
    layers = {name: layer for name, layer in inner.named_modules() if is_linear(layer)}
    widths = {name: features_of(layer)[1] for name, layer in layers.items() if features_of(layer)[1] % BLOCK == 0}
    found: dict[int, Tensor] = {}
    for name, spread in spreads(widths, read_layers(inner), rows, centred=False):
        weight: Any = layers[name].weight
        # float32 holds every level exactly, whatever the model's dtype.
        found[id(weight)] = round_rows(weight.detach().cpu().double(), spread.moments).float()

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in found:
            return tensor
        return torch.nn.Parameter(found[id(tensor)], requires_grad=tensor.requires_grad)

    return copy_with(model, stand_in)


def round_rows(weight: Tensor, moments: Tensor) -> Tensor:
    """Return a weight (outputs, inputs) on levels of Q4_0, float64, rounded by the moments of its inputs.

    A block's largest weight stands for level 0 of 16, whose value is -8 scales. Its level stays, so that whoever
    rounds the result to nearest finds the same scale and the same levels.
    """
    matrix = weight.T.reshape(-1, BLOCK, len(weight))
    largest = matrix.abs().argmax(1, keepdim=True)
    # Stored in float16.
    scale = (matrix.gather(1, largest)[:, 0] / -8).half().double()
    empty = scale == 0
    start = Blocks.nearest(matrix, scale.masked_fill(empty, 1), torch.full_like(scale, 8))
    fixed = empty[:, None].expand_as(matrix).clone().scatter_(1, largest, True)
    return fit_blocks(matrix, start, moments, fixed=fixed).values.flatten(0, 1).T
