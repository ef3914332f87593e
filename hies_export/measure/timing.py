"""Run loaded models (dense, slim, control) in turns, and return the time of each run."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import NonFiniteError, RecipeError
from ..runtimes.base import Runtime
from .machine import gpu_facts

Phase = Literal["forward", "prefill", "decode"]

# Consecutive orders are reversed (ABBA), so linear drift cancels. Over all six, each runner comes equally often first,
# second and last, and equally often after itself, so a warm cache favours none.
_ORDERS = ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2))


@dataclass(frozen=True)
class Timing:
    """The number of runs of each model.

    Attributes:
        repeats: Least number of timed runs of each model; a multiple of 6 balances the order exactly.
        warmup: Number of untimed runs before them. The outputs of the first are checked.
        min_seconds: Continue beyond `repeats` until the timed runs of all models add up to this many seconds.

    Raises:
        RecipeError: repeats is below 1, or warmup or min_seconds below 0; the message lists all problems.
    """

    repeats: int = 30
    warmup: int = 5
    min_seconds: float = 0.0

    def __post_init__(self) -> None:
        least = {"repeats": 1, "warmup": 0, "min_seconds": 0}
        problems = [
            f"{name} must be at least {value}, got {getattr(self, name)}"
            for name, value in least.items()
            if getattr(self, name) < value
        ]
        if problems:
            raise RecipeError(problems)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which dense and slim were timed.

    Attributes:
        threads: CPU threads within an operator.
        provider: Device or execution provider that both ran on.
        dtypes: Dtypes that dense and slim computed in.
        peak_bytes: Their peak device memory during a run; None on the CPU.
        cuda_graph: Whether replays of CUDA graphs were timed.
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
    """The times of dense, slim and control in ms, (rounds, 3), from one load of each."""

    times_ms: np.ndarray


def time_rounds(
    runners: Sequence[Runtime], *, batch: Mapping[str, Any], timing: Timing, phase: Phase = "forward"
) -> Rounds:
    """Time dense, slim and control, which may be the same object as dense, in turns; see `compare_latency`."""
    if phase == "decode" and not all(runner.decodes for runner in runners):
        raise RecipeError(
            ["a decode step needs models that generate from a cache, and these do not: time the forward pass"]
        )
    feeds = [runner.prepare_step(batch) if phase == "decode" else runner.prepare(batch) for runner in runners]
    _check_alike(runners)
    _warm_up(runners, feeds, timing.warmup)
    times_ns = _run_in_turns(runners, feeds, timing)
    # The model that is loaded first also accounts for the runtime's kernels, so dense memory is read from the control.
    peaks = [runners[index].peak_memory_bytes(feeds[index]) for index in (2, 1)]
    clock_mhz = None if None in peaks else gpu_facts().get("clocks.sm")
    dense, slim, _ = runners
    return Rounds(
        times_ms=np.asarray(times_ns, dtype=np.float64) / 1e6,
        threads=dense.threads,
        provider=dense.provider,
        dtypes=(dense.dtype, slim.dtype),
        cuda_graph=dense.cuda_graph,
        peak_bytes=None if peaks[0] is None or peaks[1] is None else (peaks[0], peaks[1]),
        clock_mhz=None if clock_mhz is None else float(clock_mhz),
    )


def _check_alike(runners: Sequence[Runtime]) -> None:
    """Refuse runners that differ in provider, threads or use of CUDA graphs.

    To be called after `prepare`, which is when a CUDA graph is captured.
    """
    places = {(runner.provider, runner.threads, runner.cuda_graph) for runner in runners}
    if len(places) > 1:
        shown = " and ".join(
            f"{provider} with {threads} threads{', as a CUDA graph' * graph}"
            for provider, threads, graph in sorted(places)
        )
        raise RecipeError([f"dense, slim and control must run alike, got {shown}: load them with the same runtime"])


def _warm_up(runners: Sequence[Runtime], feeds: Sequence[Any], rounds: int) -> None:
    for number in range(rounds):
        for name, runner, feed in zip(("dense", "slim", "control"), runners, feeds, strict=True):
            result = runner.run(feed)
            if number == 0:
                _check_finite(runner.fetch(result), name=name, provider=runner.provider)
            del result


def _check_finite(outputs: Mapping[str, np.ndarray], *, name: str, provider: str) -> None:
    for output, values in outputs.items():
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"outputs must be finite to be timed, but {output} of the {name} model has NaN or infinity on "
                f"{provider}; try dtype float32"
            )


def _run_in_turns(runners: Sequence[Runtime], feeds: Sequence[Any], timing: Timing) -> list[list[int]]:
    """Return the times in nanoseconds, one list per round, in the order of `runners`."""
    rounds: list[list[int]] = []
    total_ns = 0
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        while len(rounds) < timing.repeats or total_ns < timing.min_seconds * 1e9:
            elapsed_ns = [0] * len(runners)
            for index in _ORDERS[len(rounds) % len(_ORDERS)]:
                elapsed_ns[index] = runners[index].time_ns(feeds[index])
            rounds.append(elapsed_ns)
            total_ns += sum(elapsed_ns)
    finally:
        if collecting:
            gc.enable()
    return rounds
