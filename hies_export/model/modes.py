"""Switch modes of a model inside a block: evaluation, what it returns, frozen weights, one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .internals import ask_for_output_alone, configs_of


@contextmanager
def _switched_off(owners: Iterable[Any], flag: str) -> Iterator[None]:
    """Set a flag of those that have it to False inside the block, and afterwards back to True."""
    before = [owner for owner in owners if getattr(owner, flag, False)]
    for owner in before:
        setattr(owner, flag, False)
    try:
        yield
    finally:
        for owner in before:
            setattr(owner, flag, True)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode inside the block, and afterwards back into its own mode."""
    with _switched_off(model.modules(), "training"):
        model.eval()
        yield


@contextmanager
def output_alone(model: nn.Module, *, cache: bool = False) -> Iterator[None]:
    """Let a model return its output alone inside the block, or its cache too, whatever its configs ask for.

    They may ask for hidden states, attention weights, router logits or tuples, which no pass of this package reads.
    """
    put_back = ask_for_output_alone(configs_of(model), cache=cache)
    try:
        yield
    finally:
        put_back()


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode and freeze its weights inside the block, and restore both afterwards."""
    # A model without a problem_type guesses it from the first labels, and writes it into its config.
    problem_type = getattr(model.config, "problem_type", None)
    with _switched_off(model.parameters(), "requires_grad"), evaluating(model):
        try:
            yield
        finally:
            model.config.problem_type = problem_type


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Let the parts of a model that is spread over devices hand their outputs to its first device inside the block.

    There, its own code puts them together, with labels for example: accelerate moves all inputs to the first device.
    """
    first = next(model.parameters()).device
    with ExitStack() as hooks:
        if any(parameter.device != first for parameter in model.parameters()):
            from accelerate.utils import send_to_device

            for part in model.children():
                hooks.enter_context(part.register_forward_hook(lambda _, args, output: send_to_device(output, first)))
        yield
