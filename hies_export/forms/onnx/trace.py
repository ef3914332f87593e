"""Trace a module to an ONNX program with dynamic axes and Optimum's names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from ...errors import ExportError, refusing
from ...model.internals import exported_program
from ..runtimes.base import Provider
from .rewrites import arrange_for_cpu, flatten_gemm_inputs, number_from_past, share_tied_weights, unsqueeze_masks

Axes: TypeAlias = Mapping[str, Mapping[int, str]]  # input -> number of an axis -> its name
# Names of axes as Optimum writes them; transformers.js reads the size of a batch by this one.
BATCH, SEQUENCE = "batch_size", "sequence_length"
TOKEN_AXES = {0: BATCH, 1: SEQUENCE}


def trace_sample(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return two rows of a batch to trace an encoder on; texts have at least 4 tokens, and padding in the second row.

    With a single row, the tracer would fix the batch axis; and it would drop a mask of ones. So texts get a new mask,
    and token types if these are missing. Of texts, only what the model's forward takes is returned.
    """
    rows = {name: torch.cat([tensor, tensor])[:2] for name, tensor in batch.items()}
    if "input_ids" not in rows:
        return rows
    shape = rows["input_ids"].shape
    length = max(4, shape[1])
    columns = torch.arange(length) % shape[1]  # repeats a shorter text
    rows |= {name: tensor[:, columns] for name, tensor in rows.items() if tensor.shape[:2] == shape}
    rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    rows["attention_mask"][1, length // 2 :] = 0
    accepted = list(inspect.signature(model.forward).parameters)
    # A tokenizer may return token types for text pairs; a graph without this input would ignore them.
    if "token_type_ids" in accepted and getattr(model.config, "type_vocab_size", 0) > 1:
        rows.setdefault("token_type_ids", torch.zeros_like(rows["input_ids"]))
    return {name: rows[name] for name in accepted if name in rows}


def trace_encoder(model: PreTrainedModel, sample: dict[str, torch.Tensor], fusions: Provider) -> Any:
    """Trace an encoder to an `onnx_ir.Model` with named dynamic axes, as `export_program` does."""
    # Images, audio and single values per row have no axis of tokens.
    axes: Axes = {
        name: {0: BATCH} if name in ("pixel_values", "input_features") or tensor.ndim < 2 else TOKEN_AXES
        for name, tensor in sample.items()
    }
    return export_program(model, sample, fusions, axes=axes)


def export_program(
    module: torch.nn.Module, sample: Mapping[str, Any], fusions: Provider, *, axes: Axes | None = None
) -> Any:
    """Return a module as an `onnx_ir.Model`, traced by transformers' exporter on a sample, repaired and fused.

    `fusions` is the provider whose fused operators are used. `axes` names the dynamic axes; without, the exporter tries
    to make all axes dynamic, and they stay unnamed. Raises ExportError if it fails.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass

    auto = torch.export.Dim.AUTO
    dynamic = None if axes is None else {name: dict.fromkeys(labels, auto) for name, labels in axes.items()}
    must = f"the model must be exportable to ONNX, and the exporter refused {type(module).__name__}"
    with refusing(must, kind=ExportError):
        program = exported_program(module, sample, fusions, dynamic)
    flatten_gemm_inputs(program)
    share_tied_weights(program)
    if fusions == "cpu":
        arrange_for_cpu(program.graph)
    else:
        unsqueeze_masks(program)
        number_from_past(program)
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


def name_axes(program: Any, axes: Axes) -> None:
    """Rename symbolic sizes in place, so that axes of inputs get their names; refuse fixed axes and missing inputs."""
    import onnx_ir

    inputs = {value.name: value for value in program.graph.inputs}
    if missing := sorted(set(axes) - set(inputs)):
        raise ExportError(f"the graph must have the input {missing[0]!r}, and the exporter dropped it")
    names: dict[str, str] = {}  # by the exporter's symbols
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
                value.shape[axis] = onnx_ir.SymbolicDim(_renamed(dim.value, names)) if size is None else size


def fixed_size(dim: Any) -> int | None:
    """Return the size of a dimension that the trace fixed, even one written as a symbol "2"; None if it is dynamic."""
    text = str(dim if isinstance(dim, int) else dim.value)
    return int(text) if text.isdigit() else None


def _renamed(expression: str, names: Mapping[str, str]) -> str:
    """Return a symbolic size such as `s36 + s70` with its symbols replaced by their names."""
    if expression in names:
        return names[expression]
    # Within an expression, a name that is a sum would need brackets.
    simple = {symbol: label for symbol, label in names.items() if " " not in label}
    return re.sub(r"\w+", lambda match: simple.get(match[0], match[0]), expression)


def _values(graph: Any) -> Iterator[Any]:
    """Yield the inputs of a graph, and the outputs of its nodes."""
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs
