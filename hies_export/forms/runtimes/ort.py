"""Run ONNX graphs in ONNX Runtime on the CPU, as exported or quantised; `ort_gpu` subclasses this runtime."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import DataError, ExportError, MissingRuntimeError, RecipeError, first_line, require_package
from ...model.memory import LARGE_BYTES
from ...model.tokens import positions_of
from .base import Runtime, register_runtime, split_last_token
from .bits import INTEGER_OPERATORS, SMALLEST, quantize_graph

ONNX_FILE = "model.onnx"
WEIGHTS_SUFFIX = "_data"  # model.onnx_data is the only name under which older Optimum fetches weights from the Hub
QUANTIZED_FILE = "model_quantized.onnx"  # the name that Optimum gives a quantised graph
# The parts of a vision-language model, with the names that onnx-community and transformers.js use.
VISION_FILE, EMBED_FILE, DECODER_FILE = "vision_encoder.onnx", "embed_tokens.onnx", "decoder_model_merged.onnx"


def require_onnxruntime(extra: str = "cpu") -> Any:
    """Import and return ONNX Runtime; raise MissingRuntimeError, with the extra to install, if it is missing."""
    require_package("onnxruntime", who="an ONNX file needs", package="ONNX Runtime", extra=extra)
    import onnxruntime

    return onnxruntime


@dataclass(frozen=True)
class BoundFeed:
    """An IO binding, the input values that it points to (they must outlive it), and options of the run."""

    binding: Any
    values: tuple[Any, ...]
    options: Any = None  # `onnxruntime.RunOptions`, which `ort_gpu` needs for CUDA graphs


class GraphRuntime(Runtime):
    """The base class of runtimes of ONNX graphs; `inputs` and `outputs` are the names of the graph's tensors."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    _cache_sizes: dict[str, tuple[int, int]]  # as `cache_sizes` returns them

    def prepare_step(self, batch: Mapping[str, Any]) -> Any:
        """Run all tokens but the last to fill the cache, and prepare the last token with that cache."""
        prompt, step = split_last_token(batch)
        # On the host, as a replayed CUDA graph writes to memory that its session has given out again.
        past = self.compute(prompt)
        cache = {name: past[name.replace("past_key_values", "present", 1)] for name in self._cache_sizes}
        return self.prepare({**step, **cache})


