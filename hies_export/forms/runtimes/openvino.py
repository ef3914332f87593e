"""Run ONNX graphs in OpenVINO on the CPU, in float32 or in bfloat16, and its own graphs with layers in 8 bits.

OpenVINO reads the graphs of `export_onnx` as they are, ONNX Runtime's fused operators included. The default precision
of its CPU plugin depends on the processor (bfloat16 if that has instructions for it), so the precision is always set
here, and read back from the compiled model. Beside layers in 8 bits, the others compute in that default.

Source: https://docs.openvino.ai/2026/openvino-workflow/running-inference/inference-devices-and-modes/cpu-device.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...errors import ExportError, require_package
from .base import register_runtime
from .ort import GraphRuntime, cache_sizes, input_array, onnx_file

OPENVINO_FILE = "openvino_model.xml"  # the name that Optimum gives a graph of OpenVINO
_DEVICE = "CPU"
_PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_DTYPES = {precision: dtype for dtype, precision in _PRECISIONS.items()}


@register_runtime("openvino")
class OpenVinoRuntime(GraphRuntime):
    """An ONNX file, or OpenVINO's own .xml, in OpenVINO on the CPU, with an infer request of its own for each feed."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "int8")
    hints: ClassVar[tuple[str, ...]] = ("bfloat16",)
    calibrated: ClassVar[Mapping[str, str]] = {"int8": "openvino"}
    bits: ClassVar[tuple[str, ...]] = dtypes
    loads: ClassVar[int] = 5  # as for ONNX Runtime, and for its reason: copies' weights have other memory addresses

    def __init__(self, source: str | Path, *, threads: int, dtype: str | None = None):
        self.require()
        import openvino

        has_xml = isinstance(source, (str, Path)) and (Path(source) / OPENVINO_FILE).is_file()
        file = Path(source) / OPENVINO_FILE if has_xml else onnx_file(source, self.name)
        core = openvino.Core()
        try:
            graph = core.read_model(str(file))
            self._calibrated = any(node.get_type_name() == "FakeQuantize" for node in graph.get_ops())
            precision = graph.outputs[0].get_element_type().get_type_name()
            # Of what is not in 8 bits: bfloat16 changes less than those do, and dense MiniLM takes 0.91 of the time.
            if self._calibrated and "BF16" in core.get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES"):
                precision = "bf16"
            options = {
                "INFERENCE_PRECISION_HINT": precision if dtype is None else _PRECISIONS[dtype],
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1,
                "PERFORMANCE_HINT": "LATENCY",
            }
            self._model = core.compile_model(graph, _DEVICE, options)
        except RuntimeError as error:
            raise ExportError(f"OpenVINO must load {file.name}, and refused: {_reason(error)}") from error
        # OpenVINO takes fewer than asked for if the machine has fewer cores.
        self.threads = int(self._model.get_property("INFERENCE_NUM_THREADS"))
        self.inputs, self.outputs, self._cache_sizes = name_tensors(file, graph)
        self.decodes = any(name.startswith("past_key_values.") for name in self.inputs)

    @classmethod
    def require(cls) -> None:
        """Raise MissingRuntimeError if OpenVINO is not installed."""
        require_package("openvino", who=f"runtime {cls.name!r} needs", package="OpenVINO", extra="openvino")

    @property
    def provider(self) -> str:
        """The devices that the compiled model executes on, such as `CPU`."""
        return ", ".join(self._model.get_property("EXECUTION_DEVICES"))

    @property
    def dtype(self) -> str:
        """The precision that the compiled model executes in; "int8" if its linear layers are quantised."""
        if self._calibrated:
            return "int8"
        precision = self._model.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return _DTYPES.get(precision, precision)

    def prepare(self, batch: Mapping[str, Any]) -> Any:
        """Return a new infer request with its inputs set; missing ones are filled in as by `input_array`."""
        import openvino

        request = self._model.create_infer_request()
        for name in self.inputs:
            dtype = self._model.input(name).get_element_type().to_dtype()
            array = np.ascontiguousarray(input_array(name, batch, self._cache_sizes), dtype=dtype)
            # The request keeps the tensor, and the tensor its own copy of the values.
            request.set_tensor(name, openvino.Tensor(array))
        return request

    def run(self, feed: Any) -> Any:
        """Run the graph on the inputs of a request, and return the request, which holds the outputs."""
        try:
            feed.infer()
        except RuntimeError as error:
            message = f"OpenVINO must run the graph, and stopped: {_reason(error)}; report the model"
            raise ExportError(message) from error
        return feed

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Return float32 arrays by output name."""
        return {name: np.array(result.get_tensor(name).data, dtype=np.float32) for name in self.outputs}


def name_tensors(file: Path, graph: Any) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[int, int]]]:
    """Name a graph's inputs and outputs in place as its ONNX file does; return the names of both, and `cache_sizes`."""
    if file.suffix == ".xml":  # OpenVINO's own format: nothing to rename, and no cache, as only encoders have it
        return tuple(x.get_any_name() for x in graph.inputs), tuple(x.get_any_name() for x in graph.outputs), {}
    import onnx

    header = onnx.load(str(file), load_external_data=False)
    shapes = {
        value.name: [axis.dim_value or axis.dim_param for axis in value.type.tensor_type.shape.dim]
        for value in header.graph.input
    }
    names = tuple(shapes), tuple(value.name for value in header.graph.output)
    # A tensor may have several names in OpenVINO; that of the file is among them.
    for values, file_names in zip((graph.inputs, graph.outputs), names, strict=True):
        for value in values:
            (name,) = value.names.intersection(file_names)
            value.set_names({name})
    return *names, cache_sizes(shapes)


def _reason(error: RuntimeError) -> str:
    """Return OpenVINO's error message, without the source locations at its beginning."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = [line for line in lines if line and not line.startswith(("Exception from ", "Check '"))]
    return " ".join(message or lines[:1])[:300]
