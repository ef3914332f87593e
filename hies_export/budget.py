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
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .checkpoint.folders import replace_file, user_cache
from .cut import prune_heads
from .errors import PlanError
from .measure import counts, latency
from .measure.compare import compare_loads
from .measure.runtime import RUNTIMES
from .model.twin import share_weights
from .select import bundle_count, least_loss, lost_scores, removable_counts, select_heads
from .values import AttentionSite, HeadScores, PruningPlan

# Shares of its bundles that every module keeps in the cuts that are timed; 0 stands for a single one.
LEVELS = (0.75, 0.5, 0.25, 0.0)
# Costs are whole numbers of this share of the dense model's, rounded so that no budget is exceeded.
GRID = 100_000
# A table is kept only where every ratio is known to this width of its 95 % interval: over loads of both models it was
# 0.04 to 0.07 on a machine without other work, and twice that on a busy one.
WIDEST_INTERVAL = 0.08
TABLE_FORMAT = 2


@dataclass(frozen=True)
class CostTable:
    """What the modules save with every number of bundles removed, as shares of the dense model's cost.

    Attributes:
        what: "FLOPs", or "latency" and where.
        saved: Per module, by its dotted name, the share saved with 0, 1, 2, ... bundles removed.
        measured: What was timed: rows of kept (share of the bundles), ratio, ratio_low, ratio_high, control_low,
            control_high; empty for FLOPs.
    """

    what: str
    saved: Mapping[str, tuple[float, ...]]
    measured: tuple[Mapping[str, float], ...] = ()

    def ratio(self, counts: Mapping[str, int]) -> float:
        """Predicted cost, as a share of the dense model's, with so many bundles removed from each module."""
        return 1.0 - sum(self.saved[name][count] for name, count in counts.items())


def flops_table(
    model: PreTrainedModel, sites: Sequence[AttentionSite], *, batch: Mapping[str, Any], unit: str = "group"
) -> CostTable:
    """Count what a bundle of every module costs, attention products included.

    Args:
        model: The dense model.
        sites: The modules that may lose heads.
        batch: Inputs of the shape to count at.
        unit: As in `select_heads`.
    """
    dense = counts.count_flops(model, batch)
    saved = {}
    for index, site in enumerate(sites):
        count = bundle_count(site, unit)
        one = 0.0
        if count > 1:
            plan = _plan(sites, [int(i == index) for i in range(len(sites))], unit)
            without = prune_heads(share_weights(model), plan, tuple(sites), inplace=True)
            one = (dense - counts.count_flops(without, batch)) / dense
        # A module's last bundle stays.
        saved[site.name] = tuple(one * k for k in range(count))
    return CostTable("FLOPs", saved)


