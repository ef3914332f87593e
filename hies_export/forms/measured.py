"""Count both models of a run, and time them on every runtime, as report.json has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict
from torch import Tensor

from ..model.memory import let_go
from ..recipe.budget import LatencyBudget
from ..recipe.sections import ExportSection
from ..units import counts
from ..units.counts import Both, Counted, FlopCount, Ratio, Record, Shape, Size, StoredBytes
from .form import Compound, Forms
from .formats import runtime_of
from .runtimes.base import RUNTIMES
from .time import Phase, Timed, time

# The (runtime, bits) pair that quantised models and compounds are compared with.
_FULL = ("onnxruntime-cpu", "float32")


@dataclass(frozen=True)
class MeasureOptions:
    """Which runtimes to time on, each with bits (None: as the models are), and how often."""

    ways: tuple[tuple[str, str | None], ...]
    repeats: int = 30

    def ways_to_judge(self, export: ExportSection, compound: Compound | None) -> list[tuple[str, str]]:
        """Return the (runtime, bits) pairs to judge both models in: those of `ways` that have bits, and the export's.

        With a quantised export or a compound, float32 on ONNX Runtime comes first. Without either, the list is empty if
        all bits are float32.
        """
        ways = [(name, bits) for name, bits in self.ways if bits is not None]
        if export.quantize is not None:
            own = runtime_of(export, export.quantize)
            ways = [way for way in ways if way[1] != "float32"]
            ways = [_FULL, *([] if own is None else [(own, export.quantize)]), *ways]
        if compound is not None:
            ways = [_FULL, *ways]
        elif all(bits == "float32" for _, bits in ways):
            return []
        return list(dict.fromkeys(ways))


@dataclass(frozen=True, eq=False, kw_only=True)
class LatencyRow(Record):
    """The latency of two models on one runtime at one shape; where a field is also in `Timed`, its meaning is there.

    Fields are the keys of report.json, in its order. Rows of older versions may lack those with a default.

    Attributes:
        dtype: Dtype that they computed in; both, joined by " / ", if they differ.
        sequence: Tokens per row, as the attention sees them.
        dense_ms, slim_ms: Median times.
        ratio, ratio_low, ratio_high: Ratio slim / dense, with a 95 % interval.
        realised: Share of time saved / share of FLOPs saved; None without `flops_ratio`, or if no FLOPs were saved.
        flops_ratio: FLOPs slim / dense; None for a decode step.
        tokens_per_second: Over all rows: new tokens in a decode step, tokens read in a prefill; else None.
        control_ratio, control_low, control_high: The same ratio of a second copy of the dense model to the first (A/A).
        noisy: Whether the control shows too much noise for the ratio to be trusted.
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


def budget_rows(timed: LatencyBudget, rows: Iterable[LatencyRow]) -> list[LatencyRow]:
    """Return the rows on the runtime, at the shape and in the dtype of a latency budget, without decode steps."""
    where = (timed.runtime, timed.batch, timed.sequence)
    alike = [row for row in rows if (row.runtime, row.batch, row.sequence) == where and row.phase != "decode"]
    return [row for row in alike if timed.dtype in (None, row.dtype)]


@dataclass(frozen=True)
class Measurements:
    """Size, FLOPs and latency of the dense and the slim model, in the types of the report.

    FLOPs are of one forward pass at the first measured shape; `bytes` are the sizes of the weight files.
    `cache_bytes_per_token` is what each token adds to the key/value cache; None without one.
    """

    parameters: Counted
    bytes: StoredBytes
    flops: FlopCount
    cache_bytes_per_token: Both[int] | None
    latency: list[LatencyRow]


