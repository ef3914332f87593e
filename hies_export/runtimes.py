"""Runtimes a model can be run and timed in, behind one interface."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from .errors import DataError, MissingRuntimeError, RecipeError, did_you_mean
from .twin import forward_inputs, share_weights

ONNX_FILE = "model.onnx"

RUNTIMES: dict[str, type[Runtime]] = {}


def register_runtime(name: str) -> Callable[[type[Runtime]], type[Runtime]]:
    """Make a `Runtime` subclass available to recipes under `name`.

    The class is built as `cls(source, threads=threads)` and must refuse, in its constructor, to run
    on anything but what its name says:

        @register_runtime("openvino-cpu")
        class OpenVinoRuntime(Runtime): ...
    """

    def register(cls: type[Runtime]) -> type[Runtime]:
        cls.name = name
        RUNTIMES[name] = cls
        return cls

    return register


class Runtime(ABC):
    """A loaded model that can be run again and again on the same prepared batch.

    Attributes:
        name: The name it is registered under.
        threads: CPU threads one run uses within an operator.
    """

    name: ClassVar[str]
    threads: int

    @property
    @abstractmethod
    def provider(self) -> str:
        """Where it really runs, asked of the runtime itself and not of the request."""

    @abstractmethod
    def prepare(self, batch: Mapping[str, Any]) -> Any:
        """Move a batch to where the model reads it; labels and keys the model does not take are left out.

        Args:
            batch: Tensors by input name, each of shape (batch, ...).

        Returns:
            A feed, meaningful to this runtime's `run` only.
        """

    @abstractmethod
    def run(self, feed: Any) -> Any:
        """Run the model once and return when its outputs are computed. This is the call that is timed."""

    @abstractmethod
    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Copy what `run` returned to host arrays by output name; outside the timed call."""


def check_runtime(name: str) -> None:
    """Refuse, before anything is loaded, a runtime that is not registered.

    Raises:
        RecipeError: The name is not registered; the message names the nearest one.
    """
    if name not in RUNTIMES:
        hint = did_you_mean(name, RUNTIMES, cutoff=0.3)
        raise RecipeError([f"runtime must be one of {', '.join(sorted(RUNTIMES))}, got {name!r}{hint}"])


def load_runtime(name: str, source: PreTrainedModel | str | Path, *, threads: int | None = None) -> Runtime:
    """Load a model into a runtime.

    Args:
        name: A registered runtime, such as `torch` or `onnxruntime-cpu`.
        source: A `PreTrainedModel` for `torch`; an ONNX file, or a folder with `model.onnx`, for
            ONNX Runtime.
        threads: CPU threads within an operator; by default torch's own number, so that runtimes compare.

    Raises:
        RecipeError: The name is not registered, the source is not what this runtime reads, or threads < 1.
        MissingRuntimeError: The runtime, or the provider it was asked for, is not installed.
    """
    check_runtime(name)
    if threads is not None and threads < 1:
        raise RecipeError([f"threads must be at least 1, got {threads}"])
    factory: Callable[..., Runtime] = RUNTIMES[name]
    return factory(source, threads=torch.get_num_threads() if threads is None else threads)


@register_runtime("torch")
class TorchRuntime(Runtime):
    """The model as it is, in evaluation mode, without gradients, on the device it is on."""

    def __init__(self, source: PreTrainedModel, *, threads: int):
        if not isinstance(source, PreTrainedModel):
            raise RecipeError([f"runtime 'torch' needs a PreTrainedModel, got {type(source).__name__}"])
        self.threads = threads
        self._model = share_weights(source).eval()

    @property
    def provider(self) -> str:
        """`cpu`, or `cuda:` and the name of the GPU."""
        device = self._model.device
        return f"cuda:{torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Tensors on the model's device, floating ones in its dtype."""
        return {
            name: tensor.to(self._model.device, self._model.dtype if tensor.is_floating_point() else None)
            for name, tensor in forward_inputs(self._model, batch).items()
        }

    def run(self, feed: dict[str, torch.Tensor]) -> Any:
        """One forward pass."""
        with torch_threads(self.threads), torch.inference_mode():
            output = self._model(**feed)
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
        return output

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Float32 arrays of the outputs that are tensors."""
        tensors = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
        return {name: value.detach().float().cpu().numpy() for name, value in tensors.items()}


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Pin torch's thread count, which is process-wide, inside the block."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def require_onnxruntime(extra: str = "cpu") -> Any:
    """Import ONNX Runtime.

    Raises:
        MissingRuntimeError: It is not installed. One that is installed but broken raises its own error.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingRuntimeError(
            f'ONNX Runtime must be installed, and is not; install it with: pip install "hies-export[{extra}]"'
        )
    import onnxruntime

    return onnxruntime


