"""Export, count and time the two models of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..gguf.export import GgufExport
from ..measure import counts
from ..measure.compare import time_on
from ..measure.counts import Both, FlopCount, Shape, StoredBytes
from ..measure.forms import Forms
from ..measure.rows import LatencyRow
from ..measure.timing import Timing
from ..report.details import FlopsByLayer
from ..units import PrunableModule


@dataclass(frozen=True)
class MeasureOptions:
    """Which runtimes to time on, each with a dtype (None: as the models are), and how often."""

    ways: tuple[tuple[str, str | None], ...]
    timing: Timing


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
    exported = forms.export("slim", forms.exporter.options.unquantized)
    flops = counts.count_both_flops(dense, slim, batches)
    shape = next(iter(batches))
    dense_layers, slim_layers = (counts.flops_per_layer(m, batches[shape], modules) for m in (dense, slim))
    cache = [counts.cache_bytes_per_token(model) for model in (dense, slim)]
    latency = []
    # All exports come first, because one may fail.
    served = [[forms.served(name, *way) for name in ("dense", "slim")] for way in options.ways]
    for both in served:
        runtime, dtype = both[0].runtime, both[0].dtype
        progress.stage(f"time both models on {runtime}" + ("" if dtype is None else f" in {dtype}"))
        latency += time_on(*both, batches=batches, flops=flops, timing=options.timing, progress=progress)
    of_gguf = isinstance(exported, GgufExport)
    return Measurements(
        parameters=Both(counts.count_parameters(dense), counts.count_parameters(slim)),
        bytes=StoredBytes(
            *(stored.dense, stored.slim),
            onnx=None if of_gguf else exported.bytes,
            gguf=exported.bytes if of_gguf else None,
        ),
        flops=flops[shape],
        flops_per_layer=FlopsByLayer(dense_layers, slim_layers, shape),
        cache_bytes_per_token=None if cache[0] is None or cache[1] is None else Both(cache[0], cache[1]),
        latency=latency,
    )
