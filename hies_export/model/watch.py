"""Watch what layers read and write, and change what they read, through forward hooks that are removed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class Watched:
    """Inputs and outputs of layers, by key; a layer that is called several times has several entries.

    Attributes:
        inputs: Key -> inputs, in the order of the calls.
        outputs: Key -> outputs, in the order of the calls; empty unless they were asked for.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what was recorded so far."""
        self.inputs.clear()
        self.outputs.clear()


@contextmanager
def watch(
    model: nn.Module, layers: Mapping[str, str], *, outputs: bool = False, gradients: bool = False
) -> Iterator[Watched]:
    """Record the first input of layers, and their outputs, inside the block.

    Args:
        model: The model.
        layers: Key -> dotted name of a layer.
        outputs: Record outputs too.
        gradients: Make every recorded input one that takes a gradient. With frozen weights nothing before the first
            layer does: there the input becomes a leaf.

    Yields:
        What was recorded since the last `clear`.
    """
    seen = Watched()

    def read(key: str, x: Tensor) -> Tensor:
        if gradients and not x.requires_grad:
            x = x.detach().requires_grad_()
        seen.inputs.setdefault(key, []).append(x)
        return x

    def record_output(key: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen.outputs.setdefault(key, []).append(output)

        return hook

    handles: list[Any] = []
    try:
        if outputs:
            handles += [model.get_submodule(n).register_forward_hook(record_output(k)) for k, n in layers.items()]
        with intercept(model, layers, read):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def intercept(model: nn.Module, layers: Mapping[str, str], function: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Let layers read something else in the place of their first input inside the block.

    Args:
        model: The model.
        layers: Key -> dotted name of a layer.
        function: Takes the key and the input, returns what the layer shall read.
    """

    def replace(key: str) -> Callable[..., tuple[Any, ...]]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (function(key, args[0]), *args[1:])

        return hook

    handles: list[Any] = []
    try:
        for key, name in layers.items():
            handles.append(model.get_submodule(name).register_forward_pre_hook(replace(key)))
        yield
    finally:
        for handle in handles:
            handle.remove()
