"""Switch modes of a model inside a block: evaluation, cache, gradient checkpointing, frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


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
def without_cache(model: nn.Module) -> Iterator[None]:
    """Switch off the cache of keys and values inside the block, because no next token is computed."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    with _switched_off(configs.values(), "use_cache"):
        yield


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Let layers with gradient checkpointing switched on use it in evaluation mode too, inside the block.

    transformers checkpoints a layer only if its training flag is set. Some layers apply dropout by the same flag. So
    the flag is set while transformers decides, and unset while the layer computes, in the forward pass and again in the
    backward pass.
    """
    found = (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing)
    layers: list[Any] = list(found)
    before = [(layer, layer.training, layer._gradient_checkpointing_func) for layer in layers]

    def compute(layer: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        layer.training = False
        try:
            return function(*args)
        finally:
            layer.training = True

    def checkpointed(layer: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(partial(compute, layer, function), *args, use_reentrant=False)

    for layer in layers:
        layer.training, layer._gradient_checkpointing_func = True, partial(checkpointed, layer)
    try:
        yield
    finally:
        for layer, training, function in before:
            layer.training, layer._gradient_checkpointing_func = training, function


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
