"""Run small work on one thread.

On small tensors threads mostly wait for each other, and even longer if other work takes a core.

Whether work is small depends only on the model and its batches. Timing both numbers of threads would be another rule.
But sums over different numbers of threads differ in their last bits: gradients of weights (`taylor`) and moments
(`obs`) do. Then a run would not give the same scores when repeated on the same machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .linear import is_linear

# A forward pass below this many FLOPs is small: some hundredths of a second on one core. Steps are then so short that
# one thread costs little even if all cores are free.
SMALL_FLOPS = 2e9

# Side of a patch in pixels, if the config does not give one number.
_PATCH = 16
# Variables by which the number of threads is chosen; torchrun sets the first one.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_AT_START = torch.get_num_threads()


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's process-wide number of threads inside the block."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> AbstractContextManager[None]:
    """Run torch on one thread inside the block if the batches are small work for the model.

    The number of threads stays as it is if `chosen_by_hand`, and for a model that is not on the CPU. `batches` are all
    batches of a loop: each of several processes takes a part, but all decide alike.
    """
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    small = bool(batches) and on_cpu and not chosen_by_hand() and mean_flops(model, batches) < SMALL_FLOPS
    return torch_threads(1) if small else nullcontext()


def chosen_by_hand() -> bool:
    """Return whether the environment sets the number of threads, or it was set after this module was imported."""
    return any(os.environ.get(name) for name in _VARIABLES) or torch.get_num_threads() != _AT_START


def threads_of_small_work() -> int:
    """Return on how many threads small work runs."""
    return torch.get_num_threads() if chosen_by_hand() else 1


def mean_flops(model: Any, batches: Sequence[Mapping[str, Any]]) -> float:
    """Estimate the FLOPs of the forward pass over a batch: two for each weight of a linear layer and each token."""
    layers: list[Any] = [layer for layer in model.modules() if is_linear(layer)]
    tokens = sum(_tokens(model, batch) for batch in batches)
    return 2 * sum(layer.weight.numel() for layer in layers) * tokens / len(batches)


def _tokens(model: Any, batch: Mapping[str, Any]) -> float:
    """Return about how many tokens or patches a batch has; infinite for inputs that are neither text nor images."""
    if "input_ids" in batch:
        return float(batch["input_ids"].numel())
    if "pixel_values" not in batch:
        return math.inf
    patch = getattr(model.config, "patch_size", None)
    pixels = batch["pixel_values"].numel() / getattr(model.config, "num_channels", 3)
    return float(pixels / (patch if isinstance(patch, int) else _PATCH) ** 2)
