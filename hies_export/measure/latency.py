"""Compare the latency of a slim model with its dense one, interleaved, beside a control that shows the noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..runtimes.base import Runtime
from .ratios import Percentiles, Ratio, is_noisy, paired_ratio
from .timing import Conditions, Phase, Rounds, Timing, time_rounds


@dataclass(frozen=True, kw_only=True)
class LatencyComparison(Conditions):
    """The latency of dense and slim, timed together, and how that was done.

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


def compare_latency(
    dense: Runtime,
    slim: Runtime,
    *,
    batch: Mapping[str, Any],
    phase: Phase = "forward",
    seed: int = 0,
    control: Runtime | None = None,
    progress: Callable[[int, int], object] | None = None,
    **timing: Any,
) -> LatencyComparison:
    """Time two loaded models interleaved in one process, with an A/A control beside them.

    How much times differ from load to load shows only when models are loaded again: then call `time_rounds` on every
    load, and `compare_rounds` on all of them.

    Args:
        dense: The model to compare with.
        slim: The model to compare.
        batch: The batch each of them runs, prepared once.
        phase: "forward" times all tokens at once; of a model that generates it is called "prefill". "decode" times the
            step that takes the last token, with the others in the cache.
        seed: Of the bootstrap.
        control: The dense model loaded a second time; by default `dense` itself, which cannot show
            what a second copy in memory costs.
        progress: Called with (rounds done, rounds at least).
        **timing: `repeats` (30), `warmup` (5) and `min_seconds` (0), as in `Timing`.

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
    runners = (dense, slim, control or dense)
    rounds = time_rounds(runners, batch=batch, timing=Timing(**timing), phase=phase, progress=progress)
    return compare_rounds([rounds], seed=seed)


def compare_rounds(loads: Sequence[Rounds], *, seed: int = 0) -> LatencyComparison:
    """Compare dense and slim over the rounds of one or more loads of the same models.

    Args:
        loads: From `time_rounds`, at least one.
        seed: Of the bootstrap.
    """
    # Memory is that of the first load, as for a single one; the clock that of the last run.
    conditions = {field.name: getattr(loads[0], field.name) for field in fields(Conditions)}
    times_ms = np.concatenate([load.times_ms for load in loads])
    return LatencyComparison(
        dense=Percentiles.of(times_ms[:, 0]),
        slim=Percentiles.of(times_ms[:, 1]),
        ratio=paired_ratio([load.times_ms[:, [0, 2]] for load in loads], [load.times_ms[:, 1] for load in loads], seed),
        control=paired_ratio([load.times_ms[:, [0]] for load in loads], [load.times_ms[:, 2] for load in loads], seed),
        repeats=len(times_ms),
        loads=len(loads),
        **conditions | {"clock_mhz": loads[-1].clock_mhz},
    )
