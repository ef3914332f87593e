"""Give the weights of a decoder GGUF's names and the types that they are stored in, and round them for Q4_0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import NonFiniteError
from ...model.copies import copy_with
from ...model.linear import features_of, is_linear
from ..rounding import Blocks, fit_blocks, read_layers, spreads
from .architecture import LAYER_NAMES, Layout

# Dtypes in recipes -> types of tensors in the gguf package, and of files in llama.cpp.
STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
# Dtypes that store `BLOCK` numbers of a row with one scale.
IN_BLOCKS, BLOCK = ("q8_0", "q4_0"), 32
# Embeddings and output layers lose most in 4 bits, so a Q4_0 file has them in 8 bits; llama.cpp's own files use Q6_K.
OUTER = ("token_embd.weight", "output.weight")


def named_tensors(model: PreTrainedModel, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors by GGUF's names, float32 on the CPU; an output layer tied to the embedding has none."""
    base: Any = model.base_model
    head: Any = model.get_output_embeddings()
    yield "token_embd.weight", _in_float32(base.embed_tokens.weight)
    if layout.rope_factors is not None:
        yield "rope_freqs.weight", layout.rope_factors
    for number, (layer, sizes) in enumerate(zip(base.layers, layout.sizes, strict=True)):
        heads = {"self_attn.q_proj": sizes.heads, "self_attn.k_proj": sizes.key_value_heads}
        for name, parameter in layer.named_parameters():
            module, _, kind = name.rpartition(".")
            tensor = _in_float32(parameter)
            if module in heads and layout.interleaved:
                tensor = interleave_halves(tensor, heads[module])
            yield f"blk.{number}.{LAYER_NAMES[module]}.{kind}", tensor
    yield "output_norm.weight", _in_float32(base.norm.weight)
    if head.weight is not base.embed_tokens.weight:
        yield "output.weight", _in_float32(head.weight)


def interleave_halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from two halves, one after the other, to pairs with one row of each half.

    transformers rotates row i of a head with row i + half, llama.cpp's `llama` and `deci` row 2i with row 2i + 1. The
    rows are a weight (rows, width) or bias (rows,) of a query or key projection.
    """
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape)


def stored_type(name: str, tensor: Tensor, dtype: str) -> str:
    """Return the type, a key of gguf's GGMLQuantizationType, that a file of `dtype` stores a tensor of GGUF's name in.

    Norms, biases and factors of frequencies stay in float32, as in llama.cpp's own files. With Q8_0 and Q4_0, matrices
    whose rows are no multiple of 32 long are float16.
    """
    if tensor.dim() < 2:
        return "F32"
    if dtype in IN_BLOCKS and tensor.shape[-1] % BLOCK:
        return "F16"
    return STORED_AS["q8_0" if dtype == "q4_0" and name in OUTER else dtype]


def stored_bytes(tensor: Tensor, kind: str, name: str) -> np.ndarray:
    """Return a float32 tensor as type `kind` stores it, floats or uint8 by row; refuse what overflows float16."""
    import gguf

    array: np.ndarray = tensor.contiguous().numpy()
    if kind == "F16" and bool(tensor.abs().max() > torch.finfo(torch.float16).max):
        raise NonFiniteError(f"weights must fit into float16, but {name} has {tensor.abs().max():g}; use float32")
    return np.ascontiguousarray(gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind]))


def _in_float32(parameter: Tensor) -> Tensor:
    return parameter.detach().to(device="cpu", dtype=torch.float32)


def rounded_by_rows(model: PreTrainedModel, rows: Sequence[Mapping[str, Any]]) -> PreTrainedModel:
    """Return a copy of a model with linear layers rounded to levels of Q4_0 so that their outputs on rows change least.

    Writing the file then leaves these weights as they are. Layers whose rows are no multiple of 32 long, and the head,
    are not stored in Q4_0, and stay.
    """
    base: Any = model.base_model
    layers = {name: layer for name, layer in base.named_modules() if is_linear(layer)}
    widths = {name: features_of(layer)[1] for name, layer in layers.items() if features_of(layer)[1] % BLOCK == 0}
    replaced: dict[int, Tensor] = {}  # by the id of the weight
    for name, spread in spreads(widths, read_layers(base), rows, centred=False):
        weight: Any = layers[name].weight
        # float32 holds every level exactly, whatever the model's dtype.
        rounded = round_rows(weight.detach().cpu().double(), spread.moments).float()
        replaced[id(weight)] = torch.nn.Parameter(rounded, requires_grad=weight.requires_grad)
    return copy_with(model, lambda tensor: replaced.get(id(tensor), tensor))


def round_rows(weight: Tensor, moments: Tensor) -> Tensor:
    """Return a weight (outputs, inputs), float64, on levels of Q4_0, by the moments (inputs, inputs) of what it reads.

    A block's largest weight stands for level 0 of 16, whose value is -8 scales. Its level stays, so that whoever
    rounds the result to nearest finds the same scale and the same levels.
    """
    matrix = weight.T.reshape(-1, BLOCK, len(weight))  # (blocks, BLOCK, outputs)
    largest = matrix.abs().argmax(1, keepdim=True)  # (blocks, 1, outputs)
    scale = (matrix.gather(1, largest)[:, 0] / -8).half().double()  # (blocks, outputs), in float16 as it is stored
    empty = scale == 0
    start = Blocks.nearest(matrix, scale.masked_fill(empty, 1), torch.full_like(scale, 8))
    fixed = empty[:, None].expand_as(matrix).clone().scatter_(1, largest, True)
    return fit_blocks(matrix, start, moments, fixed=fixed).values.flatten(0, 1).T
