"""Time one loaded model against another, and return the ratio with its interval.

A control judges whether it is too noisy. A ratio is uncertain because times vary between rounds, and because they vary
between loaded copies of a model. Copies of one ONNX graph, loaded in one process, took 1.00 to 1.05 times as long as
the first, consistently over all rounds (dev/LOG.md). So models are loaded several times, and the bootstrap resamples
loads and copies as well as rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..runtimes.base import Runtime
from .timing import Conditions, Phase, Rounds, Timing, time_rounds

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
        """Return the percentiles of times of (runs,), in milliseconds."""
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


@dataclass(frozen=True, kw_only=True)
class LatencyComparison(Conditions):
    """The latency of a dense and a slim model, timed together, and the conditions of the measurement.

    Attributes:
        dense, slim: Percentiles of either model.
        ratio: Ratio of slim to the mean of dense and control, with an interval over rounds, copies and loads.
        control: Ratio of a second copy of the dense model to the first, timed in the same rounds (A/A). Its distance
            from 1 is noise.
        repeats, loads: Number of timed runs of each model, and of times the models were loaded.
    """

    dense: Percentiles
    slim: Percentiles
    ratio: Ratio
    control: Ratio
    repeats: int
    loads: int

    @property
    def noisy(self) -> bool:
        """Whether the control shows too much noise for the ratio to be trusted."""
        return is_noisy(self.control.low, self.control.high)


@dataclass(frozen=True, kw_only=True)
class RowsTime:
    """The mean time of a batch in ms, and its ratio to the first model's; the first model has its control's.

    `tokens` is about how many tokens a row has, padding included; 1 for images.
    """

    ms: float
    ratio: Ratio
    control: Ratio
    tokens: int
    batches: int
    loads: int
    threads: int
    provider: str
    dtype: str

    @property
    def noisy(self) -> bool:
        """Whether the control shows too much noise for the ratio to be trusted."""
        return is_noisy(self.control.low, self.control.high)


def compare_latency(
    dense: Runtime,
    slim: Runtime,
    *,
    batch: Mapping[str, Any],
    phase: Phase = "forward",
    seed: int = 0,
    control: Runtime | None = None,
    **timing: Any,
) -> LatencyComparison:
    """Time two loaded models, interleaved in one process, with an A/A control.

    This does not cover differences between loads. To include them, call `time_rounds` for each of several loads, and
    `compare_rounds` on the results.

    Args:
        dense: The model that ratios are relative to.
        slim: The model to compare with it.
        batch: The batch to run, prepared once for each model.
        phase: "forward" times one pass over all tokens; for a model that generates, this is called "prefill". "decode"
            times one step on the last token, with the others in the cache.
        seed: Seed of the bootstrap.
        control: The dense model loaded a second time; by default `dense` itself, which hides differences between
            copies.
        **timing: `repeats` (30), `warmup` (5) and `min_seconds` (0), as in `Timing`.

    Returns:
        Percentiles of both models in ms, and the median of the paired ratios slim / dense with its interval, also for
        the control.

    Raises:
        RecipeError: repeats is below 1, warmup or min_seconds below 0, the models run on different devices, threads or
            kinds of graph, or phase is "decode" and a model has no cache.
        NonFiniteError: An output is NaN or infinite, which may change the time of a run.

    Examples:
        >>> dense, small = (load_runtime("torch", m) for m in (model, slim))
        >>> found = compare_latency(dense, small, batch=batches[0], repeats=6)
        >>> found.ratio.low <= found.ratio.median <= found.ratio.high
        True
    """
    runners = (dense, slim, control or dense)
    rounds = time_rounds(runners, batch=batch, timing=Timing(**timing), phase=phase)
    return compare_rounds([rounds], seed=seed)


def compare_rounds(loads: Sequence[Rounds], *, model: int = 1, seed: int = 0) -> LatencyComparison:
    """Compare the first model with another over the rounds of at least one load; `seed` is that of the bootstrap."""
    # Peak memory is taken from the first load, the clock from the last.
    conditions = {field.name: getattr(loads[0], field.name) for field in fields(Conditions)}
    for name in ("dtypes", "peak_bytes"):
        conditions[name] = conditions[name] and (conditions[name][0], conditions[name][model])
    times_ms = np.concatenate([load.times_ms for load in loads])
    return LatencyComparison(
        dense=Percentiles.of(times_ms[:, 0]),
        slim=Percentiles.of(times_ms[:, model]),
        ratio=paired_ratio(
            [load.times_ms[:, [0, -1]] for load in loads], [load.times_ms[:, model] for load in loads], seed
        ),
        control=paired_ratio([load.times_ms[:, [0]] for load in loads], [load.times_ms[:, -1] for load in loads], seed),
        repeats=len(times_ms),
        loads=len(loads),
        **conditions | {"clock_mhz": loads[-1].clock_mhz},
    )
