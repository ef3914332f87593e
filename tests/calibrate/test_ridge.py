"""Moments, fits and splits of `calibrate/moments.py` against the tokens themselves."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hies_export.calibrate import moments as room
from hies_export.calibrate.moments import Moments, Spread


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


def test_moments_add_up() -> None:
    x, y = tokens()
    whole, halves = Moments.of(x, y), Moments.of(x[:25], y[:25]) + Moments.of(x[25:], y[25:])
    assert (halves.tokens, halves.counted) == (60.0, 60)
    for name in ("x", "y", "xx", "yx", "yy"):
        torch.testing.assert_close(getattr(halves, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_a_fit_shrinks_towards_the_weight_by_the_ridge_times_the_mean_square(
    centred: bool, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(room, "WIDE", 5)
    x, y = (t.double().numpy() for t in tokens())
    weight = np.random.default_rng(2).normal(size=(3, 5))
    read, target = (x - x.mean(0), y - y.mean(0)) if centred else (x, y)
    # Ordinary least squares on rows that pull every coefficient towards the weight's.
    strength = 0.3 * (read**2).mean(0).mean() * len(x)
    rows = np.vstack([read, np.sqrt(strength) * np.eye(5)])
    targets = np.vstack([target, np.sqrt(strength) * weight.T])
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    moments = Moments.of(torch.from_numpy(x), torch.from_numpy(y))
    ridge, found, bias = next(moments.fits(torch.from_numpy(weight), ridges=[0.3], centred=centred))
    assert ridge == 0.3
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
    assert (bias is None) == (not centred)
    if bias is not None:
        np.testing.assert_allclose(bias.numpy(), y.mean(0) - expected @ x.mean(0), rtol=1e-9)
    several = list(moments.fits(torch.from_numpy(weight), ridges=[1.0, 0.3], centred=centred))
    assert len(several) == 2
    torch.testing.assert_close(several[1][1], found)
    assert (several[0][1] - torch.from_numpy(weight)).norm() < (found - torch.from_numpy(weight)).norm()


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
        assert [ridge for ridge, *_ in moments.fits(weight, ridges=ridges, centred=False)] == expected


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


@pytest.mark.parametrize("centred", [False, True])
def test_a_spread_is_the_covariance_or_the_second_moments(centred: bool) -> None:
    x, _ = tokens()
    found = Spread.of(x, centred=centred)
    a = x.double().numpy()
    np.testing.assert_allclose(found.mean.numpy(), a.mean(0), rtol=1e-12)
    expected = np.cov(a.T, bias=True) if centred else a.T @ a / len(a)
    np.testing.assert_allclose(found.moments.numpy(), expected, rtol=1e-10)
    assert found.moments.dtype == torch.float64
