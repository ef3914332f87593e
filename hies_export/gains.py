"""What a cut gained: export both models, count and time them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .measure import counts
from .measure.compare import count_both_flops, time_on
from .measure.runtimes import RUNTIMES
from .onnx.export import OnnxExport, export_onnx
from .prepare import Prepared, few
from .progress import Progress
from .recipe import PruningRecipe


def export(prepared: Prepared, model: PreTrainedModel, recipe: PruningRecipe, folder: Path) -> OnnxExport:
    """Write a model, dense or slim, as the recipe wants its ONNX folder."""
    return export_onnx(
        model,
        folder,
        batch=few(prepared.calibration[0]),
        processor=prepared.processor,
        provider=recipe.export.provider,
        dtype=recipe.export.dtype,
    )


def measure_gains(
    prepared: Prepared, slim: PreTrainedModel, onnx: OnnxExport, recipe: PruningRecipe, *, progress: Progress
) -> dict[str, Any]:
    """Count parameters, bytes and FLOPs, and time both models on every runtime and shape."""
    dense, batches = prepared.model, prepared.measured
    flops = count_both_flops(dense, slim, batches)
    latency = []
    # Beside the slim one, so that both are read from the same disk; the dense graph is not kept.
    with tempfile.TemporaryDirectory(prefix=".dense-", dir=onnx.folder.parent) as temporary:
        dense_folder = Path(temporary) / "onnx"
        if not all(RUNTIMES[name].reads_models for name in prepared.runtimes):
            progress.stage("export the dense model, to compare with")
            export(prepared, dense, recipe, dense_folder)
        progress.stage("measure")
        for name in prepared.runtimes:
            sources = (dense, slim) if RUNTIMES[name].reads_models else (dense_folder, onnx.folder)
            latency += time_on(
                name,
                *sources,
                batches=batches,
                flops=flops,
                repeats=recipe.measure.repeats,
                min_seconds=recipe.measure.min_seconds,
                track=progress.track,
            )
    shape = next(iter(batches))
    dense_flops, slim_flops = flops[shape]
    return {
        "parameters": {"dense": counts.count_parameters(dense), "slim": counts.count_parameters(slim)},
        "bytes": {
            "dense": counts.parameter_bytes(dense),
            "slim": counts.parameter_bytes(slim),
            "onnx": onnx.bytes,
        },
        "flops": {"dense": dense_flops, "slim": slim_flops, "shape": list(shape)},
        "cache_bytes_per_token": _cache_bytes(dense, slim),
        "latency": latency,
    }


def measured_budget(budget: Mapping[str, Any], gains: Mapping[str, Any]) -> dict[str, Any]:
    """What became of a budget of cost."""
    if budget["kind"] == "flops":
        return {**budget, "measured": gains["flops"]["slim"] / gains["flops"]["dense"]}
    if budget["kind"] == "latency":
        same = ("runtime", "batch", "sequence")
        row = next(r for r in gains["latency"] if all(r[key] == budget[key] for key in same))
        return {**budget, "measured": row["ratio"], "noisy": row["noisy"]}
    return dict(budget)


def _cache_bytes(dense: PreTrainedModel, slim: PreTrainedModel) -> dict[str, int] | None:
    """What both models remember of a token while they generate; None where they do not."""
    found = [counts.cache_bytes_per_token(model) for model in (dense, slim)]
    return None if found[0] is None or found[1] is None else {"dense": found[0], "slim": found[1]}
