"""Time a slim model against its dense one, interleaved, with a control that says how much is noise.

Two numbers make a ratio uncertain: the rounds differ, and so do the copies that are loaded. Copies of one ONNX graph,
each loaded anew in one process, ran at 1.00 to 1.05 of the first one's time, and kept to that from one half of their
rounds to the other (dev/LOG.md). So models are loaded several times, and the bootstrap draws loads and copies as well
as rounds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from ..errors import NonFiniteError, RecipeError
from ..runtimes.base import Runtime
from .environment import gpu_facts

Phase = Literal["forward", "prefill", "decode"]

BOOTSTRAP_SAMPLES = 2000
DRAWN_AT_A_TIME = 1 << 20
# A comparison whose control's interval misses 1 by more than this says nothing, nor one whose control is not known
# better than to this width: [0.9, 1.1] holds 1, and would hold a gain or a loss of a tenth as well.
NOISE_LIMIT = 0.02
WIDEST_CONTROL = 0.1

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

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How dense and slim were timed.

    Attributes:
        threads: CPU threads within an operator.
        provider: Where both ran.
        dtypes: What dense and slim computed in.
        cuda_graph: Whether replays of CUDA graphs were timed.
        peak_bytes: Device memory that dense and slim take at the peak of a run; None on the CPU.
        clock_mhz: The GPU's clock right after the last run; None on the CPU.
    """

    threads: int
    provider: str
    dtypes: tuple[str, str]
    cuda_graph: bool
    peak_bytes: tuple[int, int] | None
    clock_mhz: float | None


@dataclass(frozen=True, kw_only=True)
class Rounds(Conditions):
    """Dense, slim and control as they were loaded once, timed together.

    Attributes:
        times_ms: Of shape (rounds, 3): dense, slim, control.
    """

    times_ms: np.ndarray


@dataclass(frozen=True, kw_only=True)
class LatencyComparison(Conditions):
    """Dense and slim timed together, beside how that was done.

    Attributes:
        dense: Latency of the dense model.
        slim: Latency of the slim model.
        ratio: Of slim to the mean of dense and control, with an interval over rounds, copies and loads.
        control: The dense model against itself, timed in the same rounds (A/A): how far from 1 noise alone goes.
        repeats: Timed runs of each.
        loads: How many times the models were loaded for them.
    """

    dense: Percentiles
    slim: Percentiles
    ratio: Ratio
    control: Ratio
    repeats: int
    loads: int

    @property
    def noisy(self) -> bool:
        """Whether the control shows that the machine was too busy for the comparison to mean anything."""
        return is_noisy(self.control.low, self.control.high)


def is_noisy(control_low: float, control_high: float) -> bool:
    """Whether the interval of a control, one model against itself, is no use.

    It misses 1 by more than `NOISE_LIMIT`, or is wider than `WIDEST_CONTROL`.
    """
    misses = control_low > 1 + NOISE_LIMIT or control_high < 1 - NOISE_LIMIT
    return misses or control_high - control_low > WIDEST_CONTROL


