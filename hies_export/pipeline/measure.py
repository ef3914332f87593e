"""Export, count and time the two models of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..gguf.export import GgufExport
from ..measure import counts
from ..measure.compare import time_on
from ..measure.counts import Both, FlopCount, LayerFlops, Shape, StoredBytes
from ..measure.rows import LatencyRow
from ..measure.timing import Timing
from ..model.copies import convert
from ..progress import Progress
from ..runtimes.base import Format
from ..runtimes.registry import RUNTIMES
from .export import Exported, export
from .options import ExportOptions
from .prepare import Prepared


@dataclass(frozen=True)
class FlopsByLayer:
    """FLOPs of both models by layer, for one forward pass at `shape`, (batch, sequence)."""

    dense: list[LayerFlops]
    slim: list[LayerFlops]
    shape: Shape


@dataclass(frozen=True)
class MeasureOptions:
    """What is timed: on which runtimes, in which dtypes (by default as the models are), and how often."""

    runtimes: tuple[str, ...]
    dtypes: tuple[str, ...]
    timing: Timing


@dataclass(frozen=True)
class Measurements:
    """Size, FLOPs and latency of the dense and the slim model, in the types of the report.

    Attributes:
        parameters: Number of parameters.
        bytes: Size of the files of weights in bytes.
        flops: Floating-point operations of one forward pass at the first measured shape.
        flops_per_layer: The same by layer.
        cache_bytes_per_token: Bytes that each token adds to the key/value cache; None without a cache.
        latency: One row per runtime, dtype, phase and shape.
    """

    parameters: Both[int]
    bytes: StoredBytes
    flops: FlopCount
    flops_per_layer: FlopsByLayer
    cache_bytes_per_token: Both[int] | None
    latency: list[LatencyRow]


def measure_both(
    prepared: Prepared,
    slim: PreTrainedModel,
    exported: Exported,
    exporting: ExportOptions,
    measuring: MeasureOptions,
    *,
    stored: Both[int],
    progress: Progress,
) -> Measurements:
    """Count parameters, bytes and FLOPs of both models, and time them on every runtime and shape.

    Args:
        prepared: The dense model and the batches to time with.
        slim: The slim model.
        exported: What the slim model was exported to.
        exporting: How it was exported, and how the dense model is.
        measuring: What is timed, and how often.
        stored: Bytes of the files of weights of both.
        progress: Shows stages and loops.
    """
    dense, batches = prepared.model, prepared.measured
    flops = counts.count_both_flops(dense, slim, batches)
    shape = next(iter(batches))
    dense_layers, slim_layers = (counts.flops_per_layer(m, batches[shape], prepared.modules) for m in (dense, slim))
    cache = [counts.cache_bytes_per_token(model) for model in (dense, slim)]
    return Measurements(
        parameters=Both(counts.count_parameters(dense), counts.count_parameters(slim)),
        bytes=StoredBytes(stored.dense, stored.slim, **_exported_bytes(exported)),
        flops=flops[shape],
        flops_per_layer=FlopsByLayer(dense_layers, slim_layers, shape),
        cache_bytes_per_token=None if cache[0] is None or cache[1] is None else Both(cache[0], cache[1]),
        latency=_time(prepared, slim, exported, exporting, measuring, flops=flops, progress=progress),
    )


def _exported_bytes(exported: Exported) -> dict[str, int | None]:
    """Return the size of what was exported, by format."""
    of_gguf = isinstance(exported, GgufExport)
    return {"onnx": None if of_gguf else exported.bytes, "gguf": exported.bytes if of_gguf else None}


def _time(
    prepared: Prepared,
    slim: PreTrainedModel,
    exported: Exported,
    exporting: ExportOptions,
    measuring: MeasureOptions,
    *,
    flops: Mapping[Shape, FlopCount],
    progress: Progress,
) -> list[LatencyRow]:
    """Time both models in every dtype and on every runtime.

    What is exported of the dense model is temporary, and of the slim model where it is in another format or dtype than
    it was exported to.
    """
    rows = []
    for dtype in measuring.dtypes or (None,):
        runtimes = [name for name in measuring.runtimes if dtype is None or dtype in RUNTIMES[name].dtypes]
        # In the folder of the exported slim model, so that both are read from the same disk.
        with tempfile.TemporaryDirectory(prefix=".dense-", dir=exported.folder.parent) as temporary:
            # Format and dtype of the export that each runtime reads; some compute a float32 graph in another dtype.
            needed = {
                name: (RUNTIMES[name].format, dtype if dtype is None else RUNTIMES[name].exported_in(dtype))
                for name in runtimes
                if not RUNTIMES[name].reads_models
            }
            folders = {}
            for wanted in dict.fromkeys(needed.values()):
                progress.stage("export the dense model, to compare with")
                folders[wanted] = _export_both(prepared, slim, exported, exporting, Path(temporary), *wanted)
            progress.stage("time both models" + ("" if dtype is None else f" in {dtype}"))
            for name in runtimes:
                if RUNTIMES[name].reads_models:
                    own = None if dtype is None else getattr(torch, dtype)
                    sources: Any = [convert(model, dtype=own) for model in (prepared.model, slim)]
                else:
                    sources = folders[needed[name]]
                rows += time_on(
                    name,
                    *sources,
                    batches=prepared.measured,
                    flops=flops,
                    timing=measuring.timing,
                    dtype=dtype,
                    progress=progress,
                )
    return rows


def _export_both(
    prepared: Prepared,
    slim: PreTrainedModel,
    exported: Exported,
    options: ExportOptions,
    folder: Path,
    format: Format,
    dtype: str | None,
) -> tuple[Path, Path]:
    """Export the dense model, and the slim one unless its export is of this format and dtype; return both folders."""
    place = folder / f"{format}-{dtype}"
    dense = export(prepared, prepared.model, options, place / "dense", format=format, dtype=dtype).folder
    if format == options.format and dtype in (None, options.dtype):
        return dense, exported.folder
    return dense, export(prepared, slim, options, place / "slim", format=format, dtype=dtype).folder
