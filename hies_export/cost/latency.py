"""Time uniform cuts of a model on a runtime, and divide the time saved among its modules."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.folders import replace_file, user_cache
from ..measure.compare import compare_loads
from ..measure.environment import environment
from ..measure.ratios import is_noisy
from ..measure.timing import Timing
from ..progress import SILENT, Progress
from ..runtimes.base import RUNTIMES
from ..select.budget import CostTable
from ..select.bundles import bundle_count
from ..units import PrunableModule
from .flops import cut_bundles, flops_table

# Share of its bundles that every module keeps in each timed cut; 0 means a single bundle.
LEVELS = (0.75, 0.5, 0.25, 0.0)
# Timed cuts are cached only if no 95 % interval of a ratio is wider than this. Widths were 0.04 to 0.07 on an idle
# machine, and twice that on a busy one.
WIDEST_INTERVAL = 0.08
TABLE_FORMAT = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimedOn:
    """The runtime, batch and number of runs to time cuts with.

    Attributes:
        runtime: A name in `hies_export.runtimes.base.RUNTIMES`.
        batch: The batch to run.
        timing: Number of runs of the dense model and of each cut.
        export: Exports a model into a new ONNX folder; called if the runtime reads ONNX.
    """

    runtime: str
    batch: Mapping[str, Tensor]
    timing: Timing
    export: Callable[[PreTrainedModel, Path], object]


@dataclass(frozen=True)
class TimedCut:
    """A uniform cut, timed against the dense model.

    Attributes:
        kept: Share of the bundles that are kept.
        ratio: Time of the cut model / time of the dense model.
        ratio_low, ratio_high: 95 % interval of the ratio.
        control_low, control_high: 95 % interval of the control, the dense model against itself.
    """

    kept: float
    ratio: float
    ratio_low: float
    ratio_high: float
    control_low: float
    control_high: float

    @property
    def sharp(self) -> bool:
        """Whether the ratio is precise enough to be cached."""
        return not is_noisy(self.control_low, self.control_high) and self.ratio_high - self.ratio_low <= WIDEST_INTERVAL


def latency_table(
    model: PreTrainedModel,
    modules: Sequence[PrunableModule],
    where: TimedOn,
    *,
    unit: str = "group",
    progress: Progress = SILENT,
    cache: Path | None = None,
) -> CostTable:
    """Time uniform cuts of the model, and return the table of time saved by removing bundles from every module.

    A module that keeps a share of its bundles saves the time that the whole model saves at that share (interpolated
    between timed cuts), times the module's share of the FLOPs of all units. Timed cuts are cached on disk by hardware,
    versions, runtime, shape and model dimensions. Imprecise ones, from a busy machine, are not cached.

    Args:
        model: The dense model.
        modules: The modules that may lose units.
        where: The runtime, the batch, and the number of runs.
        unit: As in `Constraints`.
        progress: Shows the loop over the cuts.
        cache: Folder of cached cuts; by default hies_export/latency in the user's cache folder.
    """
    key = _key(model, modules, where, unit)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    file = (cache or user_cache("latency")) / f"{name}.json"
    cuts = _read(file, key)
    if cuts is None:
        cuts = _time_cuts(model, modules, where, unit=unit, progress=progress)
        if all(cut.sharp for cut in cuts):
            replace_file(file, json.dumps({"key": key, "points": [asdict(cut) for cut in cuts]}, indent=1))
        else:
            logger.warning(
                "the machine is too busy to time cuts precisely: a ratio has an interval wider than %g points, or the "
                "dense model differs from itself; the predicted time may be off, and is not cached",
                100 * WIDEST_INTERVAL,
            )
    flops = flops_table(model, modules, batch=where.batch, unit=unit).saved
    weights = {name: shares[-1] * len(shares) / max(1, len(shares) - 1) for name, shares in flops.items()}
    total = sum(weights.values())
    kept = [cut.kept for cut in reversed(cuts)] + [1.0]  # ascending
    ratios = [cut.ratio for cut in reversed(cuts)] + [1.0]
    saved = {}
    for module in modules:
        count = bundle_count(module, unit)
        curve = np.interp([(count - k) / count for k in range(count)], kept, ratios)
        saved[module.name] = tuple(float(weights[module.name] / total * (1 - r)) for r in curve)
    return CostTable(f"latency on {where.runtime}", saved, tuple(asdict(cut) for cut in cuts))


def _time_cuts(
    model: PreTrainedModel, modules: Sequence[PrunableModule], where: TimedOn, *, unit: str, progress: Progress
) -> list[TimedCut]:
    """Time uniform cuts against the dense model, the smallest cut first."""
    bundles = {module.name: bundle_count(module, unit) for module in modules}
    removed: dict[float, dict[str, int]] = {}  # share kept -> how many bundles every module loses
    for level in LEVELS:
        lost = {name: count - max(1, round(level * count)) for name, count in bundles.items()}
        removed[1 - sum(lost.values()) / sum(bundles.values())] = lost
    removed.pop(1.0, None)
    rows, columns, *_ = next(iter(where.batch.values())).shape
    batches, cuts = {(rows, columns): where.batch}, []
    with tempfile.TemporaryDirectory(prefix="hies-budget-") as temporary:

        def source(candidate: PreTrainedModel, name: str) -> PreTrainedModel | Path:
            if RUNTIMES[where.runtime].reads_models:
                return candidate
            where.export(candidate, Path(temporary) / name)
            return Path(temporary) / name

        dense = source(model, "dense")
        for kept in progress.track(list(removed), f"time cuts on {where.runtime}"):
            slim = source(cut_bundles(model, modules, removed[kept], unit=unit), f"kept-{kept:.4f}")
            timed = compare_loads(where.runtime, dense, slim, batches, timing=where.timing, decode=False)
            (found,) = timed.values()
            ratio, control = found.ratio, found.control
            cuts.append(TimedCut(kept, ratio.median, ratio.low, ratio.high, control.low, control.high))
    return cuts


def _key(model: PreTrainedModel, modules: Sequence[PrunableModule], where: TimedOn, unit: str) -> dict[str, Any]:
    """Return everything that the times depend on, as values for JSON."""
    shapes = [[name, list(parameter.shape)] for name, parameter in model.named_parameters()]
    return {
        "format": TABLE_FORMAT,
        "environment": environment(),
        "runtime": where.runtime,
        "device": str(model.device),
        "batch": {name: list(value.shape) for name, value in sorted(where.batch.items())},
        "model": [type(model).__name__, str(model.dtype)],
        "parameters": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
        "modules": hashlib.sha256(json.dumps([asdict(module) for module in modules]).encode()).hexdigest(),
        "unit": unit,
    }


def _read(file: Path, key: Mapping[str, Any]) -> list[TimedCut] | None:
    """Return the cached cuts of a file; None if it has none for this key."""
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        return [TimedCut(**point) for point in written["points"]] if written["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
