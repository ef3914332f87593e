"""Moments, fits and splits of `calibrate/moments.py` against the tokens themselves."""

import pytest
import torch
from support.cuts import moments_of
from torch import Tensor

from hies_export.calibrate import moments as room


def tokens(count: int = 60, *, inputs: int = 5, outputs: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator) + torch.arange(inputs)
    return x, torch.randn(count, outputs, generator=generator) + x[:, :outputs]


def test_inputs_as_wide_as_the_limit_are_solved_by_cholesky(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is not positive definite tells the two ways apart: only ridges that make it so are left."""
    moments = moments_of(*tokens())
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
    moments = moments_of(x, y)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    bias = torch.randn(3, generator=generator, dtype=torch.float64)
    for shift in (bias, None):
        expected = (x @ weight.T + (0 if shift is None else shift) - y).square().sum(1).mean().item()
        assert moments.error(weight, shift) == pytest.approx(expected, rel=1e-9)
    exact = moments_of(x * 1e4, x * 1e4 @ weight.T)  # rounding alone would fall below zero for some
    assert 0 <= exact.error(weight, None) < 1e-3
    exact.yy -= 1e6
    assert exact.error(weight, None) == 0
    torch.testing.assert_close(moments.fit_bias(weight), (y - x @ weight.T).mean(0))
