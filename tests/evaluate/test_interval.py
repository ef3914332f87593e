"""Intervals of shares agree with scipy's, and hold as often as they say where predictions come in clusters."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta, binomtest, t

from hies_export.evaluate.interval import (
    FAILURES,
    confidence_of_each,
    lower_share,
    queries_needed,
    ratio_ends,
    rows_needed,
    share_ends,
    upper_rate,
)
from hies_export.pipeline.search import largest


def exact(right: int, count: int, confidence: float = 0.95) -> float:
    return float(binomtest(right, count).proportion_ci(confidence, method="exact").low)


def flags(right: int, count: int) -> torch.Tensor:
    return torch.arange(count) < right


@pytest.mark.parametrize(("right", "count"), [(0, 5), (1, 7), (499, 512), (512, 512), (1, 1)])
def test_both_ends_are_the_exact_ones(right: int, count: int) -> None:
    for confidence in (0.95, 0.98):
        interval = binomtest(right, count).proportion_ci(confidence, method="exact")
        assert share_ends(flags(right, count), confidence=confidence) == pytest.approx((interval.low, interval.high))
    assert lower_share(flags(right, count), scale=2) == pytest.approx(exact(2 * right, 2 * count))


@pytest.mark.parametrize("share", [0.5, 0.97, 0.999])
def test_so_many_rows_or_queries_are_needed_and_no_fewer(share: float) -> None:
    for confidence in (0.95, confidence_of_each(FAILURES)):
        count = rows_needed(share, confidence)
        assert exact(count, count, confidence) >= share > exact(count - 1, count - 1, confidence)
        count = queries_needed(share, confidence)
        alike = [ratio_ends(torch.ones(size), torch.ones(size), confidence)[0] for size in (count, count - 1)]
        assert alike[0] >= share > alike[1]


@pytest.mark.parametrize("scale", [1, 3])
def test_the_ratio_of_means_has_fiellers_interval_with_a_query_that_is_lost(scale: int) -> None:
    generator = np.random.default_rng(0)
    dense = generator.uniform(0.2, 1, size=200)
    slim = dense - 0.3 * generator.exponential(0.1, size=200)
    low, high = ratio_ends(torch.tensor(slim), torch.tensor(dense), 0.98, scale=scale)
    mean = dense.mean()
    for end, added, sign in ((low, 0.0, 1), (high, 2 * mean, -1)):
        # As many times the queries, and one.
        ours, theirs = (np.append(np.tile(of, scale), one) for of, one in ((slim, added), (dense, mean)))
        apart = ours - end * theirs
        count = len(apart)
        error = apart.std(ddof=1) / count**0.5
        assert sign * apart.mean() / error == pytest.approx(t.ppf(0.99, count - 1), rel=1e-6)
    assert low < slim.mean() / mean < high
    assert ratio_ends(torch.tensor(3 * slim), torch.tensor(3 * dense), 0.98, scale=scale) == pytest.approx((low, high))
    assert ratio_ends(torch.zeros(9), torch.zeros(9)) == (0.0, math.inf)


def test_the_lower_end_of_a_ratio_holds_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    missed = 0
    for _ in range(500):
        losses = np.minimum(1, 0.008 * generator.pareto(1.8, 300))
        missed += ratio_ends(torch.tensor(1 - losses), torch.ones(300))[0] > 0.9902
    assert missed <= 0.025 * 500
    # And a loss in 300 queries that none of these has seen is not excluded.
    assert ratio_ends(torch.ones(300), torch.ones(300))[0] < 1 - 1 / 300


def test_tokens_that_agree_within_a_text_count_as_one() -> None:
    once = flags(180, 200)
    samples = torch.arange(200).repeat_interleave(16)
    assert lower_share(once.repeat_interleave(16), samples) == pytest.approx(exact(180, 200), abs=0.003)
    assert lower_share(torch.ones(3200, dtype=torch.bool), samples) == pytest.approx(exact(200, 200))
    # So do those of a single text, and independent ones count one by one.
    assert lower_share(flags(9, 90), torch.zeros(90).long()) == pytest.approx(beta.ppf(0.025, 0.1, 1.9))
    mixed = once.repeat(16)[torch.randperm(3200, generator=torch.Generator().manual_seed(0))]
    assert lower_share(mixed, samples) == pytest.approx(exact(2880, 3200), abs=0.004)


@pytest.mark.parametrize(("third", "apart"), [([0, 0], True), ([1, 1, 0], False)])
def test_the_interval_of_clusters_by_hand(third: list[int], apart: bool) -> None:
    texts = [[1, 1, 0], [1, 1, 1, 1], third, [1, 0, 1, 1, 1]]
    flat = [token for text in texts for token in text]
    samples = torch.tensor([number for number, text in enumerate(texts) for _ in text])
    share, tokens = sum(flat) / len(flat), len(flat)
    between = sum(sum(token - share for token in text) ** 2 for text in texts)
    size = share * (1 - share) / (len(texts) / (len(texts) - 1) * between / tokens**2)
    assert (size < tokens) == apart
    size = min(size, tokens) * (t.ppf(0.975, tokens - 1) / t.ppf(0.975, len(texts) - 1)) ** 2
    expected = beta.ppf(0.025, share * size, (1 - share) * size + 1)
    assert lower_share(torch.tensor(flat) == 1, samples) == pytest.approx(expected, rel=1e-9)


def test_a_rate_of_all_rows_is_one() -> None:
    assert upper_rate(5, 5) == 1.0
    assert 0.98 < upper_rate(4, 5) < 1.0


def test_the_interval_of_clusters_holds_as_often_as_it_says() -> None:
    generator, true, held = np.random.default_rng(0), 0.9, 0
    for _ in range(400):
        own = generator.beta(9, 1, size=60)
        sizes = generator.integers(5, 40, size=60)
        same = torch.from_numpy(np.concatenate([generator.random(n) < p for n, p in zip(sizes, own, strict=True)]))
        samples = torch.from_numpy(np.repeat(np.arange(60), sizes))
        held += lower_share(same, samples) <= true
    assert 0.955 <= held / 400 <= 0.995


def least_right(rows: int, share: float, error: float) -> int:
    """Return how many of the rows must be right to promise a share, by a sum over the binomial tail."""
    least = rows
    for right in range(rows, -1, -1):
        tail = sum(math.comb(rows, k) * share**k * (1 - share) ** (rows - k) for k in range(right, rows + 1))
        if tail > error:
            return least
        least = right
    return least


@pytest.mark.parametrize("guess", [1, 60])
def test_a_search_among_many_cuts_keeps_its_promise_as_often_as_it_says(guess: int) -> None:
    """Of 100 sizes, the true shares fall: from the 20th on, they are just too small. Cuts agree on half of the rows."""
    promised, rows, draws, generator = 0.95, 500, 1000, np.random.default_rng(3)
    sizes = np.arange(1, 101)
    true = np.where(sizes < 20, 0.98, promised - 1e-4 - 2e-6 * sizes)
    least = {looks: least_right(rows, promised, 0.025 / looks) for looks in (1, FAILURES)}
    for looks, right in least.items():
        ends = [lower_share(flags(n, rows), confidence=confidence_of_each(looks)) for n in (right - 1, right)]
        assert ends[0] < promised <= ends[1]
    broken, most = {1: 0, FAILURES: 0}, 0
    for _ in range(draws):
        kept = (generator.random(rows // 2)[:, None] < true).sum(0) + generator.binomial(rows // 2, true)
        tried: list[int] = []

        def passes(size: int, looks: int, kept: Any = kept, tried: list[int] = tried) -> bool:
            tried.append(size)
            return bool(kept[size - 1] >= least[looks])

        broken[1] += largest(100, partial(passes, looks=1)) >= 20
        tried.clear()
        broken[FAILURES] += largest(100, partial(passes, looks=FAILURES), near=guess, failures=FAILURES) >= 20
        most = max(most, len(tried))
    assert broken[FAILURES] / draws <= 0.025 < broken[1] / draws
    assert most <= 14
