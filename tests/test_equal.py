"""When two computations of the same thing gave equal numbers."""

import math

import pytest
import torch

from hies_export.equal import Difference


def test_the_largest_difference_of_tensors() -> None:
    one = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    found = Difference.of(one + torch.tensor([[0.0, 0.25], [-0.5, 0.0]]), one)
    assert found == Difference(0.5, 2.0)
    assert Difference.of(one[:1], one).max_abs == math.inf
    assert Difference.of(one.where(one != 0, math.nan), one).max_abs == math.inf
    assert Difference.of(one, one.where(one != 0, math.nan)).max_abs == math.inf
    assert Difference.of(one[:0], one[:0]) == Difference(0.0, 0.0)


def test_half_precision_is_compared_without_rounding() -> None:
    one = torch.tensor([1.0, 300.0], dtype=torch.bfloat16)
    assert Difference.of(one.float() + 0.25, one) == Difference(0.25, 300.0)
    assert Difference.of(one.double() + 1e-9, one.double()).max_abs == pytest.approx(1e-9, rel=1e-3)


@pytest.mark.parametrize("largest", [0.01, 1.0, 42.0, 2e5])
def test_what_is_allowed_grows_with_the_numbers_from_one_on(largest: float) -> None:
    allowed = 1e-3 * max(1.0, largest)
    assert Difference(0.99 * allowed, largest).within(1e-3)
    assert not Difference(1.01 * allowed, largest).within(1e-3)
    assert Difference(allowed, largest).share == pytest.approx(1e-3)
    assert not Difference(math.inf, largest).within(1e-3)
