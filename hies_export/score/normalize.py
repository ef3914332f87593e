"""Scale scores to [0, 1]."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

NORMALIZE = ("model", "layer")


class DegenerateRangeWarning(UserWarning):
    """All units have the same value, so min-max normalisation cannot tell them apart and scores them all 0."""


def min_max(values: Mapping[str, Tensor], *, normalize: str, what: str) -> Mapping[str, Tensor]:
    """Return (s - min) / (max - min) for every unit, (units,) by module, over the model or over each module."""
    if normalize == "layer":
        return {name: _spread(v, v.min(), v.max(), f"{what} in {name}") for name, v in values.items()}
    everything = torch.cat(list(values.values()))
    low, high = everything.min(), everything.max()
    if high == low:
        _warn(what)
        return {name: torch.zeros_like(v) for name, v in values.items()}
    return {name: (v - low) / (high - low) for name, v in values.items()}


def _spread(values: Tensor, low: Tensor, high: Tensor, what: str) -> Tensor:
    if high == low:
        _warn(what)
        return torch.zeros_like(values)
    return (values - low) / (high - low)


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} is the same for every head, so it cannot tell them apart and counts as 0",
        DegenerateRangeWarning,
        stacklevel=4,
    )