def latency_table(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
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
    sites: Sequence[AttentionSite],
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
                cut = prune_heads(share_weights(model), _plan(sites, counts, unit), tuple(sites), inplace=True)
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


def counts_within(
    scores: HeadScores,
    sites: Sequence[AttentionSite],
    table: CostTable,
    *,
    ratio: float,
    allocation: str = "global",
    **constraints: Any,
) -> list[int]:
    """Choose how many bundles each module loses, so that the least score is lost within a budget of cost.

    Exact up to the rounding of each module's cost to 1/100,000 of the dense model's; `uniform` takes the smallest
    share of the heads that meets the budget.

    Args:
        scores: From `score_heads`.
        sites: The modules that may lose heads.
        table: What they save.
        ratio: Cost at the most, as a share of the dense model's.
        allocation: "global" or "uniform".
        **constraints: unit, min_heads, keep_layers, multiple_of, as in `select_heads`.

    Returns:
        For `select_heads(..., counts=...)`.

    Raises:
        PlanError: The budget cannot be met; the message says the best there is.
    """
    check_reachable(sites, table, ratio=ratio, allocation=allocation, **constraints)
    if allocation == "uniform":
        return next(c for c in _uniform_counts(sites, constraints) if _ratio(table, sites, c) <= ratio)
    options = removable_counts(sites, **constraints)
    unit = constraints.get("unit", "group")
    saved = [[table.saved[site.name][k] for k in option] for site, option in zip(sites, options, strict=True)]
    # A timed table need not be monotone: costs count from the most that a module can save.
    costs = [[math.ceil((max(row) - s) * GRID - 1e-6) for s in row] for row in saved]
    limit = math.floor((ratio - 1 + sum(max(row) for row in saved)) * GRID + 1e-6)
    lost = [lost_scores(scores.scores[site.name], site, unit=unit) for site in sites]
    losses = [[row[k] for k in option] for row, option in zip(lost, options, strict=True)]
    best, trace = least_loss(costs, losses, limit)
    chosen = trace(int(best.argmin()))
    return [option[place] for option, place in zip(options, chosen, strict=True)]


def check_reachable(
    sites: Sequence[AttentionSite], table: CostTable, *, ratio: float, allocation: str = "global", **constraints: Any
) -> None:
    """Refuse a budget of cost that no plan meets.

    Raises:
        PlanError: There is none; the message says the best there is.
    """
    if allocation == "uniform":
        best = min((_ratio(table, sites, counts) for counts in _uniform_counts(sites, constraints)), default=1.0)
    else:
        options = removable_counts(sites, **constraints)
        best = 1.0 - sum(
            max(table.saved[site.name][k] for k in option) for site, option in zip(sites, options, strict=True)
        )
    if best > ratio:
        said = ", ".join(f"{name} {value}" for name, value in constraints.items() if value not in (1, (), [], "group"))
        raise PlanError(
            f"the budget asks for {table.what} at most {ratio:g} of dense, but cutting all heads that may go"
            f"{f' ({said})' if said else ''} gives {best:.3f}, the best there is; raise the target"
            + (" or loosen the constraints" if said else "")
        )


def uniform_shares(sites: Sequence[AttentionSite], *, allocation: str = "global", unit: str = "group") -> list[float]:
    """The shares of heads worth trying, ascending: every number of bundles once."""
    bundles = [bundle_count(site, unit) for site in sites]
    steps = sum(bundles) if allocation == "global" else max(bundles)
    return [k / steps for k in range(1, steps)]


def _uniform_counts(sites: Sequence[AttentionSite], constraints: Mapping[str, Any]) -> list[list[int]]:
    """Removals of the same share of every module, ascending, as far as the constraints allow."""
    options = removable_counts(sites, **constraints)
    unit = constraints.get("unit", "group")
    found: list[list[int]] = []
    for share in uniform_shares(sites, allocation="uniform", unit=unit):
        wanted = [
            round(share * bundle_count(site, unit)) if len(option) > 1 else 0
            for site, option in zip(sites, options, strict=True)
        ]
        counts = [max(k for k in o if k <= w) for o, w in zip(options, wanted, strict=True)]
        # Beyond what min_heads leaves, the modules would no longer lose the same share.
        if any(w > o[-1] for w, o in zip(wanted, options, strict=True)):
            break
        if any(counts) and counts not in found:
            found.append(counts)
    return found


def _ratio(table: CostTable, sites: Sequence[AttentionSite], counts: Sequence[int]) -> float:
    return table.ratio({site.name: count for site, count in zip(sites, counts, strict=True)})


def _plan(sites: Sequence[AttentionSite], counts: Sequence[int], unit: str) -> PruningPlan:
    """A plan of the right size; which heads go does not matter to cost."""
    zeros = HeadScores("none", {}, {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in sites})
    return select_heads(zeros, sites, counts=counts, unit=unit)


def _key(
    model: PreTrainedModel, sites: Sequence[AttentionSite], *, runtime: str, batch: Mapping[str, Tensor], unit: str
) -> dict[str, Any]:
    """Everything that decides what was timed."""
    shapes = [[name, list(parameter.shape)] for name, parameter in model.named_parameters()]
    return {
        "format": TABLE_FORMAT,
        "environment": latency.environment(),
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