@register_runtime("onnxruntime-cpu")
class OnnxRuntime(GraphRuntime):
    """An ONNX file in ONNX Runtime on the CPU, with inputs that are bound once."""

    requested: ClassVar[str] = "CPUExecutionProvider"  # the execution provider that it must run on
    device: ClassVar[str] = "cpu"  # ONNX Runtime's name for the device of inputs and outputs
    extra: ClassVar[str] = "cpu"  # the extra of this package that installs ONNX Runtime for the provider
    loads: ClassVar[int] = 5  # copies of a model differ in time because their weights have other memory addresses
    compiles_shapes: ClassVar[bool] = False

    def __init__(self, source: str | Path, *, threads: int):
        self.require()
        self._file = onnx_file(source, self.name)
        self.threads = threads
        try:
            self._session = self._open(self._file)
        except ExportError:  # a subclass refuses the file in its own words
            raise
        except Exception as error:  # ONNX Runtime has a class for each status, and no common one
            hint = "; a later ONNX Runtime may have it" if "NOT_IMPLEMENTED" in str(error) else ""
            message = f"ONNX Runtime must load {self._file.name}, and refused: {first_line(error)}{hint}"
            raise ExportError(message) from error
        if self.provider != self.requested:
            raise self._missing(f"its session fell back to {self.provider}")
        shapes = {node.name: node.shape for node in self._session.get_inputs()}
        self.inputs, self._cache_sizes = tuple(shapes), cache_sizes(shapes)
        self.outputs = tuple(node.name for node in self._session.get_outputs())
        self.decodes = any(name.startswith("past_key_values.") for name in self.inputs)

    @classmethod
    def require(cls) -> None:
        """Raise MissingRuntimeError if ONNX Runtime is not installed, or lacks the provider `requested`."""
        available = require_onnxruntime(cls.extra).get_available_providers()
        if cls.requested not in available:
            raise cls._missing(f"this ONNX Runtime offers {', '.join(available)}")

    @classmethod
    def _missing(cls, reason: str) -> MissingRuntimeError:
        """Return the error that says why the provider cannot be used, and what to install."""
        return MissingRuntimeError(
            f"runtime {cls.name!r} must run on {cls.requested}, and {reason}; install it with: "
            f'pip install "hies-export[{cls.extra}]"'
        )

    def _open(self, file: Path) -> Any:
        """Return a session of the file; subclasses open it on another provider, or a quantised copy of it."""
        return self._session_on(file, [self.requested])

    def _session_on(self, file: Path, providers: list[Any], **config: str) -> Any:
        """Return a session on execution providers, with entries of its config `session.KEY`."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Idle threads that spin would take cores from the other sessions of this process.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        weights = file.with_name(f"{file.name}{WEIGHTS_SUFFIX}")
        if weights.is_file() and weights.stat().st_size > LARGE_BYTES:
            _share_arena()
            options.add_session_config_entry("session.use_env_allocators", "1")
            options.enable_mem_pattern = False  # a pattern is one more block as large as all outputs
        for key, value in config.items():
            options.add_session_config_entry(f"session.{key}", value)
        # Otherwise a provider that fails is replaced by another one, with only a printed line.
        return ort.InferenceSession(str(file), options, providers=providers, enable_fallback=0)

    @property
    def provider(self) -> str:
        """The first execution provider of the session."""
        return str(self._session.get_providers()[0])

    @property
    def dtype(self) -> str:
        """The dtype of the graph's first output."""
        return _dtype_of(self._session.get_outputs()[0])

    def prepare(self, batch: Mapping[str, Any]) -> BoundFeed:
        """Return tensors or ONNX Runtime's values bound to the inputs; missing ones are made up by `input_array`."""
        import onnxruntime as ort

        binding: Any = self._session.io_binding()
        values: list[Any] = []
        for node in self._session.get_inputs():
            value = batch.get(node.name)
            if not isinstance(value, ort.OrtValue):
                array = input_array(node.name, batch, self._cache_sizes)
                array = np.ascontiguousarray(array, dtype=_dtype_of(node))
                value = ort.OrtValue.ortvalue_from_numpy(array, self.device, 0)
            binding.bind_ortvalue_input(node.name, value)
            values.append(value)
        self._bind_outputs(binding)
        return BoundFeed(binding, tuple(values))

    def _bind_outputs(self, binding: Any) -> None:
        """Let the next run make its outputs; free those that the binding holds."""
        binding.clear_binding_outputs()
        for name in self.outputs:
            binding.bind_output(name, self.device)

    def run(self, feed: BoundFeed) -> Any:
        """Run the graph, also on a GPU to its end, and return the binding, which holds the outputs."""
        try:
            self._session.run_with_iobinding(feed.binding, feed.options)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise ExportError(f"ONNX Runtime must run the graph, and stopped: {reason}; report the model") from error
        return feed.binding

    def drop_outputs(self, feed: BoundFeed) -> None:
        """Free the outputs of the last run, which are otherwise held until the next one."""
        self._bind_outputs(feed.binding)

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Return float32 arrays by output name."""
        arrays = result.copy_outputs_to_cpu()
        return {name: np.asarray(array, dtype=np.float32) for name, array in zip(self.outputs, arrays, strict=True)}

    def values(self, result: Any) -> dict[str, Any]:
        """Return the outputs by name as ONNX Runtime's own values, uncopied; `prepare` takes them as inputs."""
        return dict(zip(self.outputs, result.get_outputs(), strict=True))


