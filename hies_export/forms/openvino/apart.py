"""Compute the neurons with the largest activations apart from the others, so that the others get a narrower scale.

A scale of 8 bits covers the largest activation of all neurons of a layer. In BERT-like models one or two neurons of a
layer reach four times what any other reaches, and leave a quarter of the levels to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..runtimes.graphs import Rewrite, weight_of, with_bias

# Neurons of a layer that are set apart: as many as a kernel computes in the time of one.
APART = 16
# Operators that compute each neuron by itself: those that only scale or shift, and those that make an activation.
_PLAIN = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Sub"})
_BENDING = frozenset(
    {
        *("BiasGelu", "Clip", "Elu", "Erf", "FastGelu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu"),
        *("Mish", "Pow", "QuickGelu", "Relu", "Sigmoid", "Softplus", "Sqrt", "Swish", "Tanh"),
    }
)


def readers(graph: Any) -> dict[str, Any]:
    """Return the layers of a graph that read neurons, by the name of what they read."""
    return {node.inputs[0].name: node for node in graph if weight_of(node) is not None and _are_neurons(node.inputs[0])}


def set_apart(program: Any, largest: Mapping[str, np.ndarray]) -> set[str]:
    """Compute some neurons of each layer apart, in place; return the names of what is computed from them alone.

    `largest` has the largest absolute activation of each neuron, by the name of what a layer reads.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    graph, named = program.graph, set()
    for name, node in readers(graph).items():
        order = np.argsort(-largest[name], kind="stable")
        # Half the range is one bit more for all others.
        if len(order) <= 2 * APART or largest[name][order[APART]] > largest[name][order[0]] / 2:
            continue
        new, matrix, products = Rewrite(graph, node), weight_of(node), []
        for neurons in (np.sort(order[APART:]), np.sort(order[:APART])):
            states = _narrowed(new, node.inputs[0], neurons, len(order))
            products.append(new("MatMul", states, new.constant(matrix[neurons])))
        named.add(products[-1].name)
        total = new("Add", *products)
        new.finish(with_bias(new, node, total))
    RemoveUnusedNodesPass()(program)
    return named


def _are_neurons(value: Any) -> bool:
    """Return whether a value is computed by elementwise operators, one of them an activation, from linear layers."""
    seen, stack, bends = 0, [value], False
    while stack:
        node = stack.pop().producer()
        if node is None or node.op_type not in _PLAIN | _BENDING:
            return False
        bends |= node.op_type in _BENDING
        for given in node.inputs:
            if given is None or given.const_value is not None:
                continue
            if given.producer() is not None and weight_of(given.producer()) is not None:
                seen += 1
            else:
                stack.append(given)
    return bends and seen > 0


def _narrowed(new: Rewrite, value: Any, neurons: np.ndarray, width: int) -> Any:
    if value is None:
        return None
    if value.const_value is not None:
        array = value.const_value.numpy()
        return new.constant(array[..., neurons]) if array.shape[-1:] == (width,) else value
    node = value.producer()
    if (matrix := weight_of(node)) is not None:
        product = new("MatMul", node.inputs[0], new.constant(matrix[:, neurons]))
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return product if bias is None else new("Add", product, _narrowed(new, bias, neurons, width))
    inputs = [_narrowed(new, given, neurons, width) for given in node.inputs]
    return new(node.op_type, *inputs, domain=node.domain, **{a.name: a for a in node.attributes.values()})