@dataclass(frozen=True)
class _BoundFeed:
    """An IO binding and the input values it points to, which must outlive it."""

    binding: Any
    values: tuple[Any, ...]


@register_runtime("onnxruntime-cpu")
class OnnxRuntime(Runtime):
    """An ONNX file in ONNX Runtime on the CPU, its inputs bound once."""

    requested: ClassVar[str] = "CPUExecutionProvider"
    extra: ClassVar[str] = "cpu"

    def __init__(self, source: str | Path, *, threads: int):
        ort = require_onnxruntime(self.extra)
        file = _onnx_file(source, self.name)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Two sessions alive in one process take each other's cores when their idle threads spin.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.threads = threads
        available = ort.get_available_providers()
        wanted = [self.requested] if self.requested in available else available[-1:]
        self._session: Any = ort.InferenceSession(str(file), options, providers=wanted)
        if self.provider != self.requested:
            raise MissingRuntimeError(
                f"runtime {self.name!r} must run on {self.requested}, and this ONNX Runtime offers "
                f'{", ".join(available)}; install it with: pip install "hies-export[{self.extra}]"'
            )

    @property
    def provider(self) -> str:
        """The first execution provider of the session."""
        return str(self._session.get_providers()[0])

    def prepare(self, batch: Mapping[str, Any]) -> _BoundFeed:
        """Bind the inputs; `attention_mask` and `token_type_ids` default to what torch takes without them."""
        import onnxruntime as ort

        binding: Any = self._session.io_binding()
        values: list[Any] = []
        for node in self._session.get_inputs():
            array: np.ndarray = np.ascontiguousarray(_input_array(node.name, batch), dtype=_NUMPY_TYPES[node.type])
            values.append(ort.OrtValue.ortvalue_from_numpy(array))
            binding.bind_ortvalue_input(node.name, values[-1])
        for node in self._session.get_outputs():
            binding.bind_output(node.name)
        return _BoundFeed(binding, tuple(values))

    def run(self, feed: _BoundFeed) -> Any:
        """One run over the bound inputs."""
        self._session.run_with_iobinding(feed.binding)
        return feed.binding

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Float32 arrays by output name."""
        names = [node.name for node in self._session.get_outputs()]
        arrays = result.copy_outputs_to_cpu()
        return {name: np.asarray(array, dtype=np.float32) for name, array in zip(names, arrays, strict=True)}


_NUMPY_TYPES = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}


def _onnx_file(source: str | Path, name: str) -> Path:
    """The ONNX file a source names."""
    if not isinstance(source, (str, Path)):
        raise RecipeError([f"runtime {name!r} needs an ONNX file or folder, got {type(source).__name__}"])
    file = Path(source) / ONNX_FILE if Path(source).is_dir() else Path(source)
    if not file.is_file():
        raise RecipeError([f"runtime {name!r} needs an ONNX file; {file} does not exist: export the model first"])
    return file


def _input_array(name: str, batch: Mapping[str, Any]) -> np.ndarray:
    """One input of the graph as a host array."""
    value = batch.get(name)
    if value is None and "input_ids" in batch and name in ("attention_mask", "token_type_ids"):
        ids = torch.as_tensor(batch["input_ids"])
        value = torch.ones_like(ids) if name == "attention_mask" else torch.zeros_like(ids)
    if value is None:
        raise DataError(f"the graph's input {name!r} must be in the batch, which has {', '.join(sorted(batch))}")
    tensor = torch.as_tensor(value).detach().cpu()
    return np.asarray(tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy())
