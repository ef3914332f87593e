"""Time two models side by side: the measure stage of a run, and `hies-export bench` for any two folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..runtimes.base import RUNTIMES, Runtime
from ..runtimes.registry import load_runtime
from . import counts, latency

Shape = tuple[int, int]  # (batch, sequence)


def time_on(
    runtime: str,
    dense: PreTrainedModel | Path,
    slim: PreTrainedModel | Path,
    *,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    flops: Mapping[Shape, tuple[int, int]],
    repeats: int,
    min_seconds: float = 0.0,
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Time two models on one runtime, interleaved, with the first one against itself as control.

    They are loaded as many times as the runtime's `loads` says, and the runs are shared out between the loads.

    Args:
        runtime: A name in `hies_export.measure.runtimes`.
        dense: What the ratios are relative to: a model for torch, an ONNX folder for ONNX Runtime.
        slim: What is compared with it.
        batches: What both run, by (batch, sequence).
        flops: Of both, from `count_both_flops`, for the realised share of the saving.
        repeats, min_seconds: As in `compare_latency`, over all loads; at least one run of every load.
        track: Wraps the loop over loads and shapes, e.g. in a progress bar.

    Returns:
        A row of report.json's `latency` per shape: the median times in ms, the paired ratio slim / dense with its 95 %
        bootstrap interval, and the control's. `noisy` where the control shows that nothing can be concluded. What
        generates has two rows per shape, the `phase` "prefill" and "decode": the step of the last token, with the
        others in the cache.
    """
    found = compare_loads(runtime, dense, slim, batches, repeats=repeats, min_seconds=min_seconds, track=track)
    rows = []
    for (shape, phase), comparison in found.items():
        # A step reads all weights to compute a token: its time is that of the memory, and no share of FLOPs.
        counted = None if phase == "decode" else flops[shape]
        rows.append(latency_row(comparison, runtime=runtime, shape=shape, phase=phase, flops=counted))
    return rows


def compare_loads(
    runtime: str,
    dense: PreTrainedModel | Path,
    slim: PreTrainedModel | Path,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    *,
    repeats: int,
    min_seconds: float = 0.0,
    decode: bool = True,
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None = None,
) -> dict[tuple[Shape, latency.Phase], latency.LatencyComparison]:
    """The comparisons behind `time_on`, by shape and phase; without `decode`, the prefill is all that is timed."""
    loads, shapes = max(1, min(RUNTIMES[runtime].loads, repeats)), list(batches)
    sources = (dense, slim, dense)
    runners: dict[int, Runtime] = {}
    timed: dict[tuple[Shape, latency.Phase], list[latency.Rounds]] = {}
    steps = [(number, shape) for number in range(loads) for shape in shapes]
    for number, shape in track(steps, f"measure {runtime}") if track else steps:
        if shape == shapes[0]:
            runners.clear()
            # What is loaded first tends to run fastest: each of the three is that in turn.
            for index in ((0, 1, 2), (1, 2, 0), (2, 0, 1))[number % 3]:
                runners[index] = load_runtime(runtime, sources[index])
        decodes = all(runner.decodes for runner in runners.values())
        phases: tuple[latency.Phase, ...] = ("prefill",) if decodes else ("forward",)
        for phase in (*phases, "decode") if decode and decodes and shape[1] > 1 else phases:
            rounds = latency.time_rounds(
                [runners[index] for index in range(3)],
                batch=batches[shape],
                phase=phase,
                repeats=math.ceil(repeats / loads),
                warmup=2 if number else 5,
                min_seconds=min_seconds / loads,
            )
            timed.setdefault((shape, phase), []).append(rounds)
    return {step: latency.compare_rounds(rounds) for step, rounds in timed.items()}


def latency_row(
    found: latency.LatencyComparison,
    *,
    runtime: str,
    shape: Shape,
    phase: latency.Phase = "forward",
    flops: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """A comparison as a row of report.json's `latency`; without FLOPs there is no realised share of their saving."""
    flops_ratio = None if flops is None else flops[1] / flops[0]
    per_second = {"dense": 1000 * shape[0] / found.dense.p50_ms, "slim": 1000 * shape[0] / found.slim.p50_ms}
    return {
        "runtime": runtime,
        "provider": found.provider,
        "dtype": " / ".join(dict.fromkeys(found.dtypes)),
        "phase": phase,
        "batch": shape[0],
        "sequence": shape[1],
        "dense_ms": found.dense.p50_ms,
        "slim_ms": found.slim.p50_ms,
        "ratio": found.ratio.median,
        "ratio_low": found.ratio.low,
        "ratio_high": found.ratio.high,
        "realised": None if flops_ratio is None else latency.realised_share(found.ratio.median, flops_ratio),
        "flops_ratio": flops_ratio,
        "tokens_per_second": per_second if phase == "decode" else None,
        "dense_p90_ms": found.dense.p90_ms,
        "dense_p99_ms": found.dense.p99_ms,
        "slim_p90_ms": found.slim.p90_ms,
        "slim_p99_ms": found.slim.p99_ms,
        "control_ratio": found.control.median,
        "control_low": found.control.low,
        "control_high": found.control.high,
        "noisy": found.noisy,
        "repeats": found.repeats,
        "loads": found.loads,
        "threads": found.threads,
        "cuda_graph": found.cuda_graph,
        "peak_bytes": None if found.peak_bytes is None else dict(zip(("dense", "slim"), found.peak_bytes, strict=True)),
        "gpu_clock_mhz": found.clock_mhz,
    }


def count_both_flops(
    dense: PreTrainedModel, slim: PreTrainedModel, batches: Mapping[Shape, Mapping[str, Tensor]]
) -> dict[Shape, tuple[int, int]]:
    """FLOPs of one forward pass of the two models, by (batch, sequence)."""
    return {s: (counts.count_flops(dense, b), counts.count_flops(slim, b)) for s, b in batches.items()}
