"""Time two models side by side on a runtime: for a run, and for `hies-export bench` of any two folders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from ..progress import SILENT, Progress
from ..runtimes.base import RUNTIMES, Runtime
from ..runtimes.registry import load_runtime
from .counts import FlopCount, Shape
from .latency import LatencyComparison, compare_rounds
from .rows import LatencyRow
from .timing import Phase, Rounds, Timing, time_rounds


def time_on(
    runtime: str,
    dense: PreTrainedModel | Path,
    slim: PreTrainedModel | Path,
    *,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    flops: Mapping[Shape, FlopCount],
    timing: Timing,
    progress: Progress = SILENT,
) -> list[LatencyRow]:
    """Time two models on one runtime, interleaved, with the first one against itself as control.

    They are loaded as many times as the runtime's `loads` says, and the runs are shared out between the loads.

    Args:
        runtime: A name in `hies_export.runtimes.base.RUNTIMES`.
        dense: What the ratios are relative to: a model for torch, an ONNX folder for ONNX Runtime.
        slim: What is compared with it.
        batches: What both run, by (batch, sequence).
        flops: Of both, from `count_both_flops`, for the realised share of the saving.
        timing: How often each is run over all loads together; every load is run once at least.
        progress: Told about the loop over loads and shapes.

    Returns:
        One row per shape, with times in ms. A model that generates has two, of the phases "prefill" and "decode".
    """
    found = compare_loads(runtime, dense, slim, batches, timing=timing, progress=progress)
    # A decode step reads all weights to compute one token: memory decides its time, and no share of FLOPs does.
    return [
        LatencyRow.of(
            comparison, runtime=runtime, shape=shape, phase=phase, flops=None if phase == "decode" else flops[shape]
        )
        for (shape, phase), comparison in found.items()
    ]


def compare_loads(
    runtime: str,
    dense: PreTrainedModel | Path,
    slim: PreTrainedModel | Path,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    *,
    timing: Timing,
    decode: bool = True,
    progress: Progress = SILENT,
) -> dict[tuple[Shape, Phase], LatencyComparison]:
    """Return the comparisons behind `time_on`, by shape and phase; without `decode`, no decode step is timed."""
    loads, shapes = min(RUNTIMES[runtime].loads, timing.repeats), list(batches)
    share = replace(timing, repeats=math.ceil(timing.repeats / loads), min_seconds=timing.min_seconds / loads)
    sources = (dense, slim, dense)
    runners: dict[int, Runtime] = {}
    timed: dict[tuple[Shape, Phase], list[Rounds]] = {}
    steps = [(number, shape) for number in range(loads) for shape in shapes]
    for number, shape in progress.track(steps, f"measure {runtime}"):
        if shape == shapes[0]:
            runners.clear()
            # What is loaded first tends to run fastest: each of the three is that in turn.
            for index in ((0, 1, 2), (1, 2, 0), (2, 0, 1))[number % 3]:
                runners[index] = load_runtime(runtime, sources[index])
        decodes = all(runner.decodes for runner in runners.values())
        phases: tuple[Phase, ...] = ("prefill",) if decodes else ("forward",)
        for phase in (*phases, "decode") if decode and decodes and shape[1] > 1 else phases:
            rounds = time_rounds(
                [runners[index] for index in range(3)],
                batch=batches[shape],
                # Later loads find the machine warm.
                timing=replace(share, warmup=2) if number else share,
                phase=phase,
            )
            timed.setdefault((shape, phase), []).append(rounds)
    return {step: compare_rounds(rounds) for step, rounds in timed.items()}