def compare_latency(
    dense: Runtime,
    slim: Runtime,
    *,
    batch: Mapping[str, Any],
    phase: Phase = "forward",
    repeats: int = 30,
    warmup: int = 5,
    min_seconds: float = 0.0,
    seed: int = 0,
    control: Runtime | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> LatencyComparison:
    """Time two models interleaved in one process, as they are loaded, with an A/A control beside them.

    What one load is worth shows when there are several: `time_rounds` of each, and `compare_rounds` of all.

    Args:
        dense: The model to compare with.
        slim: The model to compare.
        batch: The batch each of them runs, prepared once.
        phase: What of it is timed: all tokens at once ("forward", called "prefill" of what generates), or the
            "decode" step that takes the last token, with the others in the cache.
        repeats: Timed runs of each; a multiple of 6 balances the order exactly.
        warmup: Untimed rounds before; in the first, outputs are checked.
        min_seconds: Go on beyond `repeats` until the timed runs took this long together.
        seed: Of the bootstrap.
        control: The dense model loaded a second time; by default `dense` itself, which cannot show
            what a second copy in memory costs.
        progress: Called with (rounds done, rounds at least).

    Returns:
        Quantiles of both in ms, and the median of the paired ratios slim / dense with its interval; the same of the
        control.

    Raises:
        RecipeError: repeats is below 1, warmup or min_seconds below 0, or the runtimes differ in kind; a phase
            "decode" of models without a cache.
        NonFiniteError: An output is NaN or infinite: such numbers may take another time than real ones.

    Examples:
        >>> dense, small = (load_runtime("torch", m) for m in (model, slim))
        >>> found = compare_latency(dense, small, batch=batches[0], repeats=6)
        >>> found.ratio.low <= found.ratio.median <= found.ratio.high
        True
    """
    rounds = time_rounds(
        (dense, slim, control or dense),
        batch=batch,
        phase=phase,
        repeats=repeats,
        warmup=warmup,
        min_seconds=min_seconds,
        progress=progress,
    )
    return compare_rounds([rounds], seed=seed)


def time_rounds(
    runners: Sequence[Runtime],
    *,
    batch: Mapping[str, Any],
    phase: Phase = "forward",
    repeats: int = 30,
    warmup: int = 5,
    min_seconds: float = 0.0,
    progress: Callable[[int, int], object] | None = None,
) -> Rounds:
    """Time dense, slim and control in turns.

    Args:
        runners: The three; the third may be the first again.
        batch, phase, repeats, warmup, min_seconds, progress: As in `compare_latency`.

    Raises:
        RecipeError, NonFiniteError: As in `compare_latency`.
    """
    _check_timing(runners, phase, repeats, warmup, min_seconds)
    feeds = [runner.prepare_step(batch) if phase == "decode" else runner.prepare(batch) for runner in runners]
    _check_alike(runners)
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
                elapsed_ns[index] = runners[index].time_ns(feeds[index])
            rounds.append(elapsed_ns)
            total_ns += sum(elapsed_ns)
            if progress is not None:
                progress(len(rounds), max(repeats, len(rounds)))
    finally:
        if collecting:
            gc.enable()
    # The first to be loaded also pays for the kernels of the runtime: the second copy tells what the model takes.
    peaks = [runners[index].peak_memory_bytes(feeds[index]) for index in (2, 1)]
    clock_mhz = None if None in peaks else gpu_facts().get("clocks.sm")

    dense, slim, _ = runners
    return Rounds(
        times_ms=np.asarray(rounds, dtype=np.float64) / 1e6,
        threads=dense.threads,
        provider=dense.provider,
        dtypes=(dense.dtype, slim.dtype),
        cuda_graph=dense.cuda_graph,
        peak_bytes=None if peaks[0] is None or peaks[1] is None else (peaks[0], peaks[1]),
        clock_mhz=None if clock_mhz is None else float(clock_mhz),
    )


def compare_rounds(loads: Sequence[Rounds], *, seed: int = 0) -> LatencyComparison:
    """What the rounds of one or more loads of the same models say together.

    Args:
        loads: From `time_rounds`, at least one.
        seed: Of the bootstrap.
    """
    # Memory is that of the first load, as for a single one; the clock that of the last run.
    conditions = {field.name: getattr(loads[0], field.name) for field in fields(Conditions)}
    times_ms = np.concatenate([load.times_ms for load in loads])
    return LatencyComparison(
        dense=_percentiles(times_ms[:, 0]),
        slim=_percentiles(times_ms[:, 1]),
        ratio=paired_ratio([load.times_ms[:, [0, 2]] for load in loads], [load.times_ms[:, 1] for load in loads], seed),
        control=paired_ratio([load.times_ms[:, [0]] for load in loads], [load.times_ms[:, 2] for load in loads], seed),
        repeats=len(times_ms),
        loads=len(loads),
        **conditions | {"clock_mhz": loads[-1].clock_mhz},
    )


def _check_finite(outputs: Mapping[str, np.ndarray], *, name: str, provider: str) -> None:
    for output, values in outputs.items():
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"outputs must be finite to be timed, but {output} of the {name} model has NaN or infinity on "
                f"{provider}; try dtype float32"
            )


def _check_timing(runners: Sequence[Runtime], phase: Phase, repeats: int, warmup: int, min_seconds: float) -> None:
    problems = []
    if repeats < 1:
        problems.append(f"repeats must be at least 1, got {repeats}")
    if warmup < 0:
        problems.append(f"warmup must be at least 0, got {warmup}")
    if min_seconds < 0:
        problems.append(f"min_seconds must be at least 0, got {min_seconds}")
    if phase == "decode" and not all(runner.decodes for runner in runners):
        problems.append(
            "a decode step needs models that generate from a cache, and these do not: time the forward pass"
        )
    if problems:
        raise RecipeError(problems)


def _check_alike(runners: Sequence[Runtime]) -> None:
    """Refuse to compare what differs in more than the model; whether it is a CUDA graph is known once prepared."""
    places = {(runner.provider, runner.threads, runner.cuda_graph) for runner in runners}
    if len(places) > 1:
        shown = " and ".join(
            f"{provider} with {threads} threads{', as a CUDA graph' * graph}"
            for provider, threads, graph in sorted(places)
        )
        raise RecipeError([f"dense, slim and control must run alike, got {shown}: load them with the same runtime"])


def paired_ratio(base_ms: Sequence[np.ndarray], other_ms: Sequence[np.ndarray], seed: int = 0) -> Ratio:
    """Median of other / mean of the base's copies over paired runs, with a 95 % percentile bootstrap interval.

    What is drawn again is what another measurement would draw anew: the loads, in each the copies, and their rounds
    (Davison and Hinkley 1997, Bootstrap Methods and their Application, section 3.8: hierarchical data).

    Args:
        base_ms: By load, times of shape (rounds, copies).
        other_ms: By load, times of shape (rounds,), each taken beside its partners.
        seed: Of the resampling.
    """
    rounds = np.array([len(times) for times in other_ms])
    loads, longest, copies = len(rounds), rounds.max(), base_ms[0].shape[1]
    base, other = np.empty((loads, longest, copies)), np.empty((loads, longest))
    for number, count in enumerate(rounds):
        base[number, :count], other[number, :count] = base_ms[number], other_ms[number]
    random, medians = np.random.default_rng(seed), []
    # As many draws at a time as keep this in tens of megabytes, however many the rounds.
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


def _percentiles(times_ms: np.ndarray) -> Percentiles:
    return Percentiles(*(float(value) for value in np.percentile(times_ms, (50, 90, 99))))


def realised_share(latency_ratio: float, flops_ratio: float) -> float | None:
    """Share of the FLOPs saving that became a latency saving; `None` where no FLOPs were saved."""
    return None if flops_ratio == 1 else (1 - latency_ratio) / (1 - flops_ratio)
