"""Count both models of a run, the dense and the slim one, and time them on every runtime, as report.json has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict

from ..data.batches import Batch
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
_FULL_PRECISION = ("onnxruntime-cpu", "float32")


@dataclass(frozen=True)
class MeasureOptions:
    """Which (runtime, bits) pairs to time, where bits None leaves the models as they are, and how often."""

    ways: tuple[tuple[str, str | None], ...]
    repeats: int = 30

    def ways_to_judge(self, export: ExportSection, compound: Compound | None) -> list[tuple[str, str]]:
        """Return the (runtime, bits) pairs to judge both models in: those of `ways` that have bits, and the export's.

        With a quantised export or a compound, float32 on ONNX Runtime comes first. Without either, the list is empty if
        all bits are float32.
        """
        pairs = [(runtime, bits) for runtime, bits in self.ways if bits is not None]
        if export.quantize is not None:
            pairs = [(runtime, bits) for runtime, bits in pairs if bits != "float32"]
            runtime = runtime_of(export, export.quantize)
            if runtime is not None:
                pairs.insert(0, (runtime, export.quantize))
            pairs.insert(0, _FULL_PRECISION)
        if compound is not None:
            pairs.insert(0, _FULL_PRECISION)
        elif all(bits == "float32" for _, bits in pairs):
            return []
        return list(dict.fromkeys(pairs))


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
    asked = (timed.runtime, timed.batch, timed.sequence)
    at_shape = [row for row in rows if (row.runtime, row.batch, row.sequence) == asked and row.phase != "decode"]
    return [row for row in at_shape if timed.dtype in (None, row.dtype)]


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
    forms: Forms, options: MeasureOptions, *, batches: Mapping[Shape, Batch], stored: Both[int], dense: str = "dense"
) -> Measurements:
    """Count parameters, bytes and FLOPs of both models, and time them on every runtime and shape.

    `stored` are the bytes of the weights' files; `dense` is the name of the dense model among the forms.
    """
    names, models = (dense, "slim"), (forms.model(dense), forms.model("slim"))
    exported = forms.plain("slim")
    export_bytes = {exported.format: exported.bytes}
    flops = counts.count_both_flops(*models, batches)
    latency = []
    # All exports come first, because one may fail; copies in other bits are made for one runtime at a time.
    for runtime, bits in options.ways:
        if not RUNTIMES[runtime].reads_models:
            for name in names:
                forms.export(name, forms.options_for(runtime, bits))
    in_lists = {shape: [batch] for shape, batch in batches.items()}
    how: dict[str, Any] = {"decode": True, "repeats": options.repeats, "progress": forms.progress}
    for runtime, bits in options.ways:
        forms.progress.stage(f"time both models on {runtime}" + ("" if bits is None else f" in {bits}"))
        # No variable holds these forms, so that the copies of models in them are freed before the next are made.
        timed = time([forms.form(name, runtime, bits) for name in names], in_lists, **how)
        latency += latency_rows(runtime, timed, flops)
        for model in models:
            let_go(model)  # the next runtime may hold weights of its own
    return Measurements(
        parameters=counts.count_both_parameters(*models),
        bytes=StoredBytes(stored.dense, stored.slim, export_bytes.get("onnx"), export_bytes.get("gguf")),
        flops=next(iter(flops.values())),  # of the first shape
        cache_bytes_per_token=_both(*map(counts.cache_bytes_per_token, models)),
        latency=latency,
    )


def _both(dense: int | None, slim: int | None) -> Both[int] | None:
    """Return both numbers as a pair; None if either is missing."""
    return None if dense is None or slim is None else Both(dense, slim)


def latency_rows(runtime: str, timed: Sequence[Sequence[Timed]], flops: Mapping[Shape, FlopCount]) -> list[LatencyRow]:
    """Return rows of the times of two forms on a runtime, from `time`; without FLOPs of a shape, no `realised`."""
    return [
        _row(runtime, dense, slim, flops.get((dense.batch, dense.sequence))) for dense, slim in zip(*timed, strict=True)
    ]


def _row(runtime: str, dense: Timed, slim: Timed, flops: FlopCount | None) -> LatencyRow:
    """Return the times of both models at one shape and phase as a row; without FLOPs it has no `realised`."""
    if dense.phase == "decode":
        flops = None  # the time depends on memory: a decode step reads all weights to compute one token
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
