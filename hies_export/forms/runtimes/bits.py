"""Quantise the linear layers and the embeddings of a graph to 8 or 4 bits, in operators of ONNX Runtime.

In 8 bits, weights get a scale per output channel, and activations a scale per token, found during the run. Both are
symmetric. A scale per token needs no calibration, and an outlier affects no other token. The dynamic mode of
onnxruntime.quantization has one scale for all tokens of a batch. In 4 bits, every 32 weights of an output channel get
their own scale and zero point; with the moments of what a layer reads, they are rounded so that its output changes
least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ...calibrate.moments import Spread
from ..rounding import LARGEST_LEVEL, Blocks, fit_blocks
from .graphs import Rewrite, drop_unused, weight_of, with_bias

# Names of values of a graph and their widths -> these names and their centred spreads, in the same order.
Spreads: TypeAlias = Callable[[Mapping[str, int]], Iterable[tuple[str, Spread]]]

# int8 without -128; activations are stored around ZERO, because x86 multiplies unsigned by signed integers.
LEVELS, ZERO = 127, 128
# Weights of the smallest layer that is quantised. Two layers (N, N) in a row, in 8 bits against float32, one core with
# VNNI: N = 64 takes 1.43 of the time at 8 x 128, N = 128 0.75 (1.24 at 1 x 32), N = 192 0.58, N = 384 0.40.
SMALLEST = 2**14
# Operators that a quantised graph multiplies with, by onnxruntime.quantization or by `quantize_graph`.
INTEGER_OPERATORS = ("MatMulIntegerToFloat", "MatMulInteger", "DynamicQuantizeMatMul", "QLinearMatMul", "MatMulNBits")
BLOCK = 32  # weights in 4 bits that share a scale and a zero point
# No output of these is further below zero, so that their largest absolute value needs no pass over absolute values.
_LOWEST = {"BiasGelu": 0.17, "FastGelu": 0.171, "Gelu": 0.17, "Relu": 1e-30}
_OPSET = 23  # the first version with Attention; QuantizeLinear takes a scale per token since 21


def quantize_graph(
    graph: Any, *, bits: int = 8, smallest: int = SMALLEST, tables: bool = True, spreads: Spreads | None = None
) -> dict[str, int]:
    """Quantise an `onnx_ir.Graph` in place: MatMul and Gemm by a constant, and with `tables` Gather from a constant.

    With 4 bits, embeddings and the layer that the graph ends in take 8. `spreads` gives the spreads of what the layers
    in 4 bits read; without, weights are rounded to nearest. Returns the number of linear layers by dtype: `int8`,
    `int4` if there are any, and `float32` for those of fewer weights than `smallest`, which would not gain.
    """
    for node in [node for node in graph if node.op_type == "MultiHeadAttention"]:
        _replace_attention(graph, node)
    layers = [node for node in graph if weight_of(node) is not None]
    large = [node for node in layers if weight_of(node).size >= smallest]
    in_4_bits = [node for node in large if bits == 4 and not node.outputs[0].is_graph_output()]
    _quantize_to_4_bits(graph, in_4_bits, spreads)
    quantised: dict[Any, tuple[Any, Any]] = {}
    zeros: dict[Any, Any] = {}
    for node in large:
        if node not in in_4_bits:
            _quantize_layer(graph, node, quantised, zeros)
    for node in [node for node in graph if tables and _is_table(node, smallest)]:
        _quantize_table(graph, node)
    drop_unused(graph)
    graph.sort()
    graph.opset_imports.setdefault("com.microsoft", 1)
    graph.opset_imports[""] = max(_OPSET, graph.opset_imports[""])
    counts = {"int8": len(large) - len(in_4_bits), "float32": len(layers) - len(large)}
    return {"int4": len(in_4_bits), **counts} if in_4_bits else counts


def quantize_columns(matrix: np.ndarray, *, paired: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix (inputs, outputs) as int8, and the float32 scale of each column (outputs,).

    If `paired`, as weights of products must be, the sums of rows 0 and 1, 2 and 3, ... are in [-128, 128]. x86 without
    VNNI adds two products with uint8 in 16 bits, which hold 255 times that, then saturates. Scales grow by about 1/3.
    """
    largest = np.abs(matrix).max(axis=0)
    if paired:
        even = np.pad(matrix, ((0, len(matrix) % 2), (0, 0)))
        largest = np.maximum(largest, np.abs(even[::2] + even[1::2]).max(axis=0))
    scale = np.maximum(largest / LEVELS, np.finfo(np.float32).tiny).astype(np.float32)
    return np.clip(np.rint(matrix / scale), -LEVELS, LEVELS).astype(np.int8), scale


