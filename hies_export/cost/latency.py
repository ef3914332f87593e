"""Budgets beyond a share of the heads: FLOPs, time on a runtime, and what quality may be lost.

A budget of cost needs a table, what every module saves with every number of heads. FLOPs are linear in the heads, so
one count per module gives it. Time is not: a few uniform cuts of the model itself are timed on the runtime, and what
they save is shared out over the modules as the FLOPs are. Then the plan that loses the least score within the budget
is a knapsack.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.folders import replace_file, user_cache
from ..measure import latency
from ..measure.compare import compare_loads
from ..measure.environment import environment
from ..model.copies import share_weights
from ..runtimes.base import RUNTIMES
from ..select.budget import CostTable
from ..select.bundles import bundle_count
from ..slim.cut import prune_units
from ..values import PrunableModule
from .flops import flops_table, plan_of_counts

# Shares of its bundles that every module keeps in the cuts that are timed; 0 stands for a single one.
LEVELS = (0.75, 0.5, 0.25, 0.0)
# A table is kept only where every ratio is known to this width of its 95 % interval: over loads of both models it was
# 0.04 to 0.07 on a machine without other work, and twice that on a busy one.
WIDEST_INTERVAL = 0.08
TABLE_FORMAT = 2


def latency_table(
    model: PreTrainedModel,
    sites: Sequence[PrunableModule],
    *,
    runtime: str,
    batch: Mapping[str, Tensor],
    export: Callable[[PreTrainedModel, Path], object],
    unit: str = "group",
    repeats: int = 30,
    min_seconds: float = 1.0,
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None = None,
    cache: Path | None = None,
) -> CostTable:
    """Time uniform cuts of the model beside it, and derive what every module saves with every number of heads.

    The saving of a module is that of the whole model at the same share of heads kept (linear between the timed ones),
    times the module's share of the FLOPs that heads cost. A table is kept, and read again for the same hardware,
    versions, runtime, shape and model dimensions; one from a busy machine is not kept.

    Args:
        model: The dense model.
        sites: The modules that may lose heads.
        runtime: A name in `hies_export.measure.runtimes`.
        batch: What is run.
        export: Writes a model into a new ONNX folder; called where the runtime reads those.
        unit: As in `select_heads`.
        repeats, min_seconds: As in `time_on`.
        track: Wraps the loop over the cuts, e.g. in a progress bar.
        cache: Folder of kept tables; by default hies_export/latency in the user's cache folder.
    """
    cache = cache or user_cache("latency")
    key = _key(model, sites, runtime=runtime, batch=batch, unit=unit)
    file = cache / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"
    points = _read(file, key)
    if points is None:
        points = _time_cuts(
            model,
            sites,
            runtime=runtime,
            batch=batch,
            export=export,
            unit=unit,
            track=track,
            timing={"repeats": repeats, "min_seconds": min_seconds},
        )
        if not all(_is_sharp(point) for point in points):
            logging.getLogger(__name__).warning(
                "the machine is too busy for a table of times that can be kept: a ratio is not known to %g points, or "
                "the dense model against itself misses 1; what is predicted may be off",
                100 * WIDEST_INTERVAL,
            )
        else:
            replace_file(file, json.dumps({"key": key, "points": points}, indent=1))
    flops = flops_table(model, sites, batch=batch, unit=unit).saved
    weights = {name: shares[-1] * len(shares) / max(1, len(shares) - 1) for name, shares in flops.items()}
    total = sum(weights.values())
    kept = [p["kept"] for p in reversed(points)] + [1.0]  # ascending
    ratios = [p["ratio"] for p in reversed(points)] + [1.0]
    saved = {}
    for site in sites:
        count = bundle_count(site, unit)
        curve = np.interp([(count - k) / count for k in range(count)], kept, ratios)
        saved[site.name] = tuple(float(weights[site.name] / total * (1 - r)) for r in curve)
    return CostTable(f"latency on {runtime}", saved, tuple(points))


def _time_cuts(
    model: PreTrainedModel,
    sites: Sequence[PrunableModule],
    *,
    runtime: str,
    batch: Mapping[str, Tensor],
    export: Callable[[PreTrainedModel, Path], object],
    unit: str,
    timing: Mapping[str, Any],
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None,
) -> list[dict[str, float]]:
    """Uniform cuts against the dense model, the least cut first."""
    bundles = [bundle_count(site, unit) for site in sites]
    cuts = {}
    for level in LEVELS:
        counts = [count - max(1, round(level * count)) for count in bundles]
        cuts[1 - sum(counts) / sum(bundles)] = counts
    cuts.pop(1.0, None)
    points = []
    with tempfile.TemporaryDirectory(prefix="hies-budget-") as temporary:

        def source(name: str, counts: Sequence[int] | None) -> PreTrainedModel | Path:
            cut = model
            if counts is not None:
                cut = prune_units(share_weights(model), plan_of_counts(sites, counts, unit), tuple(sites), inplace=True)
            if RUNTIMES[runtime].reads_models:
                return cut
            export(cut, Path(temporary) / name)
            return Path(temporary) / name

        dense = source("dense", None)
        rows, columns, *_ = next(iter(batch.values())).shape
        for kept in track(list(cuts), f"time cuts on {runtime}") if track else list(cuts):
            slim = source(f"kept-{kept:.4f}", cuts[kept])
            (found,) = compare_loads(runtime, dense, slim, {(rows, columns): batch}, decode=False, **timing).values()
            points.append(
                {
                    "kept": kept,
                    "ratio": found.ratio.median,
                    "ratio_low": found.ratio.low,
                    "ratio_high": found.ratio.high,
                    "control_low": found.control.low,
                    "control_high": found.control.high,
                }
            )
    return points


def _is_sharp(point: Mapping[str, float]) -> bool:
    noisy = latency.is_noisy(point["control_low"], point["control_high"])
    return not noisy and point["ratio_high"] - point["ratio_low"] <= WIDEST_INTERVAL


def _key(
    model: PreTrainedModel, sites: Sequence[PrunableModule], *, runtime: str, batch: Mapping[str, Tensor], unit: str
) -> dict[str, Any]:
    """Everything that decides what was timed."""
    shapes = [[name, list(parameter.shape)] for name, parameter in model.named_parameters()]
    return {
        "format": TABLE_FORMAT,
        "environment": environment(),
        "runtime": runtime,
        "device": str(model.device),
        "batch": {name: list(value.shape) for name, value in sorted(batch.items())},
        "model": [type(model).__name__, str(model.dtype)],
        "parameters": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
        "sites": hashlib.sha256(json.dumps([asdict(site) for site in sites]).encode()).hexdigest(),
        "unit": unit,
    }


def _read(file: Path, key: Mapping[str, Any]) -> list[dict[str, float]] | None:
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        return list(written["points"]) if written["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
