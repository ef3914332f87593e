"""Export, count and time the two models of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..gguf.export import GgufExport
from ..measure import counts
from ..measure.compare import time_on
from ..measure.counts import Both, FlopCount, Shape, StoredBytes
from ..measure.exports import Exported, Exporter
from ..measure.rows import LatencyRow
from ..measure.timing import Timing
from ..model.copies import convert
from ..progress import Progress
from ..report.details import FlopsByLayer
from ..runtimes.base import RUNTIMES
from ..units import PrunableModule


@dataclass(frozen=True)
class MeasureOptions:
    """What is timed: on which runtimes, in which dtypes (by default as the models are), and how often."""

    runtimes: tuple[str, ...]
    dtypes: tuple[str, ...]
    timing: Timing


@dataclass(frozen=True)
class Measurements:
    """Size, FLOPs and latency of the dense and the slim model, in the types of the report.

    FLOPs are of one forward pass at the first measured shape; `bytes` are those of the files of weights.
    `cache_bytes_per_token` is what each token adds to the key/value cache; None without one.
    """

    parameters: Both[int]
    bytes: StoredBytes
    flops: FlopCount
    flops_per_layer: FlopsByLayer
    cache_bytes_per_token: Both[int] | None
    latency: list[LatencyRow]


def measure_both(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    exported: Exported,
    *,
    modules: Sequence[PrunableModule],
    batches: Mapping[Shape, Mapping[str, Tensor]],
    exporter: Exporter,
    options: MeasureOptions,
    stored: Both[int],
    progress: Progress,
) -> Measurements:
    """Count parameters, bytes and FLOPs of both models, and time them on every runtime and shape.

    FLOPs per layer are counted on the first of the batches.
    """
    flops = counts.count_both_flops(dense, slim, batches)
    shape = next(iter(batches))
    dense_layers, slim_layers = (counts.flops_per_layer(m, batches[shape], modules) for m in (dense, slim))
    cache = [counts.cache_bytes_per_token(model) for model in (dense, slim)]
    latency = []
    for dtype in options.dtypes or (None,):
        runtimes = [name for name in options.runtimes if dtype is None or dtype in RUNTIMES[name].dtypes]
        # In the folder of the exported slim model, so that both are read from the same disk.
        with tempfile.TemporaryDirectory(prefix=".dense-", dir=exported.folder.parent) as temporary:
            exports = _export_both(dense, slim, exported, exporter, runtimes, dtype, Path(temporary), progress)
            progress.stage("time both models" + ("" if dtype is None else f" in {dtype}"))
            own = None if dtype is None else getattr(torch, dtype)
            for name in runtimes:
                sources: Any = exports.get(name) or [convert(model, dtype=own) for model in (dense, slim)]
                latency += time_on(
                    name, *sources, batches=batches, flops=flops, timing=options.timing, dtype=dtype, progress=progress
                )
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


def _export_both(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    exported: Exported,
    exporter: Exporter,
    runtimes: Sequence[str],
    dtype: str | None,
    folder: Path,
    progress: Progress,
) -> dict[str, tuple[Path, Path]]:
    """Return the exports of dense and slim for each runtime that reads some; the slim model's own is not repeated."""
    options = {name: exporter.options.read_by(name, dtype) for name in runtimes if not RUNTIMES[name].reads_models}
    made = {}
    for number, wanted in enumerate(dict.fromkeys(options.values())):
        progress.stage("export the dense model, to compare with")
        places = [folder / f"{name}-{number}" for name in ("dense", "slim")]
        of_dense = exporter.export(dense, places[0], wanted).folder
        again = wanted != exporter.options
        made[wanted] = of_dense, exporter.export(slim, places[1], wanted).folder if again else exported.folder
    return {name: made[wanted] for name, wanted in options.items()}
