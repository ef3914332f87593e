"""Rewrite a traced graph in place before it is written: repair it, store weights once, and make it fast on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtimes.graphs import Rewrite, add_constant, drop_unused, read_instead

_KEPT_ATTRIBUTES = ("num_heads", "scale", "mask_filter_value", "unidirectional")


def flatten_gemm_inputs(program: Any) -> None:
    """Insert, in place, the missing reshape in front of every `Gemm` whose input is no matrix.

    When the exporter fuses the attention in front of a Conv1D (GPT-2), it drops the reshape to (batch * sequence,
    hidden) between them. ONNX Runtime then refuses the graph: "Input 0 expected to have rank 2 but has rank 3".
    """
    import onnx_ir

    graph = program.graph
    for node in [node for node in graph.all_nodes() if node.op_type == "Gemm"]:
        states, weight = node.inputs[:2]
        if (states.shape is not None and len(states.shape) == 2) or weight.shape is None:
            continue
        width = weight.shape[1 if node.attributes.get_int("transB", 0) else 0]
        shape = add_constant(graph, f"{node.name}_matrix", np.array([-1, width], dtype=np.int64))
        matrix = onnx_ir.node("Reshape", [states, shape], name=f"{node.name}_flatten")
        graph.insert_before(node, matrix)
        node.replace_input_with(0, matrix.outputs[0])


def share_tied_weights(program: Any) -> None:
    """Make an output layer that is tied to the embeddings read them instead of a transposed copy.

    Constant folding creates that copy. The layer becomes ONNX Runtime's FusedMatMul, which multiplies by the transpose
    without storing it.
    """
    import onnx_ir

    graph = program.graph
    tables = [n.inputs[0] for n in graph.all_nodes() if n.op_type == "Gather" and n.inputs[0].const_value is not None]
    for node in [node for node in graph.all_nodes() if node.op_type in ("MatMul", "FusedMatMul")]:
        weight = node.inputs[1]
        if weight.const_value is None or len(weight.shape) != 2 or node.attributes.get_int("transB", 0):
            continue
        for table in tables:
            if list(table.shape) != list(weight.shape)[::-1]:
                continue
            embedding, transposed = table.const_value.numpy(), weight.const_value.numpy().T
            # The first row alone rules out most tables quickly.
            if np.array_equal(embedding[0], transposed[0]) and np.array_equal(embedding, transposed):
                # Keep the other attributes: a FusedMatMul may also scale.
                node.op_type, node.domain = "FusedMatMul", "com.microsoft"
                node.attributes["transB"] = onnx_ir.AttrInt64("transB", 1)
                node.replace_input_with(1, table)
                graph.opset_imports.setdefault("com.microsoft", 1)
                break
    drop_unused(graph)


def unsqueeze_masks(program: Any) -> None:
    """Replace GatherND by Unsqueeze where it only reshapes a padding mask (batch, keys) to (batch, 1, 1, keys).

    transformers indexes the mask by the numbers of all rows and keys. On a GPU, ONNX Runtime has no `GatherND` of
    booleans, and copies its sizes from memory that is freed by the time a captured CUDA graph is replayed
    (core/providers/cuda/tensor/gather_nd.cc), so that such a graph could not be captured.
    """
    graph = program.graph
    for node in [node for node in graph if node.op_type == "GatherND" and _gathers_all(node)]:
        new = Rewrite(graph, node)  # new("Add", x, y) inserts before the node; new.finish(x) puts x in its place
        new.finish(new("Unsqueeze", node.inputs[0], new.constant(np.array([1, 2], dtype=np.int64))))


def _gathers_all(node: Any) -> bool:
    """Return whether a GatherND takes all rows and columns of a matrix in order, as (rows, 1, 1, columns)."""
    matrix, indices = node.inputs
    joined, shape = indices.producer(), node.outputs[0].shape
    if matrix.shape is None or len(matrix.shape) != 2 or joined is None or joined.op_type != "Concat":
        return False
    if shape is None or len(shape) != 4 or list(shape[1:3]) != [1, 1]:
        return False
    return len(joined.inputs) == 2 and all(_counts_up(numbers) for numbers in joined.inputs)


def _counts_up(value: Any) -> bool:
    """Return whether a value is a Range of 0, 1, 2, ..., perhaps with further axes along which it is repeated."""
    node = value.producer()
    while node is not None and node.op_type in ("Unsqueeze", "Expand"):
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Range":
        return False
    start, _, step = (operand.const_value for operand in node.inputs)
    return start is not None and step is not None and (start.numpy().item(), step.numpy().item()) == (0, 1)


def number_from_past(program: Any) -> None:
    """Let a Range of positions begin at the length of the cache, instead of adding that length to every position.

    The length is computed on the CPU. Added to numbers on a GPU it is copied there, and ONNX Runtime captures no CUDA
    graph of a session with such a copy.
    """
    graph = program.graph
    for node in [node for node in graph if node.op_type == "Add"]:
        for positions, length in (node.inputs, node.inputs[::-1]):  # the length may be added on either side
            numbering = positions.producer()
            is_scalar = length.shape is not None and len(length.shape) == 0
            if numbering is not None and numbering.op_type == "Range" and is_scalar and _is_size(length):
                new = Rewrite(graph, node)
                first, end, step = numbering.inputs
                new.finish(new("Range", new("Add", first, length), new("Add", end, length), step))
                break


def _is_size(value: Any) -> bool:
    """Return whether a value is computed from shapes and constants alone, which ONNX Runtime does on the CPU."""
    node = value.producer()
    if node is None:
        return value.const_value is not None
    return node.op_type == "Shape" or all(_is_size(operand) for operand in node.inputs if operand is not None)


def arrange_for_cpu(graph: Any) -> None:
    """Rewrite attention, so that quantisers see its weights, and norms, so that ONNX Runtime's CPU kernels are fast."""
    for node in list(graph):
        if node.op_type == "Attention" and node.domain == "com.microsoft":
            _separate_projections(graph, node)
        elif node.op_type == "SkipLayerNormalization":
            _separate_norm(graph, node)
    drop_unused(graph)


