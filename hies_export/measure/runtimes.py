"""Runtimes a model can be run and timed in, behind one interface."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from ..errors import DataError, ExportError, MissingRuntimeError, RecipeError, did_you_mean
from ..model.twin import forward_inputs, positions_of, share_weights
from ..quiet import quiet

ONNX_FILE = "model.onnx"
# The parts of a vision-language model, as onnx-community and transformers.js call them.
VISION_FILE, EMBED_FILE, DECODER_FILE = "vision_encoder.onnx", "embed_tokens.onnx", "decoder_model_merged.onnx"
# Metadata of a decoder's graph: {cache input: [key/value heads, head width]}, as JSON.
CACHE_SIZES = "hies_export.cache_sizes"

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
        reads_models: Whether it runs a `PreTrainedModel`; otherwise an ONNX file or folder.
        threads: CPU threads one run uses within an operator.
    """

    name: ClassVar[str]
    reads_models: ClassVar[bool] = False
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
        source: A `PreTrainedModel` for `torch` and `torch-compile`; an ONNX file, or a folder with `model.onnx`, for
            ONNX Runtime.
        threads: CPU threads within an operator; by default torch's own number, so that runtimes compare.

    Returns:
        The loaded model; `.prepare(batch)`, `.run(prepared)` and `.fetch(result)` are what is done with it.

    Raises:
        RecipeError: The name is not registered, the source is not what this runtime reads, or threads < 1.
        MissingRuntimeError: The runtime, or the provider it was asked for, is not installed.

    Examples:
        >>> runtime = load_runtime("torch", slim)
        >>> runtime.fetch(runtime.run(runtime.prepare(batches[0])))["logits"].shape
        (4, 3)
    """
    check_runtime(name)
    if threads is not None and threads < 1:
        raise RecipeError([f"threads must be at least 1, got {threads}"])
    factory: Callable[..., Runtime] = RUNTIMES[name]
    return factory(source, threads=torch.get_num_threads() if threads is None else threads)


@register_runtime("torch")
class TorchRuntime(Runtime):
    """The model as it is, in evaluation mode, without gradients, on the device it is on.

    A decoder prefills as its ONNX graph does: it returns its cache, and positions follow the attention mask.
    """

    reads_models: ClassVar[bool] = True

    def __init__(self, source: PreTrainedModel, *, threads: int):
        if not isinstance(source, PreTrainedModel):
            raise RecipeError([f"runtime {self.name!r} needs a PreTrainedModel, got {type(source).__name__}"])
        self.threads = threads
        self._model = share_weights(source).eval()

    @property
    def provider(self) -> str:
        """`cpu`, or `cuda:` and the name of the GPU."""
        device = self._model.device
        return f"cuda:{torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors on the model's device, floating ones in its dtype."""
        inputs = forward_inputs(self._model, batch)
        decodes = self._model.can_generate() and not self._model.config.is_encoder_decoder
        if decodes and "input_ids" in inputs and "position_ids" in inspect.signature(self._model.forward).parameters:
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            inputs.setdefault("position_ids", positions_of(mask))
        feed: dict[str, Any] = {
            name: tensor.to(self._model.device, self._model.dtype if tensor.is_floating_point() else None)
            for name, tensor in inputs.items()
        }
        return {**feed, "use_cache": True} if decodes else feed

    def run(self, feed: dict[str, Any]) -> Any:
        """One forward pass."""
        with torch_threads(self.threads), torch.inference_mode():
            output = self._model(**feed)
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
        return output

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Float32 arrays of the outputs that are tensors, a decoder's cache as `present.{layer}.key` and `.value`."""
        tensors = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
        for index, layer in enumerate(getattr(result.get("past_key_values"), "layers", ())):
            tensors |= {f"present.{index}.key": layer.keys, f"present.{index}.value": layer.values}
        return {name: value.detach().float().cpu().numpy() for name, value in tensors.items()}