def measure_both(
    forms: Forms,
    options: MeasureOptions,
    *,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    stored: Both[int],
    dense: str = "dense",
) -> Measurements:
    """Count parameters, bytes and FLOPs of both models, and time them on every runtime and shape.

    `stored` are the bytes of the weights' files; `dense` is the name of the dense model among the forms.
    """
    names, progress = (dense, "slim"), forms.progress
    whole, slim = map(forms.model, names)
    exported = forms.plain("slim")
    flops = counts.count_both_flops(whole, slim, batches)
    cache, files = map(counts.cache_bytes_per_token, (whole, slim)), {exported.format: exported.bytes}
    latency = []
    # All exports come first, because one may fail; copies in other bits are made for one runtime at a time.
    for runtime, bits in options.ways:
        for name in () if RUNTIMES[runtime].reads_models else names:
            forms.export(name, forms.read_by(runtime, bits))
    in_lists = {shape: [batch] for shape, batch in batches.items()}
    how: dict[str, Any] = {"repeats": options.repeats, "progress": progress}
    for runtime, bits in options.ways:
        progress.stage(f"time both models on {runtime}" + ("" if bits is None else f" in {bits}"))
        # No variable holds these forms, so that the copies of models in them are freed before the next are made.
        latency += latency_rows(
            runtime, time([forms.form(name, runtime, bits) for name in names], in_lists, decode=True, **how), flops
        )
        for model in (whole, slim):
            let_go(model)  # the next runtime may hold weights of its own
    return Measurements(
        parameters=counts.count_both_parameters(whole, slim),
        bytes=StoredBytes(stored.dense, stored.slim, files.get("onnx"), files.get("gguf")),
        flops=flops[next(iter(batches))],
        cache_bytes_per_token=_both(*cache),
        latency=latency,
    )


def _both(dense: int | None, slim: int | None) -> Both[int] | None:
    return None if dense is None or slim is None else Both(dense, slim)


def latency_rows(runtime: str, timed: Sequence[Sequence[Timed]], flops: Mapping[Shape, FlopCount]) -> list[LatencyRow]:
    """Return rows of the times of two forms on a runtime, from `time`; without FLOPs of a shape, no `realised`.

    A decode step has none either: its time depends on memory, as it reads all weights to compute one token.
    """
    return [
        _row(runtime, dense, slim, None if dense.phase == "decode" else flops.get((dense.batch, dense.sequence)))
        for dense, slim in zip(*timed, strict=True)
    ]


def _row(runtime: str, dense: Timed, slim: Timed, flops: FlopCount | None) -> LatencyRow:
    """Return the times of both models at one shape and phase as a row; without FLOPs it has no `realised`."""
    tokens = {"decode": dense.batch, "prefill": dense.batch * dense.sequence}.get(dense.phase)
    same = ("provider", "phase", "batch", "sequence", "noisy", "repeats", "loads", "threads", "cuda_graph")
    times: dict[str, Any] = {
        **{name: getattr(dense, name) for name in same},
        **{name: getattr(slim, name) for name in ("ratio", "ratio_low", "ratio_high")},
        **{f"dense_{name}": getattr(dense, name) for name in ("ms", "p90_ms", "p99_ms")},
        **{f"slim_{name}": getattr(slim, name) for name in ("ms", "p90_ms", "p99_ms")},
    }
    return LatencyRow(
        **times,
        runtime=runtime,
        dtype=" / ".join(dict.fromkeys((dense.dtype, slim.dtype))),
        realised=None if flops is None else realised_share(slim.ratio, flops.ratio),
        flops_ratio=None if flops is None else flops.ratio,
        tokens_per_second=None if tokens is None else Both(1000 * tokens / dense.ms, 1000 * tokens / slim.ms),
        control_ratio=dense.ratio,
        control_low=dense.ratio_low,
        control_high=dense.ratio_high,
        peak_bytes=_both(dense.peak_bytes, slim.peak_bytes),
    )


def realised_share(latency_ratio: float, flops_ratio: float) -> float | None:
    """Return the share of time saved / the share of FLOPs saved; None if no FLOPs were saved."""
    return None if flops_ratio == 1 else (1 - latency_ratio) / (1 - flops_ratio)
