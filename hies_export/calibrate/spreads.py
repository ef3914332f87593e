"""Collect the mean and the second moments of what linear layers read, group by group under a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import inputs_of
from ..model.modes import evaluating, output_alone
from ..model.watch import watch
from .ridge import Spread
from .stream import LIMIT_BYTES, grouped

Batch: TypeAlias = Mapping[str, Any]
# What opens a model to read inputs of layers: their names -> a function of a batch -> name -> (..., inputs).
Opens: TypeAlias = Callable[[Sequence[str]], AbstractContextManager[Callable[[Batch], Mapping[str, Tensor]]]]


def spreads(
    widths: Mapping[str, int],
    opens: Opens,
    batches: Sequence[Batch],
    *,
    centred: bool,
    limit_bytes: float = LIMIT_BYTES,
) -> Iterator[tuple[str, Spread]]:
    """Yield the spread of each input in `widths`, name -> features, over all tokens that are not padding.

    A group of inputs whose moments fit the limit takes a pass over the batches.
    """
    for group in grouped([*widths], [8 * width**2 for width in widths.values()], limit_bytes):
        yield from _pass(group, widths, opens, batches, centred)


def _pass(
    names: Sequence[str], widths: Mapping[str, int], opens: Opens, batches: Sequence[Batch], centred: bool
) -> Iterator[tuple[str, Spread]]:
    """Yield the spreads of some inputs after one pass over the batches."""
    counts = dict.fromkeys(names, 0)
    means = {name: torch.zeros(widths[name], dtype=torch.float64) for name in names}
    moments = {name: torch.zeros(widths[name], widths[name], dtype=torch.float64) for name in names}
    with opens(names) as read:
        for batch in batches:
            for name, states in read(batch).items():
                tokens = _real(states, batch).double()
                counts[name] += len(tokens)
                means[name] += tokens.sum(0)
                moments[name].addmm_(tokens.T, tokens)
    for name in names:
        mean, found = means[name] / counts[name], moments.pop(name).div_(counts[name])
        yield name, Spread(mean, found.sub_(torch.outer(mean, mean)) if centred else found)


def _real(states: Tensor, batch: Batch) -> Tensor:
    """Return the tokens, (tokens, inputs), that the mask of the batch does not call padding."""
    tokens, mask = states.flatten(0, -2), batch.get("attention_mask")
    return tokens if mask is None or mask.numel() != len(tokens) else tokens[mask.flatten().bool().to(tokens.device)]


def read_layers(model: PreTrainedModel) -> Opens:
    """Return what reads the inputs of layers of a model in torch, by their dotted names."""

    @contextmanager
    def opens(names: Sequence[str]) -> Iterator[Callable[[Batch], Mapping[str, Tensor]]]:
        with torch.no_grad(), evaluating(model), output_alone(model), watch(model, {n: n for n in names}) as seen:

            def read(batch: Batch) -> Mapping[str, Tensor]:
                seen.clear()
                model(**{key: value.to(model.device) for key, value in inputs_of(batch).items()})
                return {name: torch.cat([x.flatten(0, -2) for x in calls]).cpu() for name, calls in seen.inputs.items()}

            yield read

    return opens