@register_runtime("torch-compile")
class CompiledTorchRuntime(TorchRuntime):
    """The same, compiled for every shape it is run on; the first run compiles, and belongs into the warm-up."""

    def __init__(self, source: PreTrainedModel, *, threads: int):
        super().__init__(source, threads=threads)
        compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
        if self._model.device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
            raise MissingRuntimeError(
                f"runtime {self.name!r} needs a C++ compiler on the CPU, and found none; install one (such as g++), or "
                "use runtime 'torch'"
            )
        self._compiled: Any = torch.compile(self._model, dynamic=False)

    def run(self, feed: dict[str, Any]) -> Any:
        """One forward pass."""
        with torch_threads(self.threads), torch.inference_mode():
            output = self._compiled(**feed)
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
        return output


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
    """An ONNX file in ONNX Runtime on the CPU, its inputs bound once.

    Attributes:
        inputs: Names of the graph's inputs.
        outputs: Names of the graph's outputs.
    """

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
        try:
            self._session = self._open(file, options, wanted)
        except Exception as error:  # ONNX Runtime has a class for each status, and no common one
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ExportError(f"ONNX Runtime must load {file.name}, and refused: {said}") from error
        if self.provider != self.requested:
            raise MissingRuntimeError(
                f"runtime {self.name!r} must run on {self.requested}, and this ONNX Runtime offers "
                f'{", ".join(available)}; install it with: pip install "hies-export[{self.extra}]"'
            )
        self.inputs = tuple(node.name for node in self._session.get_inputs())
        self.outputs = tuple(node.name for node in self._session.get_outputs())
        self._cache_sizes = _cache_sizes(self._session)

    def _open(self, file: Path, options: Any, providers: list[str]) -> Any:
        import onnxruntime as ort

        return ort.InferenceSession(str(file), options, providers=providers)

    @property
    def provider(self) -> str:
        """The first execution provider of the session."""
        return str(self._session.get_providers()[0])

    def prepare(self, batch: Mapping[str, Any]) -> _BoundFeed:
        """Bind the inputs; what torch does without is filled in: masks, token types, positions, an empty cache.

        Args:
            batch: Tensors by input name, or values of ONNX Runtime as `values` returns them.
        """
        import onnxruntime as ort

        binding: Any = self._session.io_binding()
        values: list[Any] = []
        for node in self._session.get_inputs():
            if isinstance(batch.get(node.name), ort.OrtValue):
                values.append(batch[node.name])
            else:
                given = _input_array(node.name, batch, self._cache_sizes)
                array: np.ndarray = np.ascontiguousarray(given, dtype=_NUMPY_TYPES[node.type])
                values.append(ort.OrtValue.ortvalue_from_numpy(array))
            binding.bind_ortvalue_input(node.name, values[-1])
        for name in self.outputs:
            binding.bind_output(name)
        return _BoundFeed(binding, tuple(values))

    def run(self, feed: _BoundFeed) -> Any:
        """One run over the bound inputs."""
        try:
            self._session.run_with_iobinding(feed.binding)
        except RuntimeError as error:
            said = " ".join(str(error).split())[:300]
            raise ExportError(f"ONNX Runtime must run the graph, and stopped: {said}; report the model") from error
        return feed.binding

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Float32 arrays by output name."""
        arrays = result.copy_outputs_to_cpu()
        return {name: np.asarray(array, dtype=np.float32) for name, array in zip(self.outputs, arrays, strict=True)}

    def values(self, result: Any) -> dict[str, Any]:
        """The outputs by name as ONNX Runtime's own values, not copied: `prepare` takes them as inputs again."""
        return dict(zip(self.outputs, result.get_outputs(), strict=True))


@register_runtime("onnxruntime-cpu-int8")
class QuantizedOnnxRuntime(OnnxRuntime):
    """The same with weights in int8 and activations quantised as they come, by ONNX Runtime's own quantiser.

    Only its time is of interest here: whether the quantised model still predicts well is not checked.
    """

    def _open(self, file: Path, options: Any, providers: list[str]) -> Any:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        # Under Linux and macOS an open session outlives its file, which ONNX Runtime has read by then.
        with tempfile.TemporaryDirectory(prefix="hies-int8-") as temporary, quiet():
            graph, quantised = onnx.load(str(file)), Path(temporary) / ONNX_FILE
            # Shapes noted before the graph was fused; the quantiser infers them again, and objects to old ones.
            del graph.graph.value_info[:]
            quantize_dynamic(
                graph,
                quantised,
                weight_type=QuantType.QInt8,
                use_external_data_format=True,
                # It cannot tell the type behind a fused operator.
                extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
            )
            return super()._open(quantised, options, providers)


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
    refuse_parts(source)
    file = Path(source) / ONNX_FILE if Path(source).is_dir() else Path(source)
    if not file.is_file():
        raise RecipeError([f"runtime {name!r} needs an ONNX file; {file} does not exist: export the model first"])
    return file


def refuse_parts(folder: str | Path) -> None:
    """Refuse the folder of a vision-language model, which is no single graph that could be timed.

    Raises:
        RecipeError: It is one.
    """
    if (Path(folder) / DECODER_FILE).is_file():
        raise RecipeError(
            [
                f"a model to time must be a single graph, and {folder} has the parts of a vision-language model: "
                "name one part's file"
            ]
        )


def _cache_sizes(session: Any) -> dict[str, tuple[int, int]]:
    """Key/value heads and head width of every cache input: from our metadata, else from the graph's own shapes."""
    written = session.get_modelmeta().custom_metadata_map.get(CACHE_SIZES)
    if written is not None:
        return {name: (heads, width) for name, (heads, width) in json.loads(written).items()}
    shapes = {node.name: node.shape for node in session.get_inputs() if node.name.startswith("past_key_values.")}
    return {
        name: (shape[1], shape[3])
        for name, shape in shapes.items()
        if len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int)
    }


def _input_array(name: str, batch: Mapping[str, Any], cache_sizes: Mapping[str, tuple[int, int]]) -> np.ndarray:
    """One input of the graph as a host array."""
    value = batch.get(name)
    tokens = next((batch[key] for key in ("input_ids", "inputs_embeds") if key in batch), None)
    if value is None and tokens is not None:
        rows, length = (tokens.shape if isinstance(tokens, torch.Tensor) else tokens.shape())[:2]
        mask = torch.as_tensor(batch.get("attention_mask", torch.ones(rows, length, dtype=torch.int64)))
        if name == "attention_mask":
            value = mask
        elif name == "token_type_ids":
            value = torch.zeros(rows, length)
        elif name == "position_ids":
            value = positions_of(mask)[:, -length:]
        elif name in cache_sizes:
            heads, width = cache_sizes[name]
            value = torch.zeros(rows, heads, 0, width)
    if value is None:
        raise DataError(f"the graph's input {name!r} must be in the batch, which has {', '.join(sorted(batch))}")
    tensor = torch.as_tensor(value).detach().cpu()
    return np.asarray(tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy())
