"""Define the interface of a runtime, which is a model loaded to be run and timed, and load one by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from ...entry_points import RUNTIMES as KNOWN
from ...entry_points import Registry
from ...errors import RecipeError, RequestError
from ...tasks.task import Task, stack

Provider = Literal["cpu", "cuda"]  # the execution provider that an ONNX graph is exported for

RUNTIMES: Registry[type[Runtime]] = KNOWN
"""Name -> runtime; `register_runtime` adds entries."""

# In half precision, matrix products are fast on NVIDIA's GPUs if rows are a multiple of 8 elements (16 bytes) long; not
# measured here. Source:
# https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html, table 1
GPU_HALF_STEP = 8


def register_runtime(name: str) -> Callable[[type[Runtime]], type[Runtime]]:
    """Return a decorator that registers a `Runtime` subclass under the name by which recipes select it.

    The class is built as `cls(source, threads=threads)`; its constructor raises if the device in its name is missing.
    """

    def register(cls: type[Runtime]) -> type[Runtime]:
        cls.name = name
        RUNTIMES[name] = cls
        return cls

    return register


class Runtime(ABC):
    """A loaded model that can be run any number of times on a prepared batch."""

    name: ClassVar[str]  # as it is registered
    reads_models: ClassVar[bool] = False  # whether the source is a `PreTrainedModel`; otherwise a file or folder
    format: ClassVar[str] = "onnx"  # of that file or folder, in `FORMATS`
    fused_for: ClassVar[Provider] = "cpu"  # for ONNX sources, the provider to export for, as in `export_onnx`
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16")  # that it can run a model in
    # Dtypes in which its constructor lets it compute a float32 graph. For others, graphs are exported in them.
    hints: ClassVar[tuple[str, ...]] = ()
    # Dtypes in which it computes only graphs that are calibrated on rows -> the format of such a graph.
    calibrated: ClassVar[Mapping[str, str]] = {}
    bits: ClassVar[tuple[str, ...]] = ("float32",)  # dtypes that `deploy` tries, see `find_ways`
    loads: ClassVar[int] = 1  # how often a comparison loads the models; more than 1 if copies of one differ in time
    compiles_shapes: ClassVar[bool] = True  # whether the first run at a shape may take longer than later ones
    threads: int  # CPU threads within an operator
    cuda_graph: bool = False  # whether a run replays a captured CUDA graph
    decodes: bool = False  # whether the model decodes from a key/value cache, which `prepare_step` needs

    @classmethod
    def require(cls) -> None:
        """Raise MissingRuntimeError, which says what to install, if this machine lacks a package or device it needs."""
        return

    @classmethod
    def formats(cls) -> tuple[str, ...]:
        """Return the formats of the exports that the runtime reads; none if it reads models."""
        return () if cls.reads_models else (cls.format, *cls.calibrated.values())

    @property
    @abstractmethod
    def provider(self) -> str:
        """The device or execution provider in use, read from the loaded model, not from the request."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Name of the torch dtype that the model computes in, read from the loaded model."""

    @abstractmethod
    def prepare(self, batch: Mapping[str, Any]) -> Any:
        """Return a batch as `run` takes it: on the model's device, without keys that are no inputs, such as labels.

        Tensors are (batch, sequence) or (batch, channels, height, width), by input name.
        """

    def prepare_step(self, batch: Mapping[str, Any]) -> Any:
        """Fill a cache with all tokens of a batch but the last, and return the step of the last one as `run` takes it.

        Tensors are (batch, sequence), of two tokens or more; the step can be run any number of times.
        """
        raise NotImplementedError

    @abstractmethod
    def run(self, feed: Any) -> Any:
        """Run the model once, and return its outputs when they are computed."""

    def time_ns(self, feed: Any) -> int:
        """Run the model once, and return its time in nanoseconds."""
        start = perf_counter_ns()
        self.run(feed)
        return perf_counter_ns() - start

    @abstractmethod
    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Copy the result of `run` to arrays on the host, by output name; not part of the timed run."""

    def drop_outputs(self, feed: Any) -> None:
        """Free the outputs that the last run left in its feed, if the runtime keeps them there."""
        return

    def run_once(self, batch: Mapping[str, Any]) -> Any:
        """Prepare and run a batch that is not run again, and return what `run` returns."""
        return self.run(self.prepare(batch))

    def compute(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run the model once on a batch, and return its outputs as `fetch` does."""
        return self.fetch(self.run_once(batch))

    def prediction(self, batch: Mapping[str, Any], names: Sequence[str] = ("logits",)) -> torch.Tensor:
        """Return the outputs of these names for a batch, stacked as `Task.output` stacks them."""
        outputs = self.compute(batch)
        return torch.as_tensor(stack([outputs[name] for name in names]))


