"""Look at a model without changing it: evaluation mode and frozen weights for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block every module is in evaluation mode; then each one is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Inside the block a decoder keeps no keys and values for a next token that is never asked for."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Inside the block layers with gradient checkpointing switched on use it in evaluation mode too.

    transformers checkpoints a layer only where its training flag is set, and some layers drop out by that flag: it is
    set for the decision and taken back for the layer's own computing, the first time and when it is repeated.
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
    """Inside the block the model is in evaluation mode and no weight takes a gradient; then all is as it was."""
    # A model without a problem_type guesses it from the first labels it sees, and keeps it.
    problem_type = getattr(model.config, "problem_type", None)
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        with evaluating(model):
            yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        model.config.problem_type = problem_type
