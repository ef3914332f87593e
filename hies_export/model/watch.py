"""Record the inputs and outputs of layers, and replace their inputs, by hooks that are removed after the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn


@dataclass
class Watched:
    """Inputs and outputs of layers, by key; a layer that is called several times has several entries."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)  # key -> inputs, in the order of the calls
    # Key -> outputs, in the order of the calls; empty unless they were asked for.
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what was recorded so far."""
        self.inputs.clear()
        self.outputs.clear()


@contextmanager
def watch(
    model: nn.Module, layers: Mapping[str, str], *, outputs: bool = False, gradients: bool = False
) -> Iterator[Watched]:
    """Record the first input of layers, and with `outputs` their outputs, inside the block, by the keys of `layers`.

    With `gradients`, every recorded input takes a gradient. One that takes none by itself, as in front of the first
    layer of a frozen model, becomes a leaf.
    """
    seen = Watched()

    def read(key: str, x: Tensor) -> Tensor:
        if gradients and not x.requires_grad:
            x = x.detach().requires_grad_()
        seen.inputs.setdefault(key, []).append(x)
        return x

    def record_output(key: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.outputs.setdefault(key, []).append(output)

    with ExitStack() as hooks:
        for key, name in layers.items() if outputs else ():
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(record_output, key)))
        with intercept(model, layers, read):
            yield seen


@contextmanager
def intercept(model: nn.Module, layers: Mapping[str, str], function: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Replace the first input of layers inside the block by what `function` returns for their key and that input."""

    def replace(key: str, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (function(key, args[0]), *args[1:])

    with ExitStack() as hooks:
        for key, name in layers.items():
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(partial(replace, key)))
        yield