def _first_inputs(node: Any, count: int) -> list[Any]:
    """Return the first `count` inputs of a node, with None for optional ones that it leaves out."""
    inputs = list(node.inputs[:count])
    return inputs + [None] * (count - len(inputs))


def _separate_projections(graph: Any, node: Any) -> None:
    """Replace Attention by MatMuls for query, key and value in front of MultiHeadAttention.

    Attention takes the three weights concatenated, which no quantiser recognises as a weight. Separate products take
    the same time: 0.99 to 1.02 of it for MiniLM at 1 x 32, 1 x 128 and 8 x 128, ONNX Runtime 1.32, one core.
    """
    states, weight, bias, mask, past, attention_bias = _first_inputs(node, 6)
    weights = _separate_weights(graph, node, weight)
    # MultiHeadAttention takes and returns a cache as two tensors, where Attention has one.
    if weights is None or past is not None or any(output.uses() for output in node.outputs[1:]):
        return
    new = Rewrite(graph, node)
    products = [new("MatMul", states, matrix) for matrix in weights]
    kept = {name: node.attributes[name].value for name in _KEPT_ATTRIBUTES if name in node.attributes}
    new.finish(new("MultiHeadAttention", *products, bias, mask, attention_bias, domain=node.domain, **kept))


def _separate_weights(graph: Any, node: Any, weight: Any) -> list[Any] | None:
    """Return the weights of query, key and value that the weight of an Attention joins; None if they cannot be told."""
    joined = weight.producer()
    if joined is not None:
        return list(joined.inputs) if joined.op_type == "Concat" and len(joined.inputs) == 3 else None
    if weight.const_value is None:
        return None
    matrix = weight.const_value.numpy()
    sizes = node.attributes.get_ints("qkv_hidden_sizes", [matrix.shape[1] // 3] * 3)
    new, ends = Rewrite(graph, node), np.cumsum(sizes)[:2].tolist()
    return [new.constant(np.ascontiguousarray(columns)) for columns in np.split(matrix, ends, axis=1)]


def _separate_norm(graph: Any, node: Any) -> None:
    """Replace SkipLayerNormalization by Sum and LayerNormalization.

    Its kernel is slow in ONNX Runtime 1.32: for 1,024 tokens of 384 features on one core it takes 1.7 ms, and Sum and
    LayerNormalization 0.35. ONNX Runtime would fuse Add again when it loads the graph, but leaves Sum alone.
    """
    states, skip, scale, shift, bias = _first_inputs(node, 5)
    if any(output.uses() for output in node.outputs[1:3]):  # mean and deviation
        return
    new = Rewrite(graph, node)
    total = new("Sum", *(value for value in (states, bias, skip) if value is not None))
    if len(node.outputs) > 3:  # the sum
        read_instead(node.outputs[3], total)
    epsilon = node.attributes.get_float("epsilon", 1e-12)
    parameters = (value for value in (scale, shift) if value is not None)
    new.finish(new("LayerNormalization", total, *parameters, axis=-1, epsilon=epsilon))
