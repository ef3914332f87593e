"""Quantise an exported encoder to 8 bits for OpenVINO by NNCF's post-training quantisation.

A scale of 8 bits covers the largest activation of all neurons of a layer. In BERT-like models one or two neurons of a
layer reach four times what any other reaches, leave a quarter of the levels to the others, and are computed apart.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ...checkpoint.beside import write_json
from ...checkpoint.folders import Contents, new_folder, refuse_existing
from ...errors import ExportError, RequestError, require_package
from ...progress import quiet
from ...recipe.sections import ExportSection
from ..formats import FORMATS, Export, Format, Given, export_options
from ..onnx.export import copy_beside, export_onnx, save_program
from ..onnx.quantize import largest_difference, read_values
from ..runtimes.graphs import Rewrite, weight_of, with_bias
from ..runtimes.openvino import OPENVINO_FILE, OpenVinoRuntime, name_tensors
from ..runtimes.ort import OnnxRuntime, input_array

ROWS = 300  # rows to calibrate on, at most: the default of NNCF's `subset_size`
# How much of an activation's range SmoothQuant moves to the weights: half, as in its paper,
# https://arxiv.org/abs/2211.10438. NNCF's default is 0.95.
SMOOTHING = 0.5

APART = 16  # neurons of a layer that are set apart: as many as a kernel computes in the time of one
# Operators that compute each neuron by itself: those that only scale or shift, and those that make an activation.
_SCALING = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Sub"})
_ACTIVATIONS = frozenset(
    {
        *("BiasGelu", "Clip", "Elu", "Erf", "FastGelu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu"),
        *("Mish", "Pow", "QuickGelu", "Relu", "Sigmoid", "Softplus", "Sqrt", "Swish", "Tanh"),
    }
)

logger = logging.getLogger(__name__)


def readers(graph: Any) -> dict[str, Any]:
    """Return the layers of an ONNX graph that read neurons, by the name of the value that they read."""
    return {node.inputs[0].name: node for node in graph if weight_of(node) is not None and _are_neurons(node.inputs[0])}


def set_apart(program: Any, largest: Mapping[str, np.ndarray]) -> set[str]:
    """Compute the neurons with the largest activations of each layer, the loudest, apart, in place, if that helps.

    `largest` has the largest absolute activation of each neuron, (neurons,), by the name of the value that a layer
    reads. Returns the names of the products of the loudest neurons alone.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    graph, loudest_products = program.graph, set()
    for name, node in readers(graph).items():
        order = np.argsort(-largest[name], kind="stable")
        # It helps if the others have half the range, which is one bit more for them.
        if len(order) <= 2 * APART or largest[name][order[APART]] > largest[name][order[0]] / 2:
            continue
        new, matrix, products = Rewrite(graph, node), weight_of(node), []
        others, loudest = np.sort(order[APART:]), np.sort(order[:APART])
        for neurons in (others, loudest):  # x W is the sum of their products with their rows of W
            states = _computed_for(neurons, node.inputs[0], new, len(order))
            products.append(new("MatMul", states, new.constant(matrix[neurons])))
        loudest_products.add(products[1].name)
        new.finish(with_bias(new, node, new("Add", *products)))
    RemoveUnusedNodesPass()(program)
    return loudest_products


def _are_neurons(value: Any) -> bool:
    """Return whether a value is computed by elementwise operators, one of them an activation, from linear layers."""
    has_layers, has_activation, waiting = False, False, [value.producer()]
    while waiting:
        node = waiting.pop()
        if node is None or node.op_type not in _SCALING | _ACTIVATIONS:
            return False
        has_activation |= node.op_type in _ACTIVATIONS
        for producer in (x.producer() for x in node.inputs if x is not None and x.const_value is None):
            if producer is not None and weight_of(producer) is not None:
                has_layers = True
            else:
                waiting.append(producer)
    return has_layers and has_activation


def _computed_for(neurons: np.ndarray, value: Any, new: Rewrite, width: int) -> Any:
    """Add nodes that compute a value of all `width` neurons for some of them, back to its layers; return the value."""
    if value is None:
        return None
    if value.const_value is not None:
        array = value.const_value.numpy()
        return new.constant(array[..., neurons]) if array.shape[-1:] == (width,) else value
    node = value.producer()
    if (matrix := weight_of(node)) is not None:
        product = new("MatMul", node.inputs[0], new.constant(matrix[:, neurons]))
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return product if bias is None else new("Add", product, _computed_for(neurons, bias, new, width))
    inputs = [_computed_for(neurons, x, new, width) for x in node.inputs]
    return new(node.op_type, *inputs, domain=node.domain, **{a.name: a for a in node.attributes.values()})


