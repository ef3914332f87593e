"""Say in one row what a comparison found: a row of report.json's `latency`."""

from __future__ import annotations

from dataclasses import dataclass

from .counts import Both, FlopCount, Shape
from .latency import LatencyComparison
from .ratios import realised_share
from .timing import Phase


@dataclass(frozen=True)
class LatencyRow:
    """Two models on one runtime at one shape; `asdict` is the row of report.json, its keys in this order."""

    runtime: str
    provider: str  # where both ran, read from the loaded models
    dtype: str  # "dense / slim" where they differ
    phase: Phase
    batch: int
    sequence: int  # tokens per row, as the attention sees them
    dense_ms: float  # median over all runs
    slim_ms: float
    ratio: float  # median of the paired ratios slim / dense, and its 95 % interval
    ratio_low: float
    ratio_high: float
    realised: float | None  # share of the FLOPs saved that was saved in time; not of a decode step
    flops_ratio: float | None  # slim / dense; not of a decode step
    tokens_per_second: Both[float] | None  # over all rows; of a decode step only
    dense_p90_ms: float
    dense_p99_ms: float
    slim_p90_ms: float
    slim_p99_ms: float
    control_ratio: float  # of the dense model to itself (A/A)
    control_low: float
    control_high: float
    noisy: bool  # by the control, the ratio means nothing
    repeats: int  # timed runs of each model, over all loads
    loads: int
    threads: int
    cuda_graph: bool
    peak_bytes: Both[int] | None  # device memory; None on the CPU
    gpu_clock_mhz: float | None

    @classmethod
    def of(
        cls,
        found: LatencyComparison,
        *,
        runtime: str,
        shape: Shape,
        phase: Phase = "forward",
        flops: FlopCount | None = None,
    ) -> LatencyRow:
        """Write a comparison as a row; without `flops` it has no realised share of the saving."""
        dense, slim, batch = found.dense, found.slim, shape[0]
        decoded = Both(1000 * batch / dense.p50_ms, 1000 * batch / slim.p50_ms) if phase == "decode" else None
        return cls(
            runtime=runtime,
            provider=found.provider,
            dtype=" / ".join(dict.fromkeys(found.dtypes)),
            phase=phase,
            batch=batch,
            sequence=shape[1],
            dense_ms=dense.p50_ms,
            slim_ms=slim.p50_ms,
            ratio=found.ratio.median,
            ratio_low=found.ratio.low,
            ratio_high=found.ratio.high,
            realised=None if flops is None else realised_share(found.ratio.median, flops.ratio),
            flops_ratio=None if flops is None else flops.ratio,
            tokens_per_second=decoded,
            dense_p90_ms=dense.p90_ms,
            dense_p99_ms=dense.p99_ms,
            slim_p90_ms=slim.p90_ms,
            slim_p99_ms=slim.p99_ms,
            control_ratio=found.control.median,
            control_low=found.control.low,
            control_high=found.control.high,
            noisy=found.noisy,
            repeats=found.repeats,
            loads=found.loads,
            threads=found.threads,
            cuda_graph=found.cuda_graph,
            peak_bytes=None if found.peak_bytes is None else Both(*found.peak_bytes),
            gpu_clock_mhz=found.clock_mhz,
        )
