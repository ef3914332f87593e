"""Look at a model without changing it: evaluation mode and frozen weights for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel


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
