"""Time a slim model against its dense one, interleaved, with a control that says how much is noise."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from ..errors import NonFiniteError, RecipeError
from .runtimes import Runtime

BOOTSTRAP_SAMPLES = 2000
# A comparison whose control's interval misses 1 by more than this says nothing.
NOISE_LIMIT = 0.02

# Neighbours are each other's reverse (ABBA), so linear drift cancels; over all six, each runner comes equally
# often first, second and last, and equally often after itself, so a warm cache favours none.
_ORDERS = ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2))


@dataclass(frozen=True)
class Percentiles:
    """Latency of one run, in milliseconds."""

    p50_ms: float
    p90_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, and its 95 % bootstrap interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class LatencyComparison:
    """Dense and slim timed together.

    Attributes:
        dense: Latency of the dense model.
        slim: Latency of the slim model.
        ratio: Median of the paired ratios slim / dense.
        ratio_low: Lower end of its 95 % interval.
        ratio_high: Upper end of its 95 % interval.
        control: The dense model against itself, timed in the same loop (A/A): how far from 1 noise
            alone goes.
        repeats: Timed runs of each.
        threads: CPU threads within an operator.
        provider: Where both ran.
    """

    dense: Percentiles
    slim: Percentiles
    ratio: float
    ratio_low: float
    ratio_high: float
    control: Ratio
    repeats: int
    threads: int
    provider: str

    @property
    def noisy(self) -> bool:
        """Whether the control shows that the machine was too busy for the comparison to mean anything."""
        return is_noisy(self.control.low, self.control.high)


def is_noisy(control_low: float, control_high: float) -> bool:
    """Whether the interval of a control, one model against itself, misses 1 by more than `NOISE_LIMIT`."""
    return control_low > 1 + NOISE_LIMIT or control_high < 1 - NOISE_LIMIT


def compare_latency(
    dense: Runtime,
    slim: Runtime,
    *,
    batch: Mapping[str, Any],
    repeats: int = 30,
    warmup: int = 5,
    min_seconds: float = 0.0,
    seed: int = 0,
    control: Runtime | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> LatencyComparison:
    """Time two models interleaved in one process, with an A/A control beside them.

    Args:
        dense: The model to compare with.
        slim: The model to compare.
        batch: The batch each of them runs, prepared once.
        repeats: Timed runs of each; a multiple of 6 balances the order exactly.
        warmup: Untimed rounds before; in the first, outputs are checked.
        min_seconds: Go on beyond `repeats` until the timed runs took this long together.
        seed: Of the bootstrap.
        control: The dense model loaded a second time; by default `dense` itself, which cannot show
            what a second copy in memory costs.
        progress: Called with (rounds done, rounds at least).

    Returns:
        Quantiles of both in ms, and the median of the paired ratios slim / dense with its 95 % bootstrap interval; the
        same of the control.

    Raises:
        RecipeError: repeats is below 1, warmup or min_seconds below 0, or the runtimes differ in kind.
        NonFiniteError: An output is NaN or infinite: such numbers may take another time than real ones.

    Examples:
        >>> dense, small = (load_runtime("torch", m) for m in (model, slim))
        >>> found = compare_latency(dense, small, batch=batches[0], repeats=6)
        >>> found.ratio_low <= found.ratio <= found.ratio_high
        True
    """
    _check_timing(dense, slim, control, repeats, warmup, min_seconds)
    runners = (dense, slim, control or dense)
    feeds = [runner.prepare(batch) for runner in runners]
    for round_number in range(warmup):
        for name, runner, feed in zip(("dense", "slim", "control"), runners, feeds, strict=True):
            result = runner.run(feed)
            if round_number == 0:
                _check_finite(runner.fetch(result), name=name, provider=runner.provider)
            del result

    rounds: list[list[int]] = []
    total_ns = 0
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        while len(rounds) < repeats or total_ns < min_seconds * 1e9:
            elapsed_ns = [0, 0, 0]
            for index in _ORDERS[len(rounds) % len(_ORDERS)]:
                start_ns = perf_counter_ns()
                runners[index].run(feeds[index])
                elapsed_ns[index] = perf_counter_ns() - start_ns
            rounds.append(elapsed_ns)
            total_ns += sum(elapsed_ns)
            if progress is not None:
                progress(len(rounds), max(repeats, len(rounds)))
    finally:
        if collecting:
            gc.enable()

    times_ms = np.asarray(rounds, dtype=np.float64) / 1e6  # (repeats, dense | slim | control)
    ratio = paired_ratio(times_ms[:, 0], times_ms[:, 1], seed=seed)
    return LatencyComparison(
        dense=_percentiles(times_ms[:, 0]),
        slim=_percentiles(times_ms[:, 1]),
        ratio=ratio.ratio,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        control=paired_ratio(times_ms[:, 0], times_ms[:, 2], seed=seed),
        repeats=len(rounds),
        threads=dense.threads,
        provider=dense.provider,
    )


def _check_finite(outputs: Mapping[str, np.ndarray], *, name: str, provider: str) -> None:
    for output, values in outputs.items():
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"outputs must be finite to be timed, but {output} of the {name} model has NaN or infinity on "
                f"{provider}; try dtype float32"
            )


def _check_timing(
    dense: Runtime, slim: Runtime, control: Runtime | None, repeats: int, warmup: int, min_seconds: float
) -> None:
    problems = []
    if repeats < 1:
        problems.append(f"repeats must be at least 1, got {repeats}")
    if warmup < 0:
        problems.append(f"warmup must be at least 0, got {warmup}")
    if min_seconds < 0:
        problems.append(f"min_seconds must be at least 0, got {min_seconds}")
    places = {(runner.provider, runner.threads) for runner in (dense, slim, control or dense)}
    if len(places) > 1:
        shown = " and ".join(f"{provider} with {threads} threads" for provider, threads in sorted(places))
        problems.append(f"dense, slim and control must run alike, got {shown}: load them with the same runtime")
    if problems:
        raise RecipeError(problems)


def paired_ratio(base_ms: np.ndarray, other_ms: np.ndarray, *, seed: int = 0) -> Ratio:
    """Median of other / base over paired runs, with a 95 % percentile bootstrap interval.

    Args:
        base_ms: Times of shape (repeats,).
        other_ms: Times of shape (repeats,), each taken beside its partner.
        seed: Of the resampling.
    """
    ratios = np.asarray(other_ms) / np.asarray(base_ms)
    draws = np.random.default_rng(seed).integers(0, len(ratios), (BOOTSTRAP_SAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def _percentiles(times_ms: np.ndarray) -> Percentiles:
    return Percentiles(*(float(value) for value in np.percentile(times_ms, (50, 90, 99))))


def realised_share(latency_ratio: float, flops_ratio: float) -> float | None:
    """Share of the FLOPs saving that became a latency saving; `None` where no FLOPs were saved."""
    return None if flops_ratio == 1 else (1 - latency_ratio) / (1 - flops_ratio)


def environment() -> dict[str, Any]:
    """Where a measurement was made: versions, processor, GPU. No host name, no user, no path."""
    packages = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "optimum", "hies-export")
    return {
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in packages},
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "os": f"{platform.system()} {platform.machine()}",
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """Model name of the processor; the architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
