"""What a cut gained: export both models, count and time them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..measure import counts
from ..measure.compare import count_both_flops, time_on
from ..model.copies import convert, parameter_bytes
from ..model.tokens import first_samples
from ..onnx.export import OnnxExport, export_onnx
from ..progress import Progress
from ..recipe import PruningRecipe
from ..runtimes.registry import RUNTIMES
from .prepare import Prepared


def export(
    prepared: Prepared, model: PreTrainedModel, recipe: PruningRecipe, folder: Path, *, dtype: str | None = None
) -> OnnxExport:
    """Write a model, dense or slim, as the recipe wants its ONNX folder, or in another dtype."""
    return export_onnx(
        model,
        folder,
        batch=first_samples(prepared.calibration[0]),
        processor=prepared.processor,
        provider=recipe.export.provider,
        dtype=dtype or recipe.export.dtype,
    )


def measure_gains(
    prepared: Prepared, slim: PreTrainedModel, onnx: OnnxExport, recipe: PruningRecipe, *, progress: Progress
) -> dict[str, Any]:
    """Count parameters, bytes and FLOPs, and time both models on every runtime and shape."""
    dense, batches = prepared.model, prepared.measured
    flops = count_both_flops(dense, slim, batches)
    shape = next(iter(batches))
    dense_flops, slim_flops = flops[shape]
    layers = [counts.flops_per_layer(model, batches[shape], prepared.sites) for model in (dense, slim)]
    latency = _time(prepared, slim, onnx, recipe, flops=flops, progress=progress)
    return {
        "parameters": {"dense": counts.count_parameters(dense), "slim": counts.count_parameters(slim)},
        "bytes": {
            "dense": parameter_bytes(dense),
            "slim": parameter_bytes(slim),
            "onnx": onnx.bytes,
        },
        "flops": {"dense": dense_flops, "slim": slim_flops, "shape": list(shape)},
        "flops_per_layer": {"dense": layers[0], "slim": layers[1], "shape": list(shape)},
        "cache_bytes_per_token": _cache_bytes(dense, slim),
        "latency": latency,
    }


def _time(
    prepared: Prepared,
    slim: PreTrainedModel,
    onnx: OnnxExport,
    recipe: PruningRecipe,
    *,
    flops: Mapping[Any, tuple[int, int]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Rows of latency, dtype by dtype; the graphs of the dense model and of other dtypes are not kept."""
    rows = []
    for dtype in recipe.measure.dtypes or (None,):
        runtimes = [name for name in prepared.runtimes if dtype is None or dtype in RUNTIMES[name].dtypes]
        # Beside the slim one, so that both are read from the same disk.
        with tempfile.TemporaryDirectory(prefix=".dense-", dir=onnx.folder.parent) as temporary:
            dense_folder, slim_folder = Path(temporary) / "onnx", onnx.folder
            if not all(RUNTIMES[name].reads_models for name in runtimes):
                progress.stage("export the dense model, to compare with")
                export(prepared, prepared.model, recipe, dense_folder, dtype=dtype)
                if dtype not in (None, recipe.export.dtype):
                    slim_folder = Path(temporary) / "slim"
                    export(prepared, slim, recipe, slim_folder, dtype=dtype)
            progress.stage("measure" if dtype is None else f"measure in {dtype}")
            for name in runtimes:
                sources: list[Any] = [dense_folder, slim_folder]
                if RUNTIMES[name].reads_models:
                    wanted = None if dtype is None else getattr(torch, dtype)
                    sources = [convert(model, dtype=wanted) for model in (prepared.model, slim)]
                rows += time_on(
                    name,
                    *sources,
                    batches=prepared.measured,
                    flops=flops,
                    repeats=recipe.measure.repeats,
                    min_seconds=recipe.measure.min_seconds,
                    track=progress.track,
                )
    return rows


def measured_budget(budget: Mapping[str, Any], gains: Mapping[str, Any]) -> dict[str, Any]:
    """What became of a budget of cost."""
    if budget["kind"] == "flops":
        return {**budget, "measured": gains["flops"]["slim"] / gains["flops"]["dense"]}
    if budget["kind"] == "latency":
        same = ("runtime", "batch", "sequence")
        rows = (r for r in gains["latency"] if r["phase"] != "decode")
        row = next(r for r in rows if all(r[key] == budget[key] for key in same))
        return {**budget, "measured": row["ratio"], "noisy": row["noisy"]}
    return dict(budget)


def _cache_bytes(dense: PreTrainedModel, slim: PreTrainedModel) -> dict[str, int] | None:
    """What both models remember of a token while they generate; None where they do not."""
    found = [counts.cache_bytes_per_token(model) for model in (dense, slim)]
    return None if found[0] is None or found[1] is None else {"dense": found[0], "slim": found[1]}