def split_last_token(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into a prompt, (batch, sequence - 1), and a decode step, (batch, 1), whose mask is of all tokens.

    Inputs without one value per token, such as images, stay in the prompt alone.
    """
    ids = batch["input_ids"]
    batch = {"attention_mask": torch.ones_like(ids), **batch}
    per_token = {name for name, value in batch.items() if getattr(value, "shape", ()) == ids.shape}
    prompt = {name: value[:, :-1] if name in per_token else value for name, value in batch.items()}
    step = {name: batch[name][:, -1:] for name in per_token}
    step["attention_mask"] = batch["attention_mask"]  # the cached tokens are attended to as well
    return prompt, step


def check_runtime(name: str, *, task: type[Task] | None = None) -> None:
    """Refuse, before anything is loaded, a runtime that is not registered, not installed, or not for a given task.

    Raises MissingRuntimeError, which says what to install, if it is not installed, else RequestError.
    """
    RUNTIMES.check(name, what="a runtime")
    RUNTIMES[name].require()
    if task is not None and not runs_task(name, task):
        raise RecipeError([f"runtime {name} runs decoders (text-generation), got task: {task.name}; leave it out"])


def runs_task(name: str, task: type[Task]) -> bool:
    """Return whether a runtime runs models of a task; those that read GGUF only run models that generate text."""
    return RUNTIMES[name].format != "gguf" or task.decodes_text


def check_one_graph(names: Sequence[str], task: type[Task]) -> None:
    """Refuse, by a RequestError, runtimes of exports for a task whose models are not exported as one graph."""
    exported = [name for name in names if not RUNTIMES[name].reads_models]
    if exported and task.in_parts:
        raise RequestError(
            f"a model of {task.name} is not exported as one graph, so it can be timed on torch only, got "
            f"{', '.join(exported)}; set the runtime to torch"
        )


def check_dtypes(dtypes: Sequence[str], runtimes: Sequence[str]) -> None:
    """Refuse, by a RequestError, a dtype that none of the runtimes can run a model in."""
    known = list(dict.fromkeys(dtype for runtime in runtimes for dtype in RUNTIMES[runtime].dtypes))
    for dtype in dtypes:
        if dtype not in known:
            raise RequestError(f"a dtype must be one of {', '.join(known)} on {', '.join(runtimes)}, got {dtype!r}")


def load_runtime(
    name: str, source: PreTrainedModel | str | Path, *, threads: int | None = None, dtype: str | None = None
) -> Runtime:
    """Load a model into a runtime.

    Args:
        name: A registered runtime, such as `torch` or `onnxruntime-cpu`.
        source: A `PreTrainedModel` for `torch` and `torch-compile`; an ONNX file, or a folder with `model.onnx`, for
            ONNX Runtime and OpenVINO; a GGUF file, or a folder with `model.gguf`, for `llamacpp`.
        threads: CPU threads within an operator; by default torch's number, so that runtimes are comparable.
        dtype: Dtype to compute a float32 graph in, for runtimes that can (`Runtime.hints`); else the source decides.

    Returns:
        The loaded model, with `.prepare(batch)`, `.run(prepared)` and `.fetch(result)`.

    Raises:
        RecipeError: The name is not registered, the source is of the wrong kind, or threads < 1.
        MissingRuntimeError: The runtime or its execution provider is not installed.

    Examples:
        >>> runtime = load_runtime("torch", slim)
        >>> runtime.fetch(runtime.run(runtime.prepare(batches[0])))["logits"].shape
        (4, 3)
    """
    check_runtime(name)
    if threads is not None and threads < 1:
        raise RecipeError([f"threads must be at least 1, got {threads}"])
    factory: Callable[..., Runtime] = RUNTIMES[name]
    options: dict[str, Any] = {"threads": torch.get_num_threads() if threads is None else threads}
    if dtype in RUNTIMES[name].hints:
        options["dtype"] = dtype
    return factory(source, **options)
