"""Edit ONNX graphs in place: replace a node by new ones, add constants, drop unused ones, and read linear layers."""

from __future__ import annotations

from typing import Any

import numpy as np


class Builder:
    """Adds nodes at the end of an `onnx_ir.Graph`: `new("Add", x, y)` adds a node and returns its output.

    Names begin with `prefix`. Constants go to the `outermost` graph if the graph is in a branch of another one.
    """

    def __init__(self, graph: Any, prefix: str, *, outermost: Any = None):
        self._graph, self._prefix, self._count = graph, prefix, 0
        self._outermost = graph if outermost is None else outermost

    def __call__(self, op_type: str, *inputs: Any, domain: str = "", **attributes: Any) -> Any:
        """Add a node, and return its first output."""
        return self.several(1, op_type, *inputs, domain=domain, **attributes)[0]

    def several(self, count: int, op_type: str, *inputs: Any, domain: str = "", **attributes: Any) -> tuple[Any, ...]:
        """Add a node with several outputs, and return them."""
        import onnx_ir

        name = self._name(op_type)
        node = onnx_ir.node(op_type, inputs, attributes=attributes, domain=domain, name=name, num_outputs=count)
        for index, output in enumerate(node.outputs):
            output.name = f"{name}_{index}" if index else name
        self.add(node)
        return tuple(node.outputs)

    def add(self, node: Any) -> None:
        """Add a node that was made elsewhere."""
        self._graph.append(node)

    def constant(self, array: Any) -> Any:
        """Add a constant, and return it."""
        return add_constant(self._outermost, self._name("constant"), np.asarray(array))

    def _name(self, kind: str) -> str:
        """Return a name for a new node or constant that this builder has not given yet."""
        self._count += 1
        return f"{self._prefix}_{kind}_{self._count}"


class Rewrite(Builder):
    """Builds the replacement of a node of a graph, in front of that node."""

    def __init__(self, graph: Any, node: Any):
        super().__init__(graph, node.name or node.outputs[0].name)
        self._node = node

    def add(self, node: Any) -> None:
        """Add a node in front of the old one."""
        self._graph.insert_before(self._node, node)

    def finish(self, result: Any) -> None:
        """Remove the old node, and let `result` replace its first output, under the same name."""
        old = self._node.outputs[0]
        result.name, result.shape, result.type = old.name, old.shape, old.type
        old.name = None
        read_instead(old, result)
        self._graph.remove(self._node, safe=True)


def read_instead(old: Any, new: Any) -> None:
    """Replace a value by another one in everything that reads it, and among the graph's outputs."""
    from onnx_ir import convenience

    convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def add_constant(graph: Any, name: str, array: np.ndarray) -> Any:
    """Add a constant to a graph, and return it."""
    import onnx_ir

    value = onnx_ir.val(name, const_value=onnx_ir.tensor(array))
    graph.register_initializer(value)
    return value


def drop_unused(graph: Any) -> None:
    """Remove the constants that nothing reads, and free their arrays."""
    for name in [name for name, value in graph.initializers.items() if not (value.uses() or value.is_graph_output())]:
        graph.initializers.pop(name).const_value = None


def weight_of(node: Any) -> Any:
    """Return the constant float32 matrix (inputs, outputs) that a node multiplies by; None if it does anything else."""
    if node.op_type not in ("MatMul", "Gemm", "FusedMatMul"):
        return None
    tensor = node.inputs[1].const_value
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype.name != "FLOAT":
        return None
    if any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return None
    if any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    matrix = tensor.numpy()
    return matrix.T if node.attributes.get_int("transB", 0) else matrix


def with_bias(new: Rewrite, node: Any, product: Any) -> Any:
    """Return a product, plus the bias of `node` if that is a Gemm that has one."""
    biased = node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None
    return new("Add", product, node.inputs[2]) if biased else product
