"""The threshold of a cascade: the smallest that keeps its promise, and how often it keeps it on new rows."""

from functools import cache

import pytest
import torch
from scipy import stats

from hies_export.errors import RequestError
from hies_export.forms.cascade.threshold import choose_threshold, margins


def two_models(rows: int, *, generator: torch.Generator, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a dense model, and of one that differs from it by noise: more often where its margin is small."""
    dense = 2 * torch.randn(rows, classes, generator=generator)
    return dense + 0.4 * torch.randn(rows, classes, generator=generator), dense


@cache
def bound(count: int, rows: int) -> float:
    return stats.binomtest(count, rows, alternative="less").proportion_ci(0.95, "exact").high


@pytest.mark.parametrize("disagreement", [0.05, 0.004])
def test_the_smallest_threshold_that_keeps_the_promise(disagreement: float) -> None:
    slim, dense = two_models(1200, generator=torch.Generator().manual_seed(1))
    promise = choose_threshold(slim, dense, disagreement)
    margin, differ = margins(slim), slim.argmax(-1) != dense.argmax(-1)

    def differing(threshold: float) -> int:
        return int((differ & (margin > threshold)).sum())

    kept = [t for t in [0.0, *margin.tolist()] if bound(differing(t), 1200) <= disagreement]
    unsure = margin <= promise.threshold
    assert torch.equal(unsure, margin <= min(kept))
    # Rounding of a served margin moves no row across.
    assert margin[unsure].max() < promise.threshold < margin[~unsure].min()
    assert promise.differ == differing(min(kept))
    assert promise.bound == pytest.approx(bound(promise.differ, 1200))
    assert promise.passed_on == unsure.double().mean()
    assert 0 < promise.passed_on < 0.6


def test_new_rows_keep_the_promise_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(2)
    slim, dense = two_models(200_000, generator=generator)
    margin, differ = margins(slim), slim.argmax(-1) != dense.argmax(-1)
    kept, draws = 0, 40
    for _ in range(draws):
        rows = torch.randint(0, len(slim), (1000,), generator=generator)
        threshold = choose_threshold(slim[rows], dense[rows], 0.01).threshold
        kept += (differ & (margin > threshold)).double().mean().item() <= 0.01
    # 95 % of the draws, less three standard errors; the bound itself leaves little over.
    assert 0.84 <= kept / draws < 1


def test_margins_that_move_stay_below_the_threshold() -> None:
    slim, dense = two_models(1200, generator=torch.Generator().manual_seed(8))
    exact = choose_threshold(slim, dense, 0.02)
    promise = choose_threshold(slim, dense, 0.02, resolution=0.1)
    assert promise.threshold == pytest.approx(exact.threshold + 0.1)
    moved = margins(slim)[slim.argmax(-1) != dense.argmax(-1)] + 0.099
    assert int((moved > promise.threshold).sum()) <= exact.differ < int((moved > exact.threshold).sum())


def test_nothing_is_passed_on_where_the_models_agree() -> None:
    _, dense = two_models(400, generator=torch.Generator().manual_seed(4))
    promise = choose_threshold(dense, dense, 0.01)
    assert (promise.threshold, promise.passed_on, promise.differ) == (0.0, 0.0, 0)


@pytest.mark.parametrize(("disagreement", "needed"), [(0.01, 299), (0.001, 2995)])
def test_too_few_rows_are_refused_with_how_many_it_takes(disagreement: float, needed: int) -> None:
    _, dense = two_models(needed, generator=torch.Generator().manual_seed(5))
    assert choose_threshold(dense, dense, disagreement).bound <= disagreement
    said = rf"with 95 % confidence from {needed:,} held-out rows or more, and there are {needed - 1:,}"
    with pytest.raises(RequestError, match=said):
        choose_threshold(dense[1:], dense[1:], disagreement)
