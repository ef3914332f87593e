"""Compute the ratio of paired times with an interval, and judge from a control whether it is too noisy.

A ratio is uncertain because times vary between rounds, and because they vary between loaded copies of a model. Copies
of one ONNX graph, loaded in one process, took 1.00 to 1.05 times as long as the first, consistently over all rounds
(dev/LOG.md). So models are loaded several times, and the bootstrap resamples loads and copies as well as rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_SAMPLES = 2000
DRAWN_AT_A_TIME = 1 << 20
# A comparison is noisy if the interval of its control misses 1 by more than NOISE_LIMIT, or is wider than
# WIDEST_CONTROL: an interval such as [0.9, 1.1] contains 1, but also savings and losses of a tenth.
NOISE_LIMIT = 0.02
WIDEST_CONTROL = 0.1


@dataclass(frozen=True)
class Percentiles:
    """Latency of one run, in milliseconds."""

    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, times_ms: np.ndarray) -> Percentiles:
        """Return the percentiles of the times of all runs, (runs,)."""
        return cls(*(float(value) for value in np.percentile(times_ms, (50, 90, 99))))


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def paired_ratio(base_ms: Sequence[np.ndarray], other_ms: Sequence[np.ndarray], seed: int = 0) -> Ratio:
    """Return the median over rounds of other / mean of the base's copies, with a 95 % percentile bootstrap interval.

    The bootstrap resamples everything that varies between measurements: loads, copies within a load, and rounds
    (Davison and Hinkley 1997, Bootstrap Methods and their Application, section 3.8: hierarchical data). Each load gives
    times of the base, (rounds, copies), and of the other, (rounds,), from the same rounds.
    """
    rounds = np.array([len(times) for times in other_ms])
    loads, longest, copies = len(rounds), rounds.max(), base_ms[0].shape[1]
    base, other = np.empty((loads, longest, copies)), np.empty((loads, longest))
    for number, count in enumerate(rounds):
        base[number, :count], other[number, :count] = base_ms[number], other_ms[number]
    random, medians = np.random.default_rng(seed), []
    # Limit the draws at a time, so that memory stays at tens of megabytes for any number of rounds.
    size = min(BOOTSTRAP_SAMPLES, max(1, DRAWN_AT_A_TIME // (loads * longest)))
    for done in range(0, BOOTSTRAP_SAMPLES, size):
        draws = min(size, BOOTSTRAP_SAMPLES - done)
        load = random.integers(loads, size=(draws, loads, 1))
        place = (random.random((draws, loads, longest)) * rounds[load]).astype(int)
        copy = random.integers(copies, size=(draws, loads, 1, copies))
        drawn = other[load, place] / base[load[..., None], place[..., None], copy].mean(axis=-1)
        medians.append(np.median(drawn.reshape(draws, -1), axis=1))
    low, high = np.percentile(np.concatenate(medians), (2.5, 97.5))
    ratios = np.concatenate([one / many.mean(axis=1) for one, many in zip(other_ms, base_ms, strict=True)])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def is_noisy(control_low: float, control_high: float) -> bool:
    """Return whether the interval of a control, a model against itself, is too noisy to trust the comparison.

    It should contain 1 and be narrow, so it must not miss 1 by more than `NOISE_LIMIT` or be wider than
    `WIDEST_CONTROL`.
    """
    misses = control_low > 1 + NOISE_LIMIT or control_high < 1 - NOISE_LIMIT
    return misses or control_high - control_low > WIDEST_CONTROL


def realised_share(latency_ratio: float, flops_ratio: float) -> float | None:
    """Return the share of time saved / the share of FLOPs saved; None if no FLOPs were saved."""
    return None if flops_ratio == 1 else (1 - latency_ratio) / (1 - flops_ratio)
