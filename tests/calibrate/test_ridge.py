"""Moments, fits and splits of `calibrate/moments.py` against the tokens themselves."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hies_export.calibrate import moments as room
from hies_export.calibrate.moments import Moments


def tokens(count: int = 60, *, inputs: int = 5, outputs: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator) + torch.arange(inputs)
    return x, torch.randn(count, outputs, generator=generator) + x[:, :outputs]


def test_moments_are_sums_over_tokens_in_double() -> None:
    x, y = tokens()
    found = Moments.of(x, y)
    a, b = x.double().numpy(), y.double().numpy()
    assert (found.tokens, found.counted) == (60.0, 60)
    for name, expected in (("x", a.sum(0)), ("y", b.sum(0)), ("xx", a.T @ a), ("yx", b.T @ a), ("yy", (b**2).sum())):
        value = getattr(found, name)
        assert value.dtype == torch.float64
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-12)


def test_inputs_as_wide_as_the_limit_are_solved_by_cholesky(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is not positive definite tells the two ways apart: only ridges that make it so are left."""
    moments = Moments.of(*tokens())
    least = torch.linalg.eigvalsh(moments.xx)[0]
    moments.xx -= 1.5 * least * torch.eye(5)
    enough = 0.6 * (least / moments.xx.diagonal().mean()).item()
    weight = torch.zeros(3, 5, dtype=torch.float64)
    ridges = [enough / 2, enough, 1.0]
    for wide, expected in ((5, ridges[1:]), (6, ridges)):
        monkeypatch.setattr(room, "WIDE", wide)
        solve = moments.solver(weight, centred=False)
        assert [ridge for ridge in ridges if solve(ridge) is not None] == expected


def test_an_error_is_a_mean_over_tokens_and_never_below_zero() -> None:
    x, y = (t.double() for t in tokens())
    moments = Moments.of(x, y)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    bias = torch.randn(3, generator=generator, dtype=torch.float64)
    for shift in (bias, None):
        expected = (x @ weight.T + (0 if shift is None else shift) - y).square().sum(1).mean().item()
        assert moments.error(weight, shift) == pytest.approx(expected, rel=1e-9)
    exact = Moments.of(x * 1e4, x * 1e4 @ weight.T)  # rounding alone would fall below zero for some
    assert 0 <= exact.error(weight, None) < 1e-3
    exact.yy -= 1e6
    assert exact.error(weight, None) == 0
    torch.testing.assert_close(moments.fit_bias(weight), (y - x @ weight.T).mean(0))