def require_nncf() -> None:
    """Raise MissingRuntimeError, which says what to install, if OpenVINO or NNCF is missing."""
    OpenVinoRuntime.require()
    require_package("nncf", who="int8 on OpenVINO needs", package="NNCF", extra="openvino")


def quantize_openvino(
    exported: Export, folder: str | Path, *, rows: Sequence[Mapping[str, Any]], overwrite: bool = False
) -> Export:
    """Quantise an exported encoder for OpenVINO: `openvino_model.xml`, its weights, and `openvino_config.json`.

    Embeddings, and weights and inputs of linear layers, are in 8 bits: the inputs with scales from the rows, after
    SmoothQuant, and with corrected biases. Where a few neurons reach far more than all others, 16 of the layer are
    computed apart, in float. Attention and the rest stay in float: in bfloat16 on processors that have it.

    Args:
        exported: An export of an encoder by `export_onnx` for provider cpu in float32; its folder stays as it is.
        folder: Where to write; appears only when everything is written and checked.
        rows: Batches of rows like those to be served. The first 300 rows are used, without padding.
        overwrite: Replace an existing folder.

    Returns:
        The quantised graph; `max_abs` is its largest difference from the float32 graph on the first batch.

    Raises:
        MissingRuntimeError: OpenVINO or NNCF is not installed.
        OutputExistsError: The folder exists and `overwrite` is off, or it is that of the export.
        RequestError: There are no rows; or the export decodes, has several graphs, or is not float32 for provider cpu.
        ExportError: NNCF failed.
        ParityError: The outputs of both graphs are more than 30 % apart (root mean square); nothing is kept.

    Examples:
        >>> exported = export_onnx(slim, folder / "onnx", batch=batches[0])
        >>> quantize_openvino(exported, folder / "openvino-int8", rows=batches).file.name
        'openvino_model.xml'
    """
    require_nncf()
    _check_request(decodes=exported.decodes or len(exported.files) > 1, rows=rows)
    how = export_options("openvino", exported.how.provider, exported.how.dtype, "int8")
    folder = Path(folder)
    refuse_existing(folder, overwrite=overwrite, inputs={"export": exported.folder})
    import openvino

    with new_folder(folder, overwrite=overwrite) as staging:
        copy_beside(exported, staging)
        graph, settings = _quantised(exported.file, rows)
        openvino.save_model(graph, str(staging / OPENVINO_FILE), compress_to_fp16=False)
        write_json(staging / "openvino_config.json", settings)
        expected = OnnxRuntime(exported.file, threads=torch.get_num_threads()).compute(rows[0])
        outputs = OpenVinoRuntime(staging / OPENVINO_FILE, threads=torch.get_num_threads()).compute(rows[0])
        max_abs = largest_difference(expected, outputs, rows[0])
        size = sum(file.stat().st_size for file in staging.glob(f"{Path(OPENVINO_FILE).stem}.*"))
    return replace(
        exported,
        format="openvino",
        folder=folder,
        file=folder / OPENVINO_FILE,
        files=(OPENVINO_FILE, OPENVINO_FILE.replace(".xml", ".bin")),
        bytes=size,
        how=how,
        max_abs=max_abs,
        checked_on=OpenVinoRuntime.name,
        facts={"layers": settings["layers"], "float_neurons": settings["quantization"]["float_neurons"]},
    )


def export_openvino(
    model: PreTrainedModel, folder: Path, how: ExportSection, given: Given, *, overwrite: bool = False
) -> Export:
    """Export an encoder to ONNX, and quantise the graph for OpenVINO; see `export_onnx` and `quantize_openvino`."""
    require_nncf()
    _check_request(decodes=model.can_generate(), rows=given.rows)
    refuse_existing(folder, overwrite=overwrite)
    with TemporaryDirectory(prefix="hies-float32-") as temporary:
        options: dict[str, Any] = {"batch": given.sample, "processor": given.processor, "traces": given.traces}
        exported = export_onnx(model, Path(temporary) / "onnx", **options)
        return quantize_openvino(exported, folder, rows=given.rows, overwrite=overwrite)


