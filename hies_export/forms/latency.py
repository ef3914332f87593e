"""Time uniform cuts of each kind of unit on a runtime, and divide the time saved among the modules of that kind."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from ..data.batches import Batch
from ..progress import SILENT, Progress
from ..select.constraints import bundle_count
from ..select.cost import CostTable
from ..slim.bundles import cut_bundles, flops_table
from ..units.units import PrunableModule
from .form import Form, Forms
from .formats import Exporter
from .time import TimedRow, shape_of, time

# Share of its bundles that every module of a kind keeps in each timed cut; 0 stands for the smallest timed cut.
LEVELS = (0.75, 0.5, 0.25, 0.0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimedOn:
    """The runtime, batch and number of runs to time cuts with, and the exporter for runtimes that read exports."""

    runtime: str
    batch: Batch
    exporter: Exporter
    dtype: str | None = None  # what the runtime computes in; None leaves that to the model or its export
    repeats: int = 30

    def time(self, forms: Sequence[Form], progress: Progress = SILENT) -> list[TimedRow]:
        """Return the times of forms on the batch, measured beside each other."""
        batches = {shape_of(self.batch): [self.batch]}
        # One shape in one phase, so one time for each form.
        return [only for (only,) in time(forms, batches, repeats=self.repeats, progress=progress)]


@dataclass(frozen=True)
class TimedCut:
    """A uniform cut of the modules of one `kind`, timed against the dense model.

    `kept` is the share of the bundles that stay. `ratio` is the cut model's time / the dense one's, with 95 % interval.
    """

    kept: float
    ratio: float
    ratio_low: float
    ratio_high: float
    kind: str


def latency_table(
    model: PreTrainedModel,
    modules: Sequence[PrunableModule],
    where: TimedOn,
    *,
    unit: str = "group",
    progress: Progress = SILENT,
) -> CostTable:
    """Time uniform cuts of the model, and return the table of time saved by removing bundles from every module.

    Heads and neurons are timed in cuts of their own, because their savings add up. A module that keeps a share of its
    bundles saves the time that the whole model saves at that share of its kind (interpolated between timed cuts), times
    the module's share of the FLOPs of all units of its kind.
    """
    cuts = _time_cuts(model, modules, where, unit=unit, progress=progress)
    flops = flops_table(model, modules, batch=where.batch, unit=unit)
    saved: dict[str, tuple[float, ...]] = {}
    for kind, of_kind in _by_kind(modules).items():
        saved |= _time_saved([cut for cut in cuts if cut.kind == kind], of_kind, flops, unit=unit)
    in_order = {module.name: saved[module.name] for module in modules}
    return CostTable(f"latency on {where.runtime}", in_order, tuple(asdict(cut) for cut in cuts))


def _by_kind(modules: Sequence[PrunableModule]) -> dict[str, list[PrunableModule]]:
    """Return kind of unit -> the modules of that kind, in order."""
    kinds = dict.fromkeys(module.kind for module in modules)
    return {kind: [module for module in modules if module.kind == kind] for kind in kinds}


def _time_saved(
    cuts: Sequence[TimedCut], modules: Sequence[PrunableModule], flops: CostTable, *, unit: str
) -> dict[str, tuple[float, ...]]:
    """Return module -> share of the time that it saves by losing 0, 1, 2, ... bundles, from the cuts of one kind.

    What a uniform cut saves is divided among the modules in proportion to the FLOPs of their units. `cuts` begin with
    the smallest cut.
    """
    # A module of one bundle cannot lose it, and saves nothing.
    weights = {m.name: flops.saved[m.name][-1] if bundle_count(m, unit) > 1 else 0.0 for m in modules}
    total = sum(weights.values()) or 1.0  # 0 if no module can lose a bundle
    # `np.interp` needs ascending shares; the dense model keeps all in time 1.
    timed_kept = [cut.kept for cut in reversed(cuts)] + [1.0]
    timed_ratios = [cut.ratio for cut in reversed(cuts)] + [1.0]
    saved = {}
    for module in modules:
        count = bundle_count(module, unit)
        kept = [(count - lost) / count for lost in range(count)]
        share = weights[module.name] / total
        saved[module.name] = tuple(float(share * (1 - ratio)) for ratio in np.interp(kept, timed_kept, timed_ratios))
    return saved


def _uniform_cuts(modules: Sequence[PrunableModule], unit: str) -> dict[float, dict[str, int]]:
    """Return the cuts of modules of one kind to be timed: share kept -> how many bundles every module loses."""
    counts = {module.name: bundle_count(module, unit) for module in modules}
    cuts = {}
    for level in LEVELS:
        lost = {name: count - max(1, round(level * count)) for name, count in counts.items()}
        cuts[1 - sum(lost.values()) / sum(counts.values())] = lost
    cuts.pop(1.0, None)  # of modules with one bundle each, a cut removes nothing
    return cuts


def _time_cuts(
    model: PreTrainedModel, modules: Sequence[PrunableModule], where: TimedOn, *, unit: str, progress: Progress
) -> list[TimedCut]:
    """Time uniform cuts against the dense model, kind by kind, the smallest first; warn if a control is noisy."""
    planned = [
        (kind, kept, removed)
        for kind, of_kind in _by_kind(modules).items()
        for kept, removed in _uniform_cuts(of_kind, unit).items()
    ]
    cuts, noisy = [], False
    with tempfile.TemporaryDirectory(prefix="hies-budget-") as temporary:
        forms = Forms({"dense": model}, where.exporter, Path(temporary))
        for kind, kept, removed in progress.track(planned, f"time cuts on {where.runtime}"):
            name = f"{kind}-{kept:.4f}"
            forms.add(name, cut_bundles(model, modules, removed, unit=unit))
            dense, slim = where.time([forms.form(n, where.runtime, where.dtype) for n in ("dense", name)])
            cuts.append(TimedCut(kept, slim.ratio, slim.ratio_low, slim.ratio_high, kind))
            noisy |= dense.noisy
    if noisy:
        logger.warning(
            "the machine is too busy to time cuts precisely: the dense model differs from itself when timed twice, and "
            "the predicted time may be off"
        )
    return cuts
