"""Repair a graph in place before it is written: wrong shapes, and weights that are stored twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtimes.graphs import add_constant, drop_unused


def flatten_gemm_inputs(program: Any) -> None:
    """Insert the missing reshape in front of every `Gemm` whose input is not a matrix.

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
            if list(table.shape) == list(weight.shape)[::-1] and _transposed(table, weight):
                # Keep the other attributes: a FusedMatMul may also scale.
                node.op_type, node.domain = "FusedMatMul", "com.microsoft"
                node.attributes["transB"] = onnx_ir.AttrInt64("transB", 1)
                node.replace_input_with(1, table)
                graph.opset_imports.setdefault("com.microsoft", 1)
                break
    drop_unused(graph)


def _transposed(table: Any, weight: Any) -> bool:
    """Return whether one matrix is the transpose of the other."""
    rows, columns = table.const_value.numpy(), weight.const_value.numpy()
    return np.array_equal(rows[0], columns[:, 0]) and np.array_equal(rows, columns.T)
