"""Run ONNX graphs in ONNX Runtime on an NVIDIA GPU, with inputs and outputs on the GPU and runs as CUDA graphs.

Runs are timed with the host's clock. That is valid because ONNX Runtime synchronises at the end of every run. CUDA
events of torch would not see its work, which is on a stream of its own.

Sources: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html and
https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...checkpoint.folders import user_cache
from ...errors import ExportError, first_line
from .base import GPU_WIDTH_STEP, Provider, register_runtime
from .ort import BoundFeed, OnnxRuntime

logger = logging.getLogger(__name__)


@register_runtime("onnxruntime-cuda")
class CudaOnnxRuntime(OnnxRuntime):
    """An ONNX file in ONNX Runtime on the first GPU, captured as a CUDA graph if possible.

    It is not possible with control flow, or with an operator without CUDA kernel that does more than compute shapes.
    """

    requested: ClassVar[str] = "CUDAExecutionProvider"
    device: ClassVar[str] = "cuda"
    extra: ClassVar[str] = "gpu"
    # Loading is slow (it captures a graph or builds an engine), and copies are not known to differ in time on a GPU.
    loads: ClassVar[int] = 1
    fused_for: ClassVar[Provider] = "cuda"
    width_step: ClassVar[int] = GPU_WIDTH_STEP

    def __init__(self, source: str | Path, *, threads: int):
        self._memory_bytes, self._captured = 0, 0
        before = _free_bytes()
        super().__init__(source, threads=threads)
        self._memory_bytes += before - _free_bytes()
        placed = {subgraph.ep_name for subgraph in self._session.get_provider_graph_assignment_info()}
        if self.requested not in placed:
            raise self._missing(f"every operator fell back to {' and '.join(sorted(placed))}")

    def _open(self, file: Path) -> Any:
        self.cuda_graph = True
        try:
            return self._open_with(file, cuda_graph=True)
        except Exception as error:  # ONNX Runtime has a class for each status, and no common one
            self._give_up(error)
            return self._open_with(file, cuda_graph=False)

    def _give_up(self, error: Exception) -> None:
        self.cuda_graph = False
        logger.warning("%s times %s without a CUDA graph: %s", self.name, self._file.name, first_line(error))

    def _open_with(self, file: Path, *, cuda_graph: bool) -> Any:
        providers = [*self._providers(file, cuda_graph=cuda_graph), "CPUExecutionProvider"]
        return self._session_on(file, providers, record_ep_graph_assignment_info="1")

    def _providers(self, file: Path, *, cuda_graph: bool) -> list[Any]:
        # Grow the arena by the requested size, not by powers of two, so that measured memory is the memory needed.
        options = {"arena_extend_strategy": "kSameAsRequested", "enable_cuda_graph": str(int(cuda_graph))}
        return [("CUDAExecutionProvider", options)]

    def prepare(self, batch: Mapping[str, Any]) -> BoundFeed:
        """Bind the inputs, run once to fix the outputs' addresses, and once more to capture the CUDA graph."""
        before = _free_bytes()
        feed = self._settled(batch)
        if self.cuda_graph:
            try:
                self.run(feed)
            except ExportError as error:
                self._give_up(error)
                self._session = self._open_with(self._file, cuda_graph=False)
                feed = self._settled(batch)
        self._memory_bytes += before - _free_bytes()
        return feed

    def _settled(self, batch: Mapping[str, Any]) -> BoundFeed:
        """Bind inputs and outputs to fixed memory, and assign the number of the CUDA graph to capture and replay."""
        bound = super().prepare(batch)
        self.run(replace(bound, options=_graph_number(-1)))
        for name, value in self.values(bound.binding).items():
            bound.binding.bind_ortvalue_output(name, value)
        self._captured += 1
        return replace(bound, options=_graph_number(self._captured))

    def _past(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        before = _free_bytes()
        past = super()._past(prompt)
        self._memory_bytes += before - _free_bytes()
        return past

    def peak_memory_bytes(self, feed: BoundFeed) -> int | None:
        """Return the device bytes that the session holds: weights, and memory of its largest run so far."""
        return self._memory_bytes if torch.cuda.is_available() else None


@register_runtime("onnxruntime-tensorrt")
class TensorRtOnnxRuntime(CudaOnnxRuntime):
    """An ONNX file in TensorRT. An engine for a new graph and shape takes minutes to build, and is cached on disk.

    Export with provider "tensorrt": TensorRT does not run ONNX Runtime's own operators, which would fall to CUDA.
    """

    requested: ClassVar[str] = "TensorrtExecutionProvider"
    fused_for: ClassVar[Provider] = "tensorrt"

    def _providers(self, file: Path, *, cuda_graph: bool) -> list[Any]:
        # TensorRT identifies cached engines by graph, not by weights, so each file needs a folder of its own.
        folder = user_cache("tensorrt") / _digest(file)
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(folder),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(folder.parent),
            "trt_cuda_graph_enable": str(int(cuda_graph)),
            # Half precision only for a graph in float16: with this option TensorRT would use it for float32 too.
            "trt_fp16_enable": str(int(_is_half(file))),
        }
        return [("TensorrtExecutionProvider", options), *super()._providers(file, cuda_graph=False)]


def _graph_number(number: int) -> Any:
    """Return run options that capture (first run) or replay the CUDA graph of this number; -1 runs without one."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


def _free_bytes() -> int:
    """Return the free device memory in bytes, counting all processes; 0 without a GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _digest(file: Path) -> str:
    """Return a hash of a graph and of the weights beside it, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in sorted(file.parent.glob(f"{file.name}*")):
        with part.open("rb") as opened:
            while chunk := opened.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def _is_half(file: Path) -> bool:
    import onnx

    graph = onnx.load(str(file), load_external_data=False).graph
    return graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
