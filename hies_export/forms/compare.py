"""Time forms beside each other, interleaved and over several loads."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..progress import SILENT, Progress
from .form import Form
from .measure.counts import FlopCount, Shape
from .measure.latency_rows import LatencyRow, with_contradictions
from .measure.ratios import LatencyComparison, compare_rounds
from .measure.timing import Phase, Rounds, Timing, balanced_order, time_rounds
from .runtimes.base import RUNTIMES, Runtime

logger = logging.getLogger(__name__)

Step = tuple[Shape, Phase]


def time_on(
    dense: Form,
    slim: Form,
    *,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    flops: Mapping[Shape, FlopCount],
    timing: Timing,
    progress: Progress = SILENT,
) -> list[LatencyRow]:
    """Time two models on one runtime, interleaved, with a second copy of the first as control.

    They are loaded `Runtime.loads` times. The runs of `timing` are divided among the loads, each at least one. Each
    shape gives one row, with times in ms and ratios to `dense`; for models that generate it gives two, "prefill" and
    "decode".
    """
    found = compare_two(dense, slim, batches, timing=timing, progress=progress)
    # The time of a decode step depends on memory rather than FLOPs: it reads all weights to compute one token.
    return with_contradictions(
        [
            LatencyRow.of(
                comparison,
                runtime=dense.runtime,
                shape=shape,
                phase=phase,
                flops=None if phase == "decode" else flops[shape],
            )
            for (shape, phase), comparison in found.items()
        ]
    )


def compare_two(
    dense: Form,
    slim: Form,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    *,
    timing: Timing,
    decode: bool = True,
    progress: Progress = SILENT,
) -> dict[Step, LatencyComparison]:
    """Time two models as `compare_forms` does; return the comparisons by shape and phase."""
    found = compare_forms([dense, slim], batches, timing=timing, decode=decode, progress=progress)
    return {step: comparison for step, (comparison,) in found.items()}


def compare_forms(
    forms: Sequence[Form],
    batches: Mapping[Shape, Mapping[str, Tensor]],
    *,
    timing: Timing,
    decode: bool = True,
    progress: Progress = SILENT,
) -> dict[Step, list[LatencyComparison]]:
    """Time models on any runtimes, all interleaved; return, by shape and phase, how each compares with the first.

    All are loaded as often as the most demanding runtime needs, and the first one twice, as control.
    """
    runtimes = dict.fromkeys(form.runtime for form in forms)
    loads, shapes = min(max(RUNTIMES[name].loads for name in runtimes), timing.repeats), list(batches)
    share = replace(timing, repeats=math.ceil(timing.repeats / loads), min_seconds=timing.min_seconds / loads)
    loaded = [*forms, forms[0]]
    runners: dict[int, Runtime] = {}
    timed: dict[Step, list[Rounds]] = {}
    steps = [(number, shape) for number in range(loads) for shape in shapes]
    for number, shape in progress.track(steps, f"measure {', '.join(runtimes)}"):
        if shape == shapes[0]:
            runners.clear()
            # The model that is loaded first tends to run fastest, so the order rotates.
            runners.update({index: loaded[index].load() for index in balanced_order(len(loaded), 2 * number)})
        decodes = all(runner.decodes for runner in runners.values())
        phases: tuple[Phase, ...] = ("prefill",) if decodes else ("forward",)
        for phase in (*phases, "decode") if decode and decodes and shape[1] > 1 else phases:
            rounds = time_rounds(
                [runners[index] for index in range(len(loaded))],
                batch=batches[shape],
                # The machine is warm by the second load.
                timing=replace(share, warmup=2) if number else share,
                phase=phase,
                across=len(runtimes) > 1,
            )
            timed.setdefault((shape, phase), []).append(rounds)
    others = range(1, len(forms))
    return {step: [compare_rounds(rounds, model=index) for index in others] for step, rounds in timed.items()}