def _quantize_layer(graph: Any, node: Any, quantised: dict[Any, tuple[Any, Any]], zeros: dict[Any, Any]) -> None:
    """Replace x W + b by (quantised x) (quantised W), times the scales of columns and of tokens, + b.

    `quantised` has what `_quantize_tokens` returned for each x so far, and `zeros` is as there; both grow.
    """
    states, matrix = node.inputs[0], weight_of(node)
    new = Rewrite(graph, node)
    if states not in quantised:
        quantised[states] = _quantize_tokens(new, states, matrix.shape[0], zeros)
    integers, scale = quantised[states]
    columns, column_scale = quantize_columns(matrix, paired=True)
    factors = [integers, new.constant(columns), new.constant(np.float32(1)), new.constant(column_scale)]
    product = new("MatMulIntegerToFloat", *factors, new.constant(np.uint8(ZERO)), domain="com.microsoft")
    new.finish(with_bias(new, node, new("Mul", product, scale)))


def _quantize_to_4_bits(graph: Any, nodes: list[Any], spreads: Spreads | None) -> None:
    """Replace x W + b of each layer by x times W in blocks of 4 bits, + b; layers that read one x share its spread.

    Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits
    """
    by_input = defaultdict(list)
    for node in nodes:
        by_input[node.inputs[0].name].append(node)
    widths = {name: weight_of(layers[0]).shape[0] for name, layers in by_input.items()}
    spread_by_input: Iterable[tuple[str, Spread | None]] = [(name, None) for name in widths]
    if spreads is not None:
        spread_by_input = spreads(widths)
    for name, spread in spread_by_input:
        for node in by_input[name]:
            matrix, new = weight_of(node), Rewrite(graph, node)
            *arrays, bias = quantize_blocks(matrix, spread)
            inputs = [node.inputs[0], *map(new.constant, arrays)]
            if bias is not None:
                inputs += [None, new.constant(bias)]
            # Accuracy level 4: activations are rounded to int8 during the run, and multiplied as integers.
            sizes = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
            product = new("MatMulNBits", *inputs, domain="com.microsoft", **sizes)
            new.finish(with_bias(new, node, product))


class PackedBlocks(NamedTuple):
    """A matrix in 4 bits as MatMulNBits takes it; the numbers of blocks (inputs / BLOCK) and pairs are rounded up."""

    weights: np.ndarray  # (outputs, blocks, BLOCK / 2) uint8, as `_pack` returns them
    scales: np.ndarray  # (outputs, blocks) float32
    zero_points: np.ndarray  # (outputs, blocks / 2) uint8, as `_pack` returns them
    bias: np.ndarray | None  # (outputs,), by which the output keeps its mean; None without a spread


def quantize_blocks(matrix: np.ndarray, spread: Spread | None = None) -> PackedBlocks:
    """Round a matrix (inputs, outputs) to 4 bits: by the centred spread of the inputs, or else to nearest."""
    inputs, outputs = matrix.shape
    padded = np.pad(matrix, ((0, -inputs % BLOCK), (0, 0))).reshape(-1, BLOCK, outputs)
    low, high = np.minimum(padded.min(axis=1), 0), np.maximum(padded.max(axis=1), 0)
    scale = np.maximum((high - low) / LARGEST_LEVEL, np.finfo(np.float32).tiny)
    zero = np.clip(np.rint(-low / scale), 0, LARGEST_LEVEL)
    weights, scales, zeros = (torch.from_numpy(array.astype(np.float64)) for array in (padded, scale, zero))
    blocks, bias = Blocks.nearest(weights, scales, zeros), None
    if spread is not None:
        blocks = fit_blocks(weights, blocks, spread.moments)
        error = (weights - blocks.values).flatten(0, 1)[:inputs]
        bias = (spread.mean @ error).float().numpy()
    levels = blocks.levels.flatten(0, 1).T.numpy().astype(np.uint8).reshape(outputs, -1, BLOCK)
    zero = blocks.zero.T.numpy().astype(np.uint8)
    zero = np.pad(zero, ((0, 0), (0, zero.shape[1] % 2)))
    return PackedBlocks(_pack(levels), blocks.scale.T.float().numpy(), _pack(zero), bias)


