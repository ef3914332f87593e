"""Compare the latency of a slim model with its dense one, interleaved, beside a control that shows the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..runtimes.base import Runtime
from .ratios import Percentiles, Ratio, is_noisy, paired_ratio
from .timing import Conditions, Phase, Rounds, Timing, time_rounds


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
