"""Quantise the linear layers and the embeddings of a graph to 8 bits, in operators of ONNX Runtime.

Weights get a scale per output channel. Activations get a scale per token, found during the run. Both are symmetric.
A scale per token needs no calibration, keeps an outlier from every other token, and makes the answer to a row
independent of the rows beside it. The dynamic mode of onnxruntime.quantization has one scale for all tokens of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .graphs import Rewrite, drop_unused

# int8 without -128; activations are stored around ZERO, for x86 multiplies unsigned by signed integers.
LEVELS, ZERO = 127, 128
# Weights of the smallest layer that is quantised. Two layers (N, N) in a row, in 8 bits against float32, one core with
# VNNI: N = 64 takes 1.43 of the time at 8 x 128, N = 128 0.75 (1.24 at 1 x 32), N = 192 0.58, N = 384 0.40.
SMALLEST = 2**14
# What a quantised graph multiplies with, by onnxruntime.quantization or by `quantize_graph`.
INTEGER_OPERATORS = ("MatMulIntegerToFloat", "MatMulInteger", "DynamicQuantizeMatMul", "QLinearMatMul", "MatMulNBits")
# The first version in which QuantizeLinear takes a scale per token.
_OPSET = 21


def quantize_graph(graph: Any) -> dict[str, int]:
    """Quantise the layers of an `onnx_ir.Graph` in place: MatMul and Gemm by a constant, Gather from a table.

    Returns:
        Number of linear layers by dtype: `int8`, and `float32` for those that are too small to be worth it.
    """
    tokens: dict[Any, tuple[Any, Any]] = {}
    layers = [node for node in graph if _weight_of(node) is not None]
    large = [node for node in layers if _weight_of(node).size >= SMALLEST]
    for node in large:
        _quantize_layer(graph, node, tokens)
    for node in [node for node in graph if node.op_type == "Gather" and _is_table(node)]:
        _quantize_table(graph, node)
    drop_unused(graph)
    graph.opset_imports["com.microsoft"] = graph.opset_imports.get("com.microsoft", 1)
    graph.opset_imports[""] = max(_OPSET, graph.opset_imports[""])
    return {"int8": len(large), "float32": len(layers) - len(large)}


def quantize_columns(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix (inputs, outputs) as int8, and the scale of each column (outputs,)."""
    scale = np.maximum(np.abs(matrix).max(axis=0) / LEVELS, np.finfo(np.float32).tiny).astype(np.float32)
    return np.clip(np.rint(matrix / scale), -LEVELS, LEVELS).astype(np.int8), scale


def _weight_of(node: Any) -> Any:
    """Return the constant matrix (inputs, outputs) that a node multiplies by; None for other nodes."""
    if node.op_type not in ("MatMul", "Gemm") or node.domain != "":
        return None
    tensor = node.inputs[1].const_value
    plain = not node.attributes.get_int("transA", 0) and node.attributes.get_float("alpha", 1.0) == 1.0
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype.name != "FLOAT" or not plain:
        return None
    matrix = tensor.numpy()
    return matrix.T if node.attributes.get_int("transB", 0) else matrix


def _quantize_layer(graph: Any, node: Any, tokens: dict[Any, tuple[Any, Any]]) -> None:
    """Replace x W + b by (quantised x) (quantised W), times the scales of columns and of tokens, + b."""
    states, matrix = node.inputs[0], _weight_of(node)
    new = Rewrite(graph, node)
    if states not in tokens:
        tokens[states] = _quantize_tokens(new, states, matrix.shape[0])
    integers, scale = tokens[states]
    columns, column_scale = quantize_columns(matrix)
    factors = [integers, new.constant(columns), new.constant(np.float32(1)), new.constant(column_scale)]
    product = new("MatMulIntegerToFloat", *factors, new.constant(np.uint8(ZERO)), domain="com.microsoft")
    result = new("Mul", product, scale)
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        result = new("Add", result, node.inputs[2])
    new.finish(result)


def _quantize_tokens(new: Rewrite, states: Any, width: int) -> tuple[Any, Any]:
    """Return states (..., width) as uint8 around ZERO, and the scale of each token (..., 1)."""
    largest = new("ReduceMax", new("Abs", states), new.constant(np.array([-1])), keepdims=1)
    scale = new("Mul", largest, new.constant(np.float32(1 / LEVELS)))
    zeros = new("Expand", new.constant(np.array([ZERO], dtype=np.uint8)), new("Shape", scale))
    return new("QuantizeLinear", states, scale, zeros, axis=-1, block_size=width), scale


def _is_table(node: Any) -> bool:
    tensor = node.inputs[0].const_value
    return (
        tensor is not None
        and node.attributes.get_int("axis", 0) == 0
        and len(tensor.shape) == 2
        and tensor.size >= SMALLEST
        and tensor.dtype.name == "FLOAT"
    )


def _quantize_table(graph: Any, node: Any) -> None:
    """Replace rows of an embedding table by rows of int8, times the scale of each row."""
    new = Rewrite(graph, node)
    table, indices = node.inputs
    columns, scale = quantize_columns(table.const_value.numpy().T)
    rows = new("Gather", new.constant(np.ascontiguousarray(columns.T)), indices)
    scales = new("Gather", new.constant(scale[:, None]), indices)
    new.finish(new("Mul", new("Cast", rows, to=1), scales))
