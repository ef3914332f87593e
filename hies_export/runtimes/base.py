"""Define what a runtime is: a loaded model that can be run and timed, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, ClassVar, Literal

import numpy as np
import torch

# What an ONNX graph is exported for.
Provider = Literal["cpu", "cuda", "tensorrt"]

RUNTIMES: dict[str, type[Runtime]] = {}


def register_runtime(name: str) -> Callable[[type[Runtime]], type[Runtime]]:
    """Make a `Runtime` subclass available to recipes under `name`.

    The class is built as `cls(source, threads=threads)`. Its constructor refuses to run on anything but what the name
    says:

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
        reads_models: Whether it runs a `PreTrainedModel`; otherwise it reads an ONNX file or folder.
        fused_for: The provider, as in `export_onnx`, whose fused operators suit it; of those that read ONNX.
        dtypes: What it can run a model in, by their names in torch.
        loads: How many times a comparison loads the models; more than 1 where copies of one model differ in time.
        threads: CPU threads one run uses within an operator.
        cuda_graph: Whether what is timed is the replay of a captured CUDA graph.
    """

    name: ClassVar[str]
    reads_models: ClassVar[bool] = False
    fused_for: ClassVar[Provider] = "cpu"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16")
    loads: ClassVar[int] = 1
    threads: int
    cuda_graph: bool = False

    @classmethod
    def require(cls) -> None:
        """Check that this machine has what the runtime needs, before a model is loaded.

        Raises:
            MissingRuntimeError: Something is missing; the message names what to install.
        """
        return

    @property
    @abstractmethod
    def provider(self) -> str:
        """The device or execution provider it runs on, read from the loaded model and not from the request."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype the model computes in, read from the loaded model, by its name in torch."""

    @property
    def decodes(self) -> bool:
        """Whether the model can continue from a key/value cache, so that `prepare_step` works."""
        return False

    @abstractmethod
    def prepare(self, batch: Mapping[str, Any]) -> Any:
        """Move a batch to the model's device; labels and other keys the model does not take are left out.

        Args:
            batch: Tensors by input name, of shape (batch, sequence) or (batch, channels, height, width).

        Returns:
            The argument of this runtime's `run`.
        """

    def prepare_step(self, batch: Mapping[str, Any]) -> Any:
        """Run all tokens but the last, and prepare the step that takes the last one, with the others in the cache.

        Args:
            batch: As for `prepare`, with a sequence of 2 or more.

        Returns:
            The argument of this runtime's `run`; every run takes the same step.
        """
        raise NotImplementedError

    @abstractmethod
    def run(self, feed: Any) -> Any:
        """Run the model once and return when its outputs are computed."""

    def time_ns(self, feed: Any) -> int:
        """Run the model once and return how long that took, in nanoseconds."""
        start = perf_counter_ns()
        self.run(feed)
        return perf_counter_ns() - start

    @abstractmethod
    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Copy what `run` returned to host arrays by output name; outside the timed call."""

    def peak_memory_bytes(self, feed: Any) -> int | None:
        """Return the device memory that the model takes at the peak of a run, weights included; None on the CPU.

        Args:
            feed: From `prepare` or `prepare_step`; it has been run before.
        """
        return None


def last_token(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into the prompt, all tokens but the last, and the step of the last token.

    Args:
        batch: `input_ids` of shape (batch, sequence), and perhaps others of that shape, or images.

    Returns:
        The prompt: everything but each row's last token; images belong to it. And the step: the last tokens,
        (batch, 1), with the attention mask of all tokens, (batch, sequence).
    """
    ids = batch["input_ids"]
    batch = {"attention_mask": torch.ones_like(ids), **batch}
    of_tokens = {name for name, value in batch.items() if getattr(value, "shape", ()) == ids.shape}
    prompt = {name: value[:, :-1] if name in of_tokens else value for name, value in batch.items()}
    step = {name: batch[name][:, -1:] for name in of_tokens - {"attention_mask"}}
    return prompt, {**step, "attention_mask": batch["attention_mask"]}
