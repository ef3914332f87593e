"""Check the names of runtimes, and load a model into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...errors import RecipeError, RequestError, did_you_mean
from ...tasks import Task
from .base import RUNTIMES, Runtime


def check_runtime(name: str, *, task: type[Task] | None = None) -> None:
    """Refuse, before anything is loaded, a runtime that is not registered, not installed, or not for the task.

    Raises RecipeError, which suggests the closest name, or MissingRuntimeError, which says what to install.
    """
    if name not in RUNTIMES:
        hint = did_you_mean(name, RUNTIMES, cutoff=0.3)
        raise RecipeError([f"runtime must be one of {', '.join(sorted(RUNTIMES))}, got {name!r}{hint}"])
    RUNTIMES[name].require()
    if task is not None:
        check_task(name, task)


def check_task(name: str, task: type[Task]) -> None:
    """Refuse, by a RecipeError, a runtime of decoders (GGUF) for a task other than generating text."""
    if RUNTIMES[name].format == "gguf" and not task.decodes_text:
        raise RecipeError([f"runtime {name} runs decoders (text-generation), got task: {task.name}; leave it out"])


def check_one_graph(names: Sequence[str], task: type[Task]) -> None:
    """Refuse, by a RequestError, runtimes of exports for a task whose models are exported in parts, if at all."""
    exported = [name for name in names if not RUNTIMES[name].reads_models] if task.in_parts else []
    if exported:
        raise RequestError(
            f"a model of {task.name} is not exported as one graph, so it can be timed on torch only, got "
            f"{', '.join(exported)}; set the runtime to torch"
        )


def check_dtypes(dtypes: Sequence[str], runtimes: Sequence[str]) -> None:
    """Refuse, by a RequestError, dtypes that none of the runtimes can run a model in."""
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
        dtype: Dtype to compute in, if the runtime can compute a float32 graph in it (`Runtime.hints`); otherwise the
            source decides.

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
    hint = {"dtype": dtype} if dtype in RUNTIMES[name].hints else {}
    return factory(source, threads=torch.get_num_threads() if threads is None else threads, **hint)
