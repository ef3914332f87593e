"""Trace a module to an ONNX program with dynamic axes and Optimum's names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import ExportError, refusing
from ...model.internals import exported_program
from ..runtimes.base import Provider
from .rewrites import arrange_for_cpu, count_from_past, flatten_gemm_inputs, read_masks_whole, share_tied_weights

# Names of axes as Optimum writes them; transformers.js reads the size of a batch by this one.
BATCH, SEQUENCE = "batch_size", "sequence_length"
TOKEN_AXES = {0: BATCH, 1: SEQUENCE}


def trace_sample(model: PreTrainedModel, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch to trace: 2 rows; of text with at least 4 tokens, and padding in the second.

    With a single row, the tracer would fix the batch axis; and it would drop a mask of ones. A missing mask and token
    types are added if the model's forward takes them.
    """
    rows = {name: torch.cat([tensor, tensor])[:2] for name, tensor in given.items()}
    if "input_ids" not in rows:
        return rows
    tokens = rows["input_ids"].shape
    length = max(4, tokens[1])
    columns = torch.arange(length) % tokens[1]
    rows |= {name: tensor[:, columns] for name, tensor in rows.items() if tensor.shape[:2] == tokens}
    rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    rows["attention_mask"][1, length // 2 :] = 0
    accepted = list(inspect.signature(model.forward).parameters)
    # A tokenizer may return token types for text pairs; a graph without this input would ignore them.
    if "token_type_ids" in accepted and getattr(model.config, "type_vocab_size", 0) > 1:
        rows.setdefault("token_type_ids", torch.zeros_like(rows["input_ids"]))
    return {name: rows[name] for name in accepted if name in rows}


def trace_onnx(model: PreTrainedModel, sample: dict[str, torch.Tensor], fusions: Provider) -> Any:
    """Trace an encoder to an `onnx_ir.Model`, fused, with named dynamic axes."""
    axes: dict[str, dict[int, str]] = {
        name: {0: BATCH} if name in ("pixel_values", "input_features") or tensor.ndim < 2 else TOKEN_AXES
        for name, tensor in sample.items()
    }
    return export_program(model, sample, fusions, axes=axes)


def export_program(
    module: torch.nn.Module,
    sample: Mapping[str, Any],
    fusions: Provider,
    *,
    axes: Mapping[str, Mapping[int, str]] | None = None,
) -> Any:
    """Return a module as an `onnx_ir.Model`, traced by transformers' exporter on a sample, repaired and fused.

    `fusions` is the provider to fuse for. `axes` names the dynamic axes of each input, by number; without, the exporter
    tries to make all axes dynamic, and they stay unnamed. Raises ExportError if it fails.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass

    auto = torch.export.Dim.AUTO
    shapes = None if axes is None else {name: dict.fromkeys(named, auto) for name, named in axes.items()}
    must = f"the model must be exportable to ONNX, and the exporter refused {type(module).__name__}"
    with refusing(must, kind=ExportError):
        program = exported_program(module, sample, fusions, shapes)
    flatten_gemm_inputs(program)
    share_tied_weights(program)
    if fusions == "cpu":
        arrange_for_cpu(program.graph)
    else:
        read_masks_whole(program)
        count_from_past(program)
    RemoveUnusedNodesPass()(program)
    # Stack traces contain paths of the exporting machine.
    ClearMetadataAndDocStringPass()(program)
    for value in _values(program.graph):
        value.metadata_props.clear()
    program.graph.metadata_props.clear()
    program.metadata_props.clear()
    if axes is not None:
        name_axes(program, axes)
    return program


def name_axes(program: Any, axes: Mapping[str, Mapping[int, str]]) -> None:
    """Name the dynamic axes throughout the graph, in place: input -> axis -> name.

    Raises ExportError if the trace fixed one of these axes, or dropped an input.
    """
    import onnx_ir

    inputs = {value.name: value for value in program.graph.inputs}
    if missing := sorted(set(axes) - set(inputs)):
        raise ExportError(f"the graph must have the input {missing[0]!r}, and the exporter dropped it")
    names: dict[str, str] = {}
    for name, labels in axes.items():
        for axis, label in labels.items():
            dim = inputs[name].shape[axis]
            if fixed_size(dim) is not None or dim.value is None:
                raise ExportError(f"the axis {label} of {name!r} must be dynamic, and the trace fixed it at {dim}")
            names[dim.value] = label
    for value in _values(program.graph):
        if value.shape is None or value.shape.frozen:
            continue
        for axis, dim in enumerate(value.shape):
            if not isinstance(dim, int) and dim.value is not None:
                size = fixed_size(dim)
                value.shape[axis] = onnx_ir.SymbolicDim(_named(dim.value, names)) if size is None else size


def fixed_size(dim: Any) -> int | None:
    """Return the size of a dimension that the trace fixed, which may be a symbol such as `"2"`; else None."""
    text = str(dim if isinstance(dim, int) else dim.value)
    return int(text) if text.isdigit() else None


def _named(expression: str, names: Mapping[str, str]) -> str:
    """Return a symbolic size such as `s36 + s70` with its symbols replaced by names, unless these are sums."""
    if expression in names:
        return names[expression]
    simple = {symbol: label for symbol, label in names.items() if " " not in label}
    return re.sub(r"\w+", lambda match: simple.get(match[0], match[0]), expression)


def _values(graph: Any) -> Iterator[Any]:
    """Yield the inputs of a graph, and the outputs of its nodes."""
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs
