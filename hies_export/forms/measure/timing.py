"""Run loaded models in turns, the first one twice, and return the time of each run."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...errors import NonFiniteError, RecipeError
from ..runtimes.base import Runtime
from .machine import gpu_facts

# What is timed: a forward pass (for models that generate: a prompt or one token), or a data set's rows in batches.
Phase = Literal["forward", "prefill", "decode", "rows"]


@dataclass(frozen=True)
class Timing:
    """The number of runs of each model.

    Attributes:
        repeats: Least number of timed runs of each model; a multiple of 6 balances the order of three exactly.
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
    """The conditions under which models were timed.

    Attributes:
        threads: CPU threads within an operator.
        provider: Device or execution provider of the first.
        dtypes: Dtypes that the models computed in.
        peak_bytes: Their peak device memory during a run; None on the CPU.
        cuda_graph: Whether replays of CUDA graphs were timed.
        clock_mhz: The GPU's clock right after the last run; None on the CPU.
    """

    threads: int
    provider: str
    dtypes: tuple[str, ...]
    cuda_graph: bool
    peak_bytes: tuple[int, ...] | None
    clock_mhz: float | None


@dataclass(frozen=True, kw_only=True)
class Rounds(Conditions):
    """The times of all models, then of the control, in ms, (rounds, models + 1), from one load of each."""

    times_ms: np.ndarray


def time_rounds(
    runners: Sequence[Runtime],
    *,
    batch: Mapping[str, Any],
    timing: Timing,
    phase: Phase = "forward",
    across: bool = False,
) -> Rounds:
    """Time models in turns, as `compare_latency` does; the last runner is the control, the first model again.

    The control may be the same object as the first. With `across`, the models may run on different runtimes.
    """
    if phase == "decode" and not all(runner.decodes for runner in runners):
        raise RecipeError(
            ["a decode step needs models that generate from a cache, and these do not: time the forward pass"]
        )
    feeds = [runner.prepare_step(batch) if phase == "decode" else runner.prepare(batch) for runner in runners]
    _check_alike(runners, across=across)
    _warm_up(runners, feeds, timing.warmup)
    times_ns = _run_in_turns(runners, feeds, timing)
    # The model that is loaded first also accounts for the runtime's kernels, so its memory is read from the control.
    places = [len(runners) - 1, *range(1, len(runners) - 1)]
    peaks = [peak for i in places if (peak := runners[i].peak_memory_bytes(feeds[i])) is not None]
    clock_mhz = gpu_facts().get("clocks.sm") if peaks else None
    return Rounds(
        times_ms=np.asarray(times_ns, dtype=np.float64) / 1e6,
        threads=runners[0].threads,
        provider=runners[0].provider,
        dtypes=tuple(runner.dtype for runner in runners[:-1]),
        cuda_graph=runners[0].cuda_graph,
        peak_bytes=tuple(peaks) if len(peaks) == len(places) else None,
        clock_mhz=None if clock_mhz is None else float(clock_mhz),
    )


def _check_alike(runners: Sequence[Runtime], *, across: bool) -> None:
    """Refuse runners that differ in threads or, on one runtime, in provider or use of CUDA graphs.

    To be called after `prepare`, which is when a CUDA graph is captured.
    """
    places = {(runner.provider, runner.threads, runner.cuda_graph) for runner in runners}
    if len({threads for _, threads, _ in places} if across else places) > 1:
        shown = " and ".join(
            f"{provider} with {threads} threads{', as a CUDA graph' * graph}"
            for provider, threads, graph in sorted(places)
        )
        raise RecipeError([f"dense, slim and control must run alike, got {shown}: load them with the same runtime"])


def _warm_up(runners: Sequence[Runtime], feeds: Sequence[Any], rounds: int) -> None:
    others = [f"other {index}" for index in range(2, len(runners) - 1)]
    names = ["dense", "slim", *others, "control"]
    for number in range(rounds):
        for name, runner, feed in zip(names, runners, feeds, strict=True):
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
    """Return the times in nanoseconds, one list per round, in the order of `runners`.

    Consecutive orders are reversed (ABBA), so linear drift cancels. See `balanced_order`.
    """
    rounds: list[list[int]] = []
    total_ns = 0
    with collecting_paused():
        while len(rounds) < timing.repeats or total_ns < timing.min_seconds * 1e9:
            elapsed_ns = [0] * len(runners)
            for index in balanced_order(len(runners), len(rounds)):
                elapsed_ns[index] = runners[index].time_ns(feeds[index])
            rounds.append(elapsed_ns)
            total_ns += sum(elapsed_ns)
    return rounds


@contextmanager
def collecting_paused() -> Iterator[None]:
    """Collect garbage now, and not again before the end of the block."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def balanced_order(count: int, number: int) -> list[int]:
    """Return the numbers below `count` in the order of a round; an odd round reverses the one before it.

    Over 2 * count rounds, each number comes equally often at each place, equally often after itself, and equally often
    after each other one. What one model leaves behind, such as a full cache or threads that still spin, then costs all
    others alike. Source: Williams (1949), https://doi.org/10.1071/CH9490149.
    """
    # 0, 1, n - 1, 2, n - 2, ...: all differences of neighbours differ.
    first = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]
    order = [(index + number // 2) % count for index in first]
    return order[::-1] if number % 2 else order
