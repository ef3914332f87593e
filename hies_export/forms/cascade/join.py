"""Join the ONNX graphs of two classifiers: the second one runs only for the rows that the first is unsure of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..runtimes.graphs import Builder, drop_unused, read_instead

# The outputs of a joined graph: logits, and which rows went on to the dense model.
LOGITS, PASSED_ON = "logits", "passed_on"


def join_graphs(slim: Any, dense: Any, threshold: float) -> int:
    """Add the dense graph to the slim one, for rows whose margin is at most a threshold; both are changed in place.

    The dense graph becomes a branch of an If. Weights that both have are stored once. Columns of tokens that are
    padding in all rows that go on are left out. The graphs, `onnx_ir.Graph`, have the same inputs and the output
    `logits`, (rows, classes). Returns the size of the weights that both have, in bytes.
    """
    import onnx_ir

    shared = _share_weights(slim, dense)
    (logits,) = (output for output in slim.outputs if output.name == LOGITS)
    logits.name = "slim_logits"
    new = Builder(slim, "cascade")  # new("Add", x, y) adds a node and returns its output
    zero, one, two, axis = (new.constant(np.array([number])) for number in (0, 1, 2, 1))
    largest, _ = new.several(2, "TopK", logits, two)  # (rows, 2)
    margin = new("Sub", new("Slice", largest, zero, one, axis), new("Slice", largest, one, two, axis))
    unsure = new("LessOrEqual", new("Squeeze", margin, axis), new.constant(np.float32(threshold)))
    rows = new("Transpose", new("NonZero", unsure), perm=[1, 0])  # (rows that go on, 1)
    any_unsure = new("Greater", new("Size", rows), new.constant(np.int64(0)))
    pass_on = onnx_ir.Graph([], [], nodes=[], name="pass_on")
    new_in_branch = Builder(pass_on, "cascade_pass_on", outermost=slim)
    answers = _add_dense(dense, new_in_branch, {value.name: value for value in slim.inputs}, rows)
    pass_on.outputs.append(new_in_branch("ScatterND", logits, rows, answers))
    all_sure = onnx_ir.Graph([], [], nodes=[], name="all_sure")
    all_sure.outputs.append(Builder(all_sure, "cascade_all_sure")("Identity", logits))
    for branch in (pass_on, all_sure):
        branch.outputs[0].dtype, branch.outputs[0].shape = logits.dtype, logits.shape
    result = new("If", any_unsure, then_branch=pass_on, else_branch=all_sure)
    result.name, result.dtype, result.shape = LOGITS, logits.dtype, logits.shape
    unsure.name, unsure.dtype, unsure.shape = PASSED_ON, onnx_ir.DataType.BOOL, onnx_ir.Shape(logits.shape[:1])
    slim.outputs[:] = [result, unsure]
    for domain, version in dense.opset_imports.items():
        slim.opset_imports[domain] = max(version, slim.opset_imports.get(domain, version))
    drop_unused(slim)
    return shared


def _add_dense(dense: Any, new: Builder, inputs: Mapping[str, Any], rows: Any) -> Any:
    """Move the nodes of the dense graph into that of `new`, to read some rows of the inputs; return their logits.

    `inputs` are values by name; `rows`, (rows that go on, 1), are indices. Padding at the end of all is cut off.
    """
    one = new.constant(np.array([1]))
    index = new("Squeeze", rows, one)
    selected = {name: new("Gather", value, index, axis=0) for name, value in inputs.items()}
    if "attention_mask" in selected:
        used = new("Transpose", new("NonZero", selected["attention_mask"]), perm=[1, 0])  # (tokens, 2): row, column
        last = new("ReduceMax", new("Gather", used, one, axis=1), keepdims=0)  # the last column that is not padding
        length = new("Reshape", new("Add", last, new.constant(np.int64(1))), one)
        zero = new.constant(np.array([0]))
        selected = {name: new("Slice", value, zero, length, one) for name, value in selected.items()}
    for value in dense.inputs:
        read_instead(value, selected[value.name])
    (answers,) = (output for output in dense.outputs if output.name == LOGITS)
    dense.outputs.clear()
    for node in list(dense):
        dense.remove(node)
        node.name = f"dense_{node.name}"
        for output in node.outputs:
            if output.name:  # an optional output that is left out has none
                output.name = f"dense_{output.name}"
        new.add(node)
    return answers


def _share_weights(slim: Any, dense: Any) -> int:
    """Move the dense graph's weights to the slim graph, but for those it has already; return their size in bytes."""
    known = {_content(value): value for value in slim.initializers.values()}
    shared = 0
    for value in list(dense.initializers.values()):
        del dense.initializers[value.name]
        equal = known.get(_content(value))
        if equal is None:
            value.name = f"dense_{value.name}"
            slim.register_initializer(value)
        else:
            read_instead(value, equal)
            shared += value.const_value.nbytes
    return shared


def _content(value: Any) -> tuple[Any, ...]:
    """Return what is the same of two equal weights: their type, shape and hash."""
    tensor = value.const_value
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()
