"""Write a comparison as one row of report.json's `latency`, and mark rows that contradict others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import ConfigDict

from .counts import Both, FlopCount, Ratio, Shape, Size
from .ratios import WIDEST_CONTROL, LatencyComparison, RowsTime, realised_share
from .record import Record
from .timing import Phase


@dataclass(frozen=True, eq=False, kw_only=True)
class LatencyRow(Record):
    """The latency of two models on one runtime at one shape.

    Fields are the keys of report.json, in its order. Rows of older versions may lack those with a default.

    Attributes:
        provider: Device or execution provider that both ran on, as the loaded runtime reports it.
        dtype: Dtype that they computed in; both, joined by " / ", if they differ.
        sequence: Tokens per row, as the attention sees them.
        dense_ms, slim_ms: Median times.
        ratio, ratio_low, ratio_high: Median of the paired ratios slim / dense, with a 95 % interval.
        realised: Share of time saved / share of FLOPs saved; None for a decode step, or if no FLOPs were saved.
        flops_ratio: FLOPs slim / dense; None for a decode step.
        tokens_per_second: Over all rows: new tokens in a decode step, tokens read in a prefill; else None.
        control_ratio, control_low, control_high: The same ratio of a second copy of the dense model to the first (A/A).
        noisy: Whether the control shows too much noise for the ratio to be trusted, or the row took longer than one
            with more to compute (`with_contradictions`).
        repeats, loads: Number of timed runs of each model, and of times the models were loaded.
        threads: CPU threads within an operator.
        cuda_graph: Whether replays of CUDA graphs were timed.
        peak_bytes: Peak device memory during a run; None on the CPU.
        gpu_clock_mhz: The GPU's clock right after the last run; None on the CPU.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)

    runtime: str
    provider: str = ""
    dtype: str = "float32"
    phase: Phase = "forward"
    batch: int
    sequence: int
    dense_ms: float
    slim_ms: float
    ratio: Ratio
    ratio_low: Ratio
    ratio_high: Ratio
    realised: float | None = None
    flops_ratio: float | None = None
    tokens_per_second: Both[float] | None = None
    dense_p90_ms: float | None = None
    dense_p99_ms: float | None = None
    slim_p90_ms: float | None = None
    slim_p99_ms: float | None = None
    control_ratio: Ratio
    control_low: Ratio
    control_high: Ratio
    noisy: bool = False
    repeats: int | None = None
    loads: int = 1
    threads: int | None = None
    cuda_graph: bool = False
    peak_bytes: Both[Size] | None = None
    gpu_clock_mhz: float | None = None

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
        """Return a comparison as a row; without `flops`, `realised` and `flops_ratio` are None."""
        dense, slim, batch = found.dense, found.slim, shape[0]
        tokens = {"decode": batch, "prefill": batch * shape[1]}.get(phase)
        speed = None if tokens is None else Both(1000 * tokens / dense.p50_ms, 1000 * tokens / slim.p50_ms)
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
            tokens_per_second=speed,
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

    @classmethod
    def on_rows(cls, dense: RowsTime, slim: RowsTime, *, runtime: str, batch: int) -> LatencyRow:
        """Return the times of two models on the rows of a data set as a row; times are means, `repeats` batches."""
        return cls(
            runtime=runtime,
            provider=dense.provider,
            dtype=" / ".join(dict.fromkeys((dense.dtype, slim.dtype))),
            phase="rows",
            batch=batch,
            sequence=dense.tokens,
            dense_ms=dense.ms,
            slim_ms=slim.ms,
            ratio=slim.ratio.median,
            ratio_low=slim.ratio.low,
            ratio_high=slim.ratio.high,
            control_ratio=slim.control.median,
            control_low=slim.control.low,
            control_high=slim.control.high,
            noisy=slim.noisy,
            repeats=dense.batches,
            loads=dense.loads,
            threads=dense.threads,
        )


def with_contradictions(rows: Sequence[LatencyRow]) -> list[LatencyRow]:
    """Return the rows; a row is marked noisy if it took clearly longer than one with more to compute.

    A larger batch or a longer sequence cannot take less time in the same phase, dtype and runtime, for either model.
    Disturbances add time and never take any away, so the row with less to compute is the wrong one.
    """
    return [replace(row, noisy=True) if any(_contradicts(row, other) for other in rows) else row for row in rows]


def _contradicts(row: LatencyRow, larger: LatencyRow) -> bool:
    """Return whether a row took clearly longer than another that has at least as much of everything to compute."""
    kinds = [(one.runtime, one.provider, one.dtype, one.phase, one.get("model")) for one in (row, larger)]
    shapes = (row.batch, row.sequence), (larger.batch, larger.sequence)
    if kinds[0] != kinds[1] or shapes[0] == shapes[1] or any(a > b for a, b in zip(*shapes, strict=True)):
        return False
    slower = 1 + WIDEST_CONTROL
    return row.dense_ms > slower * larger.dense_ms or row.slim_ms > slower * larger.slim_ms
