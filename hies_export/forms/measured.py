"""Count both models of a run, and time them on every runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..recipe.sections import ExportSection
from ..units.units import PrunableModule
from .cascade.export import CascadeOptions
from .form import Forms
from .formats import runtime_of
from .latency_rows import LatencyRow, latency_rows
from .measure import counts
from .measure.counts import Both, FlopCount, FlopsByLayer, Shape, StoredBytes
from .time import time

# The form that forms of a quantised model are compared with.
_FULL = ("onnxruntime-cpu", "float32")


@dataclass(frozen=True)
class MeasureOptions:
    """Which runtimes to time on, each with bits (None: as the models are), and how often."""

    ways: tuple[tuple[str, str | None], ...]
    repeats: int = 30
    min_seconds: float = 0.0

    def ways_to_judge(self, export: ExportSection, cascade: CascadeOptions | None) -> list[tuple[str, str]]:
        """Return the runtimes and bits to judge both models in: those measured, those exported, and float32.

        Empty if all are float32, unless a cascade is compared with them.
        """
        ways = [(name, bits) for name, bits in self.ways if bits is not None]
        if export.quantize is not None:
            fewer = [way for way in ways if way[1] != "float32"]
            own = runtime_of(export, export.quantize)
            ways = list(dict.fromkeys([_FULL, *([] if own is None else [(own, export.quantize)]), *fewer]))
        if cascade is not None:
            served = [] if cascade.quantize else [(cascade.runtime, cascade.bits)]
            return list(dict.fromkeys([_FULL, *ways, *served]))
        return [] if all(bits == "float32" for _, bits in ways) else ways


@dataclass(frozen=True)
class Measurements:
    """Size, FLOPs and latency of the dense and the slim model, in the types of the report.

    FLOPs are of one forward pass at the first measured shape; `bytes` are the sizes of the weight files.
    `cache_bytes_per_token` is what each token adds to the key/value cache; None without one.
    """

    parameters: Both[int]
    bytes: StoredBytes
    flops: FlopCount
    flops_per_layer: FlopsByLayer
    cache_bytes_per_token: Both[int] | None
    latency: list[LatencyRow]


def measure_both(
    forms: Forms,
    options: MeasureOptions,
    *,
    modules: Sequence[PrunableModule],
    batches: Mapping[Shape, Mapping[str, Tensor]],
    stored: Both[int],
) -> Measurements:
    """Count parameters, bytes and FLOPs of both models, and time them on every runtime and shape.

    FLOPs per layer are counted on the first of the batches.
    """
    dense, slim, progress = forms.model("dense"), forms.model("slim"), forms.progress
    exported = forms.plain("slim")
    flops = counts.count_both_flops(dense, slim, batches)
    shape = next(iter(batches))
    dense_layers, slim_layers = (counts.flops_per_layer(m, batches[shape], modules) for m in (dense, slim))
    cache, files = [counts.cache_bytes_per_token(model) for model in (dense, slim)], {exported.format: exported.bytes}
    latency = []
    # All exports come first, because one may fail; copies in other bits are made for one runtime at a time.
    forms.export_for(("dense", "slim"), options.ways)
    for runtime, bits in options.ways:
        progress.stage(f"time both models on {runtime}" + ("" if bits is None else f" in {bits}"))
        # Nothing else refers to these forms, whose models may be copies.
        latency += latency_rows(
            time(
                [forms.form(name, runtime, bits) for name in ("dense", "slim")],
                {shape: [batch] for shape, batch in batches.items()},
                repeats=options.repeats,
                min_seconds=options.min_seconds,
                decode=True,
                progress=progress,
            ),
            flops,
        )
    return Measurements(
        parameters=Both(counts.count_parameters(dense), counts.count_parameters(slim)),
        bytes=StoredBytes(stored.dense, stored.slim, *(files.get(format) for format in ("onnx", "gguf"))),
        flops=flops[shape],
        flops_per_layer=FlopsByLayer(dense_layers, slim_layers, shape),
        cache_bytes_per_token=None if cache[0] is None or cache[1] is None else Both(cache[0], cache[1]),
        latency=latency,
    )