def _check_request(*, decodes: bool, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Refuse, by a RequestError, a model that generates, and an empty list of rows; None if they come later."""
    if decodes:
        raise RequestError("int8 on OpenVINO is for encoders, got a model that generates; use another runtime, or bits")
    if rows is not None and not rows:
        raise RequestError("int8 on OpenVINO needs rows to calibrate on, got none; give some 300 like those to serve")


def _quantised(file: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """Return an ONNX file as OpenVINO's graph in 8 bits, and what openvino_config.json says of it."""
    with quiet(verbose=logger.isEnabledFor(logging.DEBUG)), TemporaryDirectory(prefix="hies-apart-") as temporary:
        import nncf
        import openvino
        from nncf.quantization.advanced_parameters import AdvancedSmoothQuantParameters
        from nncf.quantization.range_estimator import RangeEstimatorParametersSet

        core = openvino.Core()
        input_names, _, _ = name_tensors(file, core.read_model(str(file)))
        feeds = list(islice(single_rows(input_names, rows), ROWS))
        prepared = Path(temporary) / file.name
        loudest = _write_set_apart(file, feeds, prepared)
        graph = core.read_model(str(prepared))
        name_tensors(prepared, graph)
        # Of a graph that comes from ONNX, NNCF at times finds operators that are no longer part of it.
        openvino.save_model(graph, f"{temporary}/{OPENVINO_FILE}", compress_to_fp16=False)
        graph = core.read_model(f"{temporary}/{OPENVINO_FILE}")
        in_float = [layer.get_friendly_name() for layer in _layers(graph) if layer.output(0).names & loudest]
        try:
            quantised = nncf.quantize(
                graph,
                nncf.Dataset(feeds),
                subset_size=len(feeds),
                model_type=nncf.ModelType.TRANSFORMER,
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
                    smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=SMOOTHING),
                ),
                # Attention is computed in float in any case; rounding its inputs would only cost time and precision.
                ignored_scope=nncf.IgnoredScope(names=in_float, types=["ScaledDotProductAttention"], validate=False),
            )
        except Exception as error:  # NNCF has a class for each part of it, and no common one
            raise ExportError(f"NNCF must quantise {file.name}, and stopped: {error}") from error
        kinds = (layer.input_value(0).get_node().get_type_name() for layer in _layers(quantised))
        layers = Counter("int8" if kind == "FakeQuantize" else "float32" for kind in kinds)
    settings = {"method": "nncf.quantize", "rows": len(feeds), "float_neurons": APART * len(loudest)}
    return quantised, {"quantization": {**settings, "nncf": nncf.__version__}, "layers": dict(layers)}


def _write_set_apart(file: Path, feeds: Sequence[Mapping[str, np.ndarray]], target: Path) -> set[str]:
    """Write an ONNX file that computes the loudest neurons on the feeds apart, and return what `set_apart` does."""
    import onnx_ir

    program = onnx_ir.load(file)
    largest: dict[str, np.ndarray] = {}
    names = list(readers(program.graph))
    if names:
        with read_values(file)(names) as read:
            for feed in feeds:
                for name, states in read(feed).items():
                    reached = states.flatten(0, -2).abs().amax(0).numpy()
                    largest[name] = np.maximum(largest.get(name, 0.0), reached)
    loudest = set_apart(program, largest)
    program.graph.sort()
    save_program(program, target)
    return loudest


def _layers(graph: Any) -> list[Any]:
    """Return the linear layers of a graph of OpenVINO: products with a value that follows from constants alone."""
    return [node for node in graph.get_ops() if node.get_type_name() == "MatMul" and _is_constant(node.input_value(1))]


def _is_constant(value: Any) -> bool:
    """Return whether a value follows from constants alone."""
    node = value.get_node()
    inputs = node.input_values()
    # A node without inputs that is no constant is an input of the graph.
    return node.get_type_name() == "Constant" or (len(inputs) > 0 and all(map(_is_constant, inputs)))


def single_rows(names: Sequence[str], batches: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the inputs of a graph for single rows without their padding, which would widen the ranges."""
    for batch in batches:
        arrays = {name: input_array(name, batch, {}) for name in names}
        mask = batch.get("attention_mask")
        for row in range(len(arrays[names[0]])):
            tokens = slice(None) if mask is None else np.asarray(mask[row], dtype=bool)
            yield {name: array[row : row + 1, tokens] for name, array in arrays.items()}


FORMATS["openvino"] = Format(
    title=Contents.OPENVINO.value,
    require=require_nncf,
    check=lambda model, how, given, **_: _check_request(decodes=model.can_generate()),
    write=export_openvino,
    quantize=lambda exported, folder, how, given: quantize_openvino(exported, folder, rows=given.rows),
    hub_folder="openvino",
)
