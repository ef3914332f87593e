"""Run models in torch, eagerly or compiled."""

from __future__ import annotations

import copy
import inspect
import os
import shutil
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from ...errors import ExportError, MissingRuntimeError, RecipeError
from ...model import internals
from ...model.copies import refuse_devices, share_weights
from ...model.modes import torch_threads
from ...model.tokens import forward_inputs, positions_of
from .base import Runtime, register_runtime, split_last_token

MOST_COMPILED = 100_000  # shapes of models that are compiled in a process; more than anybody times
# Shapes for which a model is compiled one by one, which takes seconds each; further ones share a program.
MOST_SHAPES = 16


@register_runtime("torch")
class TorchRuntime(Runtime):
    """A model in evaluation mode, without gradients, on its own device.

    A decoder runs a prompt as its ONNX graph does: it returns its cache, and positions follow the attention mask. On a
    GPU it is timed with CUDA events, which exclude delays of the host.
    """

    reads_models: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    bits: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: PreTrainedModel, *, threads: int):
        if not isinstance(source, PreTrainedModel):
            raise RecipeError(f"runtime {self.name!r} needs a PreTrainedModel, got {type(source).__name__}")
        refuse_devices(source)
        self.threads = threads
        self._model = share_weights(source).eval()
        self._forward: Any = self._model
        self._on_cuda = self._model.device.type == "cuda"
        self._takes_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        self._cache_name = internals.cache_name(self._model)
        self.decodes = self._model.can_generate() and self._cache_name is not None
        internals.ask_for_output_alone(internals.configs_of(self._model), cache=self.decodes)

    @property
    def provider(self) -> str:
        """`cpu`, or `cuda:` and the name of the GPU."""
        device = self._model.device
        return f"cuda:{torch.cuda.get_device_name(device)}" if self._on_cuda else device.type

    @property
    def dtype(self) -> str:
        """The dtype of the parameters."""
        return str(self._model.dtype).removeprefix("torch.")

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch's inputs on the model's device, floating ones in its dtype, with positions for a decoder."""
        inputs = forward_inputs(self._model, batch)
        if self.decodes and "input_ids" in inputs and self._takes_positions:
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            inputs.setdefault("position_ids", positions_of(mask)[:, -inputs["input_ids"].shape[1] :])
        return {
            name: tensor.to(self._model.device, self._model.dtype if tensor.is_floating_point() else None)
            for name, tensor in inputs.items()
        }

    def prepare_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the cache with all tokens but the last, and prepare the last; an ExportError if no cache is returned."""
        prompt, step = split_last_token(batch)
        # Not with the compiled model: a CUDA graph overwrites its earlier outputs when it runs again.
        with torch.inference_mode():
            model: Any = self._model
            past = internals.cache_of(model(**self.prepare(prompt)))
        if not getattr(past, "layers", ()):
            raise ExportError(f"a decoder must return its cache to be timed, and {type(self._model).__name__} has none")
        return {**self.prepare(step), str(self._cache_name): past}

    def run(self, feed: dict[str, Any]) -> Any:
        """Run one forward pass, on a GPU to its end, and return the model's output."""
        inputs = _with_own_cache(feed)
        with torch_threads(self.threads), torch.inference_mode():
            output = self._forward(**inputs)
            if self._on_cuda:
                torch.cuda.synchronize(self._model.device)
        return output

    def time_ns(self, feed: dict[str, Any]) -> int:
        """Run one forward pass, and return its time in nanoseconds, measured with CUDA events on a GPU."""
        inputs = _with_own_cache(feed)
        with torch_threads(self.threads), torch.inference_mode():
            if not self._on_cuda:
                start_ns = perf_counter_ns()
                self._forward(**inputs)
                return perf_counter_ns() - start_ns
            with torch.cuda.device(self._model.device):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                start.record()
                self._forward(**inputs)
                end.record()
                end.synchronize()
                return round(start.elapsed_time(end) * 1e6)

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Return float32 arrays by output name; a decoder's cache is `present.{layer}.key` and `.value`."""
        tensors = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
        for index, (keys, values) in internals.keys_and_values(result).items():
            tensors |= {f"present.{index}.key": keys, f"present.{index}.value": values}
        return {name: value.detach().float().cpu().numpy() for name, value in tensors.items()}


@register_runtime("torch-compile")
class CompiledTorchRuntime(TorchRuntime):
    """A model compiled for each shape that it runs on; the first run compiles, and belongs to the warm-up.

    On a GPU it is compiled to CUDA graphs (mode "reduce-overhead"), unless torch gives that up for this model;
    `cuda_graph` says so after the first run. Batches that are run once, and those of any shape after the first 16,
    share a program for all shapes, without a CUDA graph. torch's limit on compiled shapes is raised process-wide.
    """

    bits: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def __init__(self, source: PreTrainedModel, *, threads: int):
        super().__init__(source, threads=threads)
        compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
        if not self._on_cuda and not any(name and shutil.which(name) for name in compilers):
            raise MissingRuntimeError(
                f"runtime {self.name!r} needs a C++ compiler on the CPU, and found none; install one (such as g++), or "
                "use runtime 'torch'"
            )
        self.cuda_graph = self._on_cuda
        # By default torch compiles eight shapes of all models of a class together, and runs the next ones uncompiled.
        internals.compile_many_shapes(MOST_COMPILED)
        mode = "reduce-overhead" if self.cuda_graph else None
        self._for_one_shape = torch.compile(self._model, dynamic=False, mode=mode)
        self._for_any_shape = torch.compile(self._model, dynamic=True)
        self._shapes: set[Any] = set()
        self._forward = self._run_compiled

    def _run_compiled(self, **inputs: Any) -> Any:
        """Run the program of the inputs' shape; further shapes than the first `MOST_SHAPES` share one."""
        shape = frozenset((name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        if len(self._shapes) < MOST_SHAPES:
            self._shapes.add(shape)
        with internals.refused_compilations(f"runtime {self.name!r}"):
            return self._for_one_shape(**inputs) if shape in self._shapes else self._for_any_shape(**inputs)

    def run_once(self, batch: Mapping[str, Any]) -> Any:
        """Run a batch that is not run again by the program for all shapes, and return the model's output."""
        inputs = self.prepare(batch)
        refusing = internals.refused_compilations(f"runtime {self.name!r}")
        with torch_threads(self.threads), torch.inference_mode(), refusing:
            return self._for_any_shape(**inputs)

    def run(self, feed: dict[str, Any]) -> Any:
        """Run one forward pass, and note whether torch captured it as a CUDA graph."""
        if not self._on_cuda:
            return super().run(feed)
        skipped = internals.graphs_skipped()
        output = super().run(feed)
        self.cuda_graph = self.cuda_graph and internals.graphs_skipped() == skipped
        return output


def _with_own_cache(feed: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with a copy of the cache object, because a run extends it; its tensors are shared."""
    inputs = dict(feed)
    for name, past in feed.items():
        if hasattr(past, "layers"):
            inputs[name] = copy.copy(past)
            inputs[name].layers = [copy.copy(layer) for layer in past.layers]
    return inputs