def _pack(numbers: np.ndarray) -> np.ndarray:
    """Return uint8 numbers below 16, two neighbours to a byte, the first in its lower half."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


def _quantize_tokens(new: Rewrite, states: Any, width: int, zeros: dict[Any, Any]) -> tuple[Any, Any]:
    """Return states (..., width) as uint8 around ZERO, and the scale of each token (..., 1).

    States of as many tokens share their zero points: `zeros` has those that were made, by shape, and grows.
    """
    producer, axes = states.producer(), new.constant(np.array([-1]))
    if producer is not None and producer.op_type in _LOWEST:
        least = new.constant(np.float32(_LOWEST[producer.op_type]))
        largest = new("Max", new("ReduceMax", states, axes, keepdims=1), least)
    else:
        largest = new("ReduceMax", new("Abs", states), axes, keepdims=1)
    scale = new("Mul", largest, new.constant(np.float32(1 / LEVELS)))
    key = states  # if its shape is not known
    if states.shape is not None and not states.shape.has_unknown_dim():
        key = tuple(states.shape)[:-1]
    if key not in zeros:
        zeros[key] = new("Expand", new.constant(np.array([ZERO], dtype=np.uint8)), new("Shape", scale))
    return new("QuantizeLinear", states, scale, zeros[key], axis=-1, block_size=width), scale


def _replace_attention(graph: Any, node: Any) -> None:
    """Replace MultiHeadAttention by ONNX's own Attention, whose kernel is faster.

    At 8 x 128 with 12 heads of 32, two cores, ONNX Runtime 1.32: 0.95 ms, MultiHeadAttention 1.78. With a cache, or
    another mask than a bias of scores, the node stays.
    """
    inputs = [*node.inputs] + [None] * 8  # those at the end may be left out
    query, key, value, bias, padding, scores, past_key, past_value = inputs[:8]
    constant = None if bias is None else bias.const_value
    if any(given is not None for given in (padding, past_key, past_value)) or key is None or value is None:
        return
    if bias is not None and constant is None:
        return
    if node.attributes.get_int("unidirectional", 0) or any(output.uses() for output in node.outputs[1:]):
        return
    products = [value.producer() for value in (query, key, value)]
    if any(product is None or weight_of(product) is None for product in products):
        return
    new = Rewrite(graph, node)
    if constant is not None:
        array, width = constant.numpy(), weight_of(products[0]).shape[1]
        # The bias of keys adds the same to the scores of all keys of a query, so softmax drops it.
        query = new("Add", query, new.constant(array[:width]))
        value = new("Add", value, new.constant(array[2 * width :]))
    heads = node.attributes.get_int("num_heads")
    attributes = {"q_num_heads": heads, "kv_num_heads": heads}
    scale = node.attributes.get_float("scale", 0.0)
    if scale:
        attributes["scale"] = scale
    new.finish(new("Attention", query, key, value, scores, **attributes))


def _is_table(node: Any, smallest: int) -> bool:
    """Return whether a node reads rows of a constant float32 matrix of `smallest` elements or more."""
    tensor = node.inputs[0].const_value if node.op_type == "Gather" else None
    if tensor is None or node.attributes.get_int("axis", 0):
        return False
    return len(tensor.shape) == 2 and tensor.size >= smallest and tensor.dtype.name == "FLOAT"


def _quantize_table(graph: Any, node: Any) -> None:
    """Replace rows of a table by its rows in int8, times the scale of each."""
    new = Rewrite(graph, node)
    table, indices = node.inputs
    columns, scale = quantize_columns(table.const_value.numpy().T)
    rows = new("Gather", new.constant(np.ascontiguousarray(columns.T)), indices)
    scales = new("Gather", new.constant(scale[:, None]), indices)
    new.finish(new("Mul", new("Cast", rows, to=1), scales))  # 1 is ONNX's number of float32
