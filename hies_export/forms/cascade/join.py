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
    new = Builder(slim, "cascade")
    first, second, end, columns = (new.constant(np.array([number])) for number in (0, 1, 2, 1))
    largest, _ = new.several(2, "TopK", logits, end)  # (rows, 2)
    margin = new("Sub", new("Slice", largest, first, second, columns), new("Slice", largest, second, end, columns))
    unsure = new("LessOrEqual", new("Squeeze", margin, columns), new.constant(np.float32(threshold)))
    rows = new("Transpose", new("NonZero", unsure), perm=[1, 0])  # (rows that go on, 1)
    some = new("Greater", new("Size", rows), new.constant(np.int64(0)))
    then = onnx_ir.Graph([], [], nodes=[], name="pass_on")
    inside = Builder(then, "cascade_pass_on", outermost=slim)
    answers = _answers_of(dense, inside, {value.name: value for value in slim.inputs}, rows)
    then.outputs.append(inside("ScatterND", logits, rows, answers))
    otherwise = onnx_ir.Graph([], [], nodes=[], name="all_sure")
    otherwise.outputs.append(Builder(otherwise, "cascade_all_sure")("Identity", logits))
    for branch in (then, otherwise):
        branch.outputs[0].dtype, branch.outputs[0].shape = logits.dtype, logits.shape
    result = new("If", some, then_branch=then, else_branch=otherwise)
    result.name, result.dtype, result.shape = LOGITS, logits.dtype, logits.shape
    unsure.name, unsure.dtype, unsure.shape = PASSED_ON, onnx_ir.DataType.BOOL, onnx_ir.Shape(logits.shape[:1])
    slim.outputs[:] = [result, unsure]
    for domain, version in dense.opset_imports.items():
        slim.opset_imports[domain] = max(version, slim.opset_imports.get(domain, version))
    drop_unused(slim)
    return shared


def _answers_of(dense: Any, new: Builder, inputs: Mapping[str, Any], rows: Any) -> Any:
    """Move the nodes of the dense graph into that of `new`, to read some rows of the inputs; return their logits.

    `inputs` are values by name; `rows`, (rows that go on, 1), are indices.
    """
    columns = new.constant(np.array([1]))
    index = new("Squeeze", rows, columns)
    taken = {name: new("Gather", value, index, axis=0) for name, value in inputs.items()}
    if "attention_mask" in taken:
        used = new("Transpose", new("NonZero", taken["attention_mask"]), perm=[1, 0])  # (tokens, 2)
        last = new("ReduceMax", new("Gather", used, columns, axis=1), keepdims=0)
        length = new("Reshape", new("Add", last, new.constant(np.int64(1))), columns)
        start = new.constant(np.array([0]))
        taken = {name: new("Slice", value, start, length, columns) for name, value in taken.items()}
    for value in dense.inputs:
        read_instead(value, taken[value.name])
    (answers,) = (output for output in dense.outputs if output.name == LOGITS)
    dense.outputs.clear()
    for node in list(dense):
        dense.remove(node)
        node.name = f"dense_{node.name}"
        for output in node.outputs:
            output.name = output.name and f"dense_{output.name}"
        new.add(node)
    return answers


def _share_weights(slim: Any, dense: Any) -> int:
    """Move the dense graph's weights to the slim graph, except those that it has; return the size of those in bytes."""
    known = {_content(value): value for value in slim.initializers.values()}
    shared = 0
    for value in list(dense.initializers.values()):
        del dense.initializers[value.name]
        same = known.get(_content(value))
        if same is None:
            value.name = f"dense_{value.name}"
            slim.register_initializer(value)
        else:
            read_instead(value, same)
            shared += value.const_value.nbytes
    return shared


def _content(value: Any) -> tuple[Any, ...]:
    tensor = value.const_value
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()
