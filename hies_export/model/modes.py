"""Switch modes of a model inside a block: evaluation, outputs, frozen weights, threads, hooks on its layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .internals import ask_for_output_alone, attributes_set, configs_of, forwards_set, multiplies_bfloat16, uncompiled


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Put every module into evaluation mode inside the block, and afterwards back into its own mode."""
    return attributes_set([(module, "training", False) for module in model.modules() if module.training])


@contextmanager
def output_alone(model: nn.Module, *, cache: bool = False) -> Iterator[None]:
    """Let a model return inside the block its output alone, with `cache` its cache too, whatever its configs say."""
    put_back = ask_for_output_alone(configs_of(model), cache=cache)
    try:
        yield
    finally:
        put_back()


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode and freeze its weights inside the block, and restore it afterwards."""
    trainable = [(parameter, "requires_grad", False) for parameter in model.parameters() if parameter.requires_grad]
    # A model without a problem_type guesses it from the first labels, and writes it into its config.
    problem_type = (model.config, "problem_type", model.config.problem_type)
    with attributes_set([*trainable, problem_type]), evaluating(model):
        yield


def widens(weight: Tensor) -> bool:
    """Return whether `wide_products` lets a linear layer with this weight compute in float32, where that is faster.

    That is so in half precision on a CPU: without bfloat16 instructions float32 is six times faster. With them bfloat16
    is faster, and as exact: products are added in float32.
    """
    is_slow = weight.dtype == torch.float16 or (weight.dtype == torch.bfloat16 and not multiplies_bfloat16())
    return is_slow and weight.device.type == "cpu"


def wide_products(model: nn.Module) -> AbstractContextManager[None]:
    """Let linear layers for which `widens` holds compute in float32 inside the block, and return their own dtype."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        if not widens(layer.weight):  # moved or converted inside the block
            return nn.functional.linear(x, layer.weight, layer.bias)
        bias = None if layer.bias is None else layer.bias.float()
        return nn.functional.linear(x.float(), layer.weight.float(), bias).to(x.dtype)

    linear = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    return forwards_set({layer: partial(forward, layer) for layer in linear if widens(layer.weight)})


def requiring_gradients(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let parameters require gradients inside the block."""
    return attributes_set([(parameter, "requires_grad", True) for parameter in parameters])


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


@contextmanager
def watch(
    model: nn.Module, layers: Mapping[str, str], *, gradients: bool = False
) -> Iterator[defaultdict[str, list[Tensor]]]:
    """Record the first input of layers inside the block: yield key of the layer -> one tensor for each call, in order.

    `layers` is key -> name of the layer. A layer that did not run has no tensor, such as those of an image tower on a
    batch of texts alone. With `gradients`, every recorded input requires a gradient: one that does not by itself, as in
    front of the first layer of a frozen model, becomes a leaf.
    """
    inputs: defaultdict[str, list[Tensor]] = defaultdict(list)

    def record(key: str, x: Tensor) -> Tensor:
        if gradients and not x.requires_grad:
            x = x.detach().requires_grad_()
        inputs[key].append(x)
        return x

    with intercept(model, layers, record):
        yield inputs


@contextmanager
def intercept(model: nn.Module, layers: Mapping[str, str], function: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Replace the first input of layers inside the block by what `function` returns for their key and that input.

    `layers` is key -> name of the layer. A model that was compiled in place runs uncompiled, as its compiled code may
    ignore hooks.
    """

    def replace_first(key: str, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (function(key, args[0]), *args[1:])

    with ExitStack() as hooks:
        hooks.enter_context(uncompiled(model))
        for key, name in layers.items():
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(partial(replace_first, key)))
        yield
