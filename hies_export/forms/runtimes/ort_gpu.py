"""Run ONNX graphs in ONNX Runtime on an NVIDIA GPU, with inputs and outputs on the GPU and runs as CUDA graphs.

Runs are timed with the host's clock. That is valid because ONNX Runtime synchronises at the end of every run. CUDA
events of torch would not see its work, which is on a stream of its own.

Source: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ...errors import ExportError, MissingRuntimeError, first_line
from ...model.internals import products_in_tf32
from .base import Provider, register_runtime
from .ort import BoundFeed, OnnxRuntime

# A graph of one operator, which a provider only has to load.
_ONE_NODE = """
<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
graph (float[1, 8] x) => (float[1, 8] y) { y = com.microsoft.Gelu(x) }
"""

logger = logging.getLogger(__name__)


@register_runtime("onnxruntime-cuda")
class CudaOnnxRuntime(OnnxRuntime):
    """An ONNX file in ONNX Runtime on the first GPU, captured as a CUDA graph if possible.

    It is not possible with control flow, or with an operator without CUDA kernel that does more than compute shapes.
    Batches that are run once are run without a CUDA graph: only `prepare` captures one. float32 is multiplied in TF32
    if torch was told to (ONNX Runtime does so by default).
    """

    requested: ClassVar[str] = "CUDAExecutionProvider"
    device: ClassVar[str] = "cuda"
    extra: ClassVar[str] = "gpu"
    # Loading is slow (it captures a graph), and copies are not known to differ in time on a GPU.
    loads: ClassVar[int] = 1
    compiles_shapes: ClassVar[bool] = True
    fused_for: ClassVar[Provider] = "cuda"
    bits: ClassVar[tuple[str, ...]] = ("float32", "float16")

    @classmethod
    def require(cls) -> None:
        """Raise MissingRuntimeError if ONNX Runtime is not installed, or if no session starts on the provider."""
        super().require()
        if (reason := _refusal(cls.requested)) is not None:
            raise MissingRuntimeError(
                f"runtime {cls.name!r} must run on {cls.requested}, which this ONNX Runtime knows, but cannot start: "
                f"{reason}; install the libraries of the CUDA that it is built for, as docs/guides/gpu.md says"
            )

    def __init__(self, source: str | Path, *, threads: int):
        self._captured = 0  # number of CUDA graphs
        super().__init__(source, threads=threads)
        self._check_placement()

    def _check_placement(self) -> None:
        """Refuse a session whose operators all fell back to other providers, and log those that did.

        With a CUDA graph, nothing is logged: only operators that compute shapes are then elsewhere.
        """
        placed: dict[str, Counter[str]] = {}  # provider -> its operators
        for part in self._session.get_provider_graph_assignment_info():
            placed.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
        if self.requested not in placed:
            raise self._missing(f"every operator fell back to {' and '.join(sorted(placed))}")
        for provider, operators in placed.items():
            if provider != self.requested and not self.cuda_graph:
                counts = ", ".join(f"{count} {name}" for name, count in operators.most_common())
                logger.warning("%s runs a part of %s on %s: %s", self.name, self._file.name, provider, counts)

    def _open(self, file: Path) -> Any:
        """Return a session with a CUDA graph, or without one if that fails."""
        self.cuda_graph = True
        try:
            return self._session_on_gpu(file)
        except Exception as error:  # ONNX Runtime has a class for each status, and no common one
            return self._open_without_graph(file, error)

    def _open_without_graph(self, file: Path, error: Exception) -> Any:
        """Return a session without a CUDA graph, and log the error that says why."""
        self.cuda_graph = False
        logger.warning("%s times %s without a CUDA graph: %s", self.name, file.name, first_line(error))
        return self._session_on_gpu(file)

    def _session_on_gpu(self, file: Path) -> Any:
        """Return a session on the GPU, with a CUDA graph if `cuda_graph` is on."""
        options = {
            # Grow the arena by the requested size, not by powers of two.
            "arena_extend_strategy": "kSameAsRequested",
            "enable_cuda_graph": str(int(self.cuda_graph)),
            "use_tf32": str(int(products_in_tf32())),
        }
        providers = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
        return self._session_on(file, providers, record_ep_graph_assignment_info="1")

    def prepare(self, batch: Mapping[str, Any]) -> BoundFeed:
        """Bind the inputs, run once to fix the outputs' addresses, and once more to capture the CUDA graph."""
        feed = self._with_bound_outputs(batch)
        if self.cuda_graph:
            try:
                self.run(feed)
            except ExportError as error:
                self._session = self._open_without_graph(self._file, error)
                feed = self._with_bound_outputs(batch)
        return feed

    def _with_bound_outputs(self, batch: Mapping[str, Any]) -> BoundFeed:
        """Bind inputs and outputs to fixed memory, and assign the number of the CUDA graph to capture and replay."""
        bound = super().prepare(batch)
        self.run(replace(bound, options=_graph_options(-1)))  # allocates the outputs
        for name, value in self.values(bound.binding).items():
            bound.binding.bind_ortvalue_output(name, value)
        self._captured += 1
        return replace(bound, options=_graph_options(self._captured))

    def drop_outputs(self, feed: BoundFeed) -> None:
        """Keep the outputs, whose addresses a captured CUDA graph writes to."""

    def run_once(self, batch: Mapping[str, Any]) -> Any:
        """Run the graph on a batch that is not run again, without a CUDA graph, and return what `run` returns."""
        # -1, because a run without a number would capture a graph, or replay that of another shape.
        return self.run(replace(super().prepare(batch), options=_graph_options(-1)))


@functools.cache
def _refusal(provider: str) -> str | None:
    """Return why no session starts on a provider; None if one does."""
    import onnx.parser
    import onnxruntime as ort

    # ONNX Runtime lists the providers that it was built with, and goes on without those whose libraries do not load.
    ort.set_default_logger_severity(4)  # fatal errors only: the reason is in the message
    try:
        providers = list(dict.fromkeys([provider, "CPUExecutionProvider"]))
        graph = onnx.parser.parse_model(_ONE_NODE).SerializeToString()
        session = ort.InferenceSession(graph, providers=providers, enable_fallback=0)
        if provider in session.get_providers():
            return None
        reason = f"its session fell back to {session.get_providers()[0]}"
    except Exception as error:  # ONNX Runtime has a class for each status, and no common one
        reason = first_line(error)
    finally:
        ort.set_default_logger_severity(2)
    return _missing_library(provider) or reason


def _missing_library(provider: str) -> str | None:
    """Return the loader's message about a missing library that a provider's own library needs; None if none is."""
    import onnxruntime as ort

    name = provider.removesuffix("ExecutionProvider").lower()
    for file in (Path(ort.__file__).parent / "capi").glob(f"*onnxruntime_providers_{name}.*"):
        try:
            ctypes.CDLL(str(file))
        except OSError as error:
            return str(error) if "No such file" in str(error) else None
    return None


def _graph_options(number: int) -> Any:
    """Return run options that capture (first run) or replay the CUDA graph of this number; -1 runs without one."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options
