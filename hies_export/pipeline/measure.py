"""Export, count and time the two models of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..measure import counts
from ..measure.compare import time_on
from ..measure.counts import Both, FlopCount, LayerFlops, Shape, StoredBytes
from ..measure.rows import LatencyRow
from ..measure.timing import Timing
from ..model.copies import convert
from ..model.tokens import first_samples
from ..onnx.export import OnnxExport, export_onnx
from ..progress import Progress
from ..recipe import PruningRecipe
from ..runtimes.registry import RUNTIMES
from .prepare import Prepared


@dataclass(frozen=True)
class FlopsByLayer:
    """FLOPs of both models by layer, for one forward pass at `shape`, (batch, sequence)."""

    dense: list[LayerFlops]
    slim: list[LayerFlops]
    shape: Shape


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


def export(
    prepared: Prepared, model: PreTrainedModel, recipe: PruningRecipe, folder: Path, *, dtype: str | None = None
) -> OnnxExport:
    """Export a dense or slim model with the recipe's settings; `dtype` overrides the recipe's."""
    return export_onnx(
        model,
        folder,
        batch=first_samples(prepared.calibration[0]),
        processor=prepared.processor,
        provider=recipe.export.provider,
        dtype=dtype or recipe.export.dtype,
    )


def measure_both(
    prepared: Prepared,
    slim: PreTrainedModel,
    onnx: OnnxExport,
    recipe: PruningRecipe,
    *,
    stored: Both[int],
    progress: Progress,
) -> Measurements:
    """Count parameters and FLOPs of both models, and time them on every runtime and shape.

    Args:
        prepared: The dense model and the shapes.
        slim: The slim model.
        onnx: The export of the slim model.
        recipe: Which runtimes, and how often.
        stored: Bytes of the files of weights of both.
        progress: Shows stages and loops.
    """
    dense, batches = prepared.model, prepared.measured
    flops = counts.count_both_flops(dense, slim, batches)
    shape = next(iter(batches))
    dense_layers, slim_layers = (counts.flops_per_layer(m, batches[shape], prepared.sites) for m in (dense, slim))
    cache = [counts.cache_bytes_per_token(model) for model in (dense, slim)]
    return Measurements(
        parameters=Both(counts.count_parameters(dense), counts.count_parameters(slim)),
        bytes=StoredBytes(stored.dense, stored.slim, onnx.bytes),
        flops=flops[shape],
        flops_per_layer=FlopsByLayer(dense_layers, slim_layers, shape),
        cache_bytes_per_token=None if cache[0] is None or cache[1] is None else Both(cache[0], cache[1]),
        latency=_time(prepared, slim, onnx, recipe, flops=flops, progress=progress),
    )


def _time(
    prepared: Prepared,
    slim: PreTrainedModel,
    onnx: OnnxExport,
    recipe: PruningRecipe,
    *,
    flops: Mapping[Shape, FlopCount],
    progress: Progress,
) -> list[LatencyRow]:
    """Time both models in every dtype and on every runtime.

    Graphs of the dense model, and of the slim model in dtypes other than the exported one, are temporary.
    """
    timing = Timing(repeats=recipe.measure.repeats, min_seconds=recipe.measure.min_seconds)
    rows = []
    for dtype in recipe.measure.dtypes or (None,):
        runtimes = [name for name in prepared.runtimes if dtype is None or dtype in RUNTIMES[name].dtypes]
        # In the folder of the slim graph, so that both are read from the same disk.
        with tempfile.TemporaryDirectory(prefix=".dense-", dir=onnx.folder.parent) as temporary:
            # Runtimes that compute a float32 graph in another dtype are given that graph.
            needed = {
                name: dtype if dtype is None else RUNTIMES[name].exported_in(dtype)
                for name in runtimes
                if not RUNTIMES[name].reads_models
            }
            graphs = {}
            for graph in dict.fromkeys(needed.values()):
                progress.stage("export the dense model, to compare with")
                graphs[graph] = _graphs(prepared, slim, onnx, recipe, Path(temporary), graph)
            progress.stage("time both models" + ("" if dtype is None else f" in {dtype}"))
            for name in runtimes:
                if RUNTIMES[name].reads_models:
                    own = None if dtype is None else getattr(torch, dtype)
                    sources: Any = [convert(model, dtype=own) for model in (prepared.model, slim)]
                else:
                    sources = graphs[needed[name]]
                rows += time_on(
                    name,
                    *sources,
                    batches=prepared.measured,
                    flops=flops,
                    timing=timing,
                    dtype=dtype,
                    progress=progress,
                )
    return rows


def _graphs(
    prepared: Prepared, slim: PreTrainedModel, onnx: OnnxExport, recipe: PruningRecipe, folder: Path, dtype: str | None
) -> tuple[Path, Path]:
    """Export the dense model, and the slim one unless its export is of this dtype; return the folders of both."""
    dense = folder / f"dense-{dtype}"
    export(prepared, prepared.model, recipe, dense, dtype=dtype)
    if dtype in (None, recipe.export.dtype):
        return dense, onnx.folder
    export(prepared, slim, recipe, folder / f"slim-{dtype}", dtype=dtype)
    return dense, folder / f"slim-{dtype}"
