"""Count both models of a run, the dense and the slim one, and time them on every runtime, as report.json has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..data.batches import Batch
from ..model.memory import let_go
from ..recipe.budget import LatencyBudget
from ..recipe.sections import ExportSection
from ..units import counts
from ..units.counts import Both, Counted, FlopCount, Shape, StoredBytes
from .cascade.export import CascadeForm
from .form import Forms
from .formats import runtime_of
from .runtimes.base import RUNTIMES
from .time import TimedRow, time

# The (runtime, bits) pair that quantised models and cascades are compared with.
_FULL_PRECISION = ("onnxruntime-cpu", "float32")


@dataclass(frozen=True)
class MeasureOptions:
    """Which (runtime, bits) pairs to time, where bits None leaves the models as they are, and how often."""

    ways: tuple[tuple[str, str | None], ...]
    repeats: int = 30

    def ways_to_judge(self, export: ExportSection, cascade: CascadeForm | None) -> list[tuple[str, str]]:
        """Return the (runtime, bits) pairs to judge both models in: those of `ways` that have bits, and the export's.

        With a quantised export or a cascade, float32 on ONNX Runtime comes first. Without either, the list is empty if
        all bits are float32.
        """
        pairs = [(runtime, bits) for runtime, bits in self.ways if bits is not None]
        if export.quantize is not None:
            pairs = [(runtime, bits) for runtime, bits in pairs if bits != "float32"]
            runtime = runtime_of(export, export.quantize)
            if runtime is not None:
                pairs.insert(0, (runtime, export.quantize))
            pairs.insert(0, _FULL_PRECISION)
        if cascade is not None:
            pairs.insert(0, _FULL_PRECISION)
        elif all(bits == "float32" for _, bits in pairs):
            return []
        return list(dict.fromkeys(pairs))


def budget_rows(timed: LatencyBudget, rows: Iterable[TimedRow]) -> list[TimedRow]:
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
    latency: list[TimedRow]


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
        latency += latency_rows(timed, flops)
        for model in models:
            let_go(model)  # the next runtime may hold weights of its own
    dense_cache, slim_cache = map(counts.cache_bytes_per_token, models)
    both_caches = None if dense_cache is None or slim_cache is None else Both(dense_cache, slim_cache)
    return Measurements(
        parameters=counts.count_both_parameters(*models),
        bytes=StoredBytes(stored.dense, stored.slim, export_bytes.get("onnx"), export_bytes.get("gguf")),
        flops=next(iter(flops.values())),  # of the first shape
        cache_bytes_per_token=both_caches,
        latency=latency,
    )


def latency_rows(timed: Sequence[Sequence[TimedRow]], flops: Mapping[Shape, FlopCount]) -> list[TimedRow]:
    """Return the times of the second of two forms, from `time`, with what became of the FLOPs saved at each shape."""
    _, of_slim = timed
    rows = []
    for row in of_slim:
        counted = flops.get((row.batch, row.sequence))
        # The time of a decode step depends on memory: it reads all weights to compute one token.
        if counted is not None and row.phase != "decode":
            # The share of time saved / the share of FLOPs saved.
            realised = None if counted.ratio == 1 else (1 - row.ratio) / (1 - counted.ratio)
            row = replace(row, flops_ratio=counted.ratio, realised=realised)
        rows.append(row)
    return rows