@register_runtime("onnxruntime-cpu-int8")
class QuantizedOnnxRuntime(OnnxRuntime):
    """An ONNX file with linear layers in 8 bits; a file in float32 is quantised when it is loaded."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    bits: ClassVar[tuple[str, ...]] = ("int8",)

    def _open(self, file: Path) -> Any:
        """Return a session of the file, or if none of its layers is quantised, of a quantised copy."""
        import onnx_ir

        program = onnx_ir.load(file)
        if any(node.op_type in INTEGER_OPERATORS for node in program.graph):
            return super()._open(file)
        if not quantize_graph(program.graph)["int8"]:
            raise ExportError(
                f"runtime {self.name!r} needs a linear layer of {SMALLEST:,} weights or more in float32, and "
                f"{file.name} has none; use {OnnxRuntime.name}"
            )
        # On Linux and macOS the file may be deleted while the session is open: ONNX Runtime has read it by then.
        with tempfile.TemporaryDirectory(prefix="hies-int8-") as temporary:
            onnx_ir.save(program, Path(temporary) / QUANTIZED_FILE, external_data=f"{QUANTIZED_FILE}{WEIGHTS_SUFFIX}")
            return super()._open(Path(temporary) / QUANTIZED_FILE)


@functools.cache
def _share_arena() -> None:
    """Make an arena on the CPU for the sessions of large graphs, which grows by the requested size.

    Arenas of their own would each keep the largest outputs of a session, and grow by powers of two.
    """
    import onnxruntime as ort

    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": 1}))


def _dtype_of(node: Any) -> str:
    """Return the dtype of a session's input or output, as NumPy and torch name it."""
    name = str(node.type).removeprefix("tensor(").removesuffix(")")
    return "float32" if name == "float" else name


def onnx_file(source: str | Path, name: str) -> Path:
    """Return the ONNX file that a path names, itself or as its folder; a RecipeError if there is none, or several."""
    if not isinstance(source, (str, Path)):
        raise RecipeError(f"runtime {name!r} needs an ONNX file or folder, got {type(source).__name__}")
    refuse_parts(source)
    file = Path(source)
    if file.is_dir():
        only_quantised = (file / QUANTIZED_FILE).is_file() and not (file / ONNX_FILE).is_file()
        file /= QUANTIZED_FILE if only_quantised else ONNX_FILE
    if not file.is_file():
        raise RecipeError(f"runtime {name!r} needs an ONNX file; {file} does not exist: export the model first")
    return file


def refuse_parts(folder: str | Path) -> None:
    """Refuse, by a RecipeError, the folder of a vision-language model: only one of its three graphs can be timed."""
    if (Path(folder) / DECODER_FILE).is_file():
        raise RecipeError(
            f"a model to time must be a single graph, and {folder} has the parts of a vision-language model: "
            "name one part's file"
        )


def cache_sizes(shapes: Mapping[str, Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """Return name -> (key/value heads, head width) of every cache input, from the shapes of all inputs by name."""
    return {
        name: (shape[1], shape[3])
        for name, shape in shapes.items()
        if name.startswith("past_key_values.") and len(shape) == 4
        if isinstance(shape[1], int) and isinstance(shape[3], int)
    }


def input_array(name: str, batch: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]) -> np.ndarray:
    """Return a graph's input as an array on the host, bfloat16 as float32; `sizes` are those of `cache_sizes`.

    A missing mask, token types, positions or cache are made up; a DataError names any other input that is missing.
    """
    value = batch.get(name)
    tokens = next((batch[key] for key in ("input_ids", "inputs_embeds") if key in batch), None)
    if value is None and tokens is not None:
        rows, length = (tokens.shape if isinstance(tokens, torch.Tensor) else tokens.shape())[:2]  # or an OrtValue
        mask = torch.as_tensor(batch.get("attention_mask", torch.ones(rows, length, dtype=torch.int64)))
        if name == "attention_mask":
            value = mask
        elif name == "token_type_ids":
            value = torch.zeros(rows, length)
        elif name == "position_ids":
            value = positions_of(mask)[:, -length:]
        elif name in sizes:
            heads, width = sizes[name]
            value = torch.zeros(rows, heads, 0, width)
    if value is None:
        raise DataError(f"the graph's input {name!r} must be in the batch, which has {', '.join(sorted(batch))}")
    tensor = torch.as_tensor(value).detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
