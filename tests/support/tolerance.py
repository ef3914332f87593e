"""Compare numbers that were computed in two ways.

Units, plans, counts and copied bytes are equal or wrong. What products of matrices gave is not: processors, libraries,
threads, batches and even the place in memory decide in which order a sum is taken, and float32 rounds each step by
6e-8. Through the layers of a tiny model, forth and back, that grows to a few hundred roundings of the largest number
involved, however small the others are. Hence one rule: numbers differ by at most 1e-5 of the largest among them.
`HIES_DISTURB` (support/disturbed.py) shows which tests hold by that.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from hies_export.equal import Difference
from hies_export.select.plan import PruningPlan

CLOSE = 1e-5
# Refitted weights, and what is computed with them: the systems that they solve amplify what the moments differ by.
REFITTED = 1e-4
_FRACTION = re.compile(r"-?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)")


def near(expected: Iterable[float] | float, *, within: float = CLOSE) -> Any:
    """Return what equals numbers that differ from the expected ones by at most a share of the largest of these."""
    values = [expected] if isinstance(expected, int | float) else list(expected)
    largest = max((abs(value) for value in values), default=0.0)
    return pytest.approx(expected, rel=0, abs=within * largest)


def max_abs(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors."""
    return Difference.of(one, other).max_abs


def assert_near(found: Any, expected: Any, *, within: float = CLOSE, where: str = "value") -> None:
    """Assert that tensors, lists or mappings of such differ by at most a share of the largest number of each."""
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), where
        for name, value in expected.items():
            assert_near(found[name], value, within=within, where=f"{where} {name}")
        return
    if not isinstance(expected, torch.Tensor):
        found, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
    if not expected.is_floating_point() or not expected.numel():
        assert torch.equal(found, expected), where
        return
    apart = (found.double() - expected.double()).abs().max().item()
    assert apart <= within * expected.abs().max().item(), f"{where} differs by {apart:.3g}"


def assert_same_plan(found: PruningPlan, expected: PruningPlan) -> None:
    """Assert that plans keep the same units for the same reasons, of models whose fingerprints are near."""
    assert replace(found, model={}) == replace(expected, model={})
    assert_near(dict(found.model), dict(expected.model), where="fingerprint")


def assert_same_text(found: str, expected: str) -> None:
    """Assert that texts are the same but for fractions, which are near."""
    assert _FRACTION.sub("#", found) == _FRACTION.sub("#", expected)
    fractions = [[float(number) for number in _FRACTION.findall(text)] for text in (found, expected)]
    assert fractions[0] == pytest.approx(fractions[1], rel=CLOSE, abs=CLOSE)
