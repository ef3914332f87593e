"""Switch modes of a model inside a block: evaluation, what it returns, frozen weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
