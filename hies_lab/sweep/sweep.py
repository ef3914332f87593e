"""Evaluate every cell of a grid: criteria x alphas x modules x budgets x seeds x calibration sizes x compensations.

Statistics are collected once for each seed and calibration size, moments and effects once for each seed. Equal
selections are evaluated once. Finished cells are written to a journal, from which an interrupted sweep continues.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hies_export.data.batches import samples_of
from hies_export.forms.machine import machine_facts
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.progress import SILENT, Progress
from hies_export.select.plan import library_versions
from hies_export.tasks import TASKS

from .cells import Shared, curve_keys, evaluate_cell, load_shared, reachable_cells
from .grid import Cell, SweepGrid
from .journal import Journal
from .page import write_page
from .results import write_results
from .stopwatch import LatencyRequest, time_cuts

# Fields of the recipe that the grid replaces, by section.
_GIVEN_BY_THE_GRID = {"calibration": ("samples", "seed"), "prune": ("criterion", "alpha", "budget", "modules")}


@dataclass(frozen=True)
class SweepResult:
    """The rows of a sweep, as in sweep.json, and the work that this call did for them.

    `seconds` are by kind of work; `evaluations` is the number of pruned models evaluated.
    """

    rows: list[dict[str, Any]]
    seconds: dict[str, float]
    evaluations: int


def sweep(
    recipe: PruningRecipe,
    grid: SweepGrid,
    folder: Path,
    *,
    latency: LatencyRequest | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> SweepResult:
    """Evaluate every cell of a grid and write sweep.html, sweep.json, sweep.csv, details.json and tables.

    Without compensation, a selection is evaluated masked. With compensation, the model is cut and refitted from moments
    of the dense model. If the folder has a journal of the same recipe, its finished rows are reused, also for another
    grid.

    Args:
        recipe: Model, data, evaluation and constraints. The grid replaces its criterion, alpha, budget, compensation
            method, calibration seed and calibration size.
        grid: The cells to evaluate. Those whose modules cannot meet a budget of FLOPs are left out, unless none can.
        folder: Where to write: a new folder, or one with the journal of a sweep of the same recipe.
        latency: How to time the slim models against the dense one; None to time nothing.
        overwrite: Discard an existing journal.

    Raises:
        RequestError: The recipe, the grid, the data or the model does not allow the sweep, or the folder holds
            something else.
        StepError: A step failed; finished cells stay in the journal.
    """
    grid = grid.for_modules(recipe.prune.modules)
    with Journal(folder, asked=_asked(recipe), overwrite=overwrite) as journal:
        if latency is not None:
            latency.check(TASKS[recipe.task])
        progress.stage("load the model and the data")
        shared = load_shared(recipe, grid)
        shared.curves |= journal.alphas
        shared.judged |= {row["judged"]: row["result"] for row in journal.rows.values()}
        cells = {shared.key(cell): cell for cell in reachable_cells(shared, progress)}
        _evaluate(shared, cells, journal, progress)
        rows = [_row(cell, journal.rows[key]) for key, cell in cells.items()]
        if latency is not None:
            cuts = [journal.rows[key]["lost"] for key in cells]
            with shared.base.clock("latency"):
                exporter = shared.delivery.exporter
                times = time_cuts(shared.base, exporter, cuts, latency, journal, progress)
                for row, timed in zip(rows, times, strict=True):
                    row |= timed
        write_results(folder, rows, details=_details(shared, cells, journal))
        write_page(folder)
    return SweepResult(rows, shared.base.clock.seconds, shared.evaluations)


def _asked(recipe: PruningRecipe) -> dict[str, Any]:
    """Return what decides a row's result besides its cell: fields of the recipe, contents of files, library versions.

    The grid is not among them, so it may change from one call to the next.
    """
    fields = recipe.model_dump(mode="json", exclude={"output", "export", "measure"})
    for section, left_out in _GIVEN_BY_THE_GRID.items():
        fields[section] = {k: v for k, v in fields.get(section, {}).items() if k not in left_out}
    contents = {f"content of {name}": found for name, path in recipe.inputs.items() if (found := _content(name, path))}
    return fields | contents | {"versions": library_versions()}


def _content(name: str, path: str | Path) -> dict[str, str]:
    """Return the SHA-256 of every file of an input by its path, except Markdown; nothing of a Hub id.

    An input is a model's folder, a folder of images with a folder per label, a file, or a pattern of files.
    """
    path = Path(path).expanduser()
    found = path.glob("*" if name == "model" else "*/*") if path.is_dir() else path.parent.glob(path.name)
    digests = {}
    for file in sorted(file for file in found if file.is_file() and file.suffix != ".md"):
        total = hashlib.sha256()
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                total.update(block)
        digests[str(file)] = total.hexdigest()
    return digests


def _evaluate(shared: Shared, cells: Mapping[str, Cell], journal: Journal, progress: Progress) -> None:
    """Evaluate the cells that the journal lacks, and write each into it as soon as it is done."""
    waiting = {key: cell for key, cell in cells.items() if key not in journal.rows}
    if len(waiting) < len(cells):
        progress.stage(f"{len(cells) - len(waiting)} of {len(cells)} rows are in the journal")
    for key in progress.track(list(waiting), f"sweep, {len(waiting)} rows"):
        entry = evaluate_cell(shared, waiting[key])
        for curve in curve_keys(shared, waiting[key]):
            if curve not in journal.alphas:
                journal.add(curve, shared.curves[curve], kind="alpha")
        journal.add(key, entry)


def _details(shared: Shared, cells: Mapping[str, Cell], journal: Journal) -> dict[str, Any]:
    """Return details.json: selections of the first seed and size, alpha curves, and row facts."""
    base, seed, size = shared.base, shared.grid.seeds[0], shared.grid.calibration_sizes[0]
    splits = shared.delivery.splits
    assert splits is not None
    plans = {}
    for cell, entry in ((cell, journal.rows[key]) for key, cell in cells.items()):
        # Criteria with a number of samples of their own have 0.
        if cell.seed == seed and cell.samples in (0, size) and entry["kept"] is not None:
            label = {"criterion": cell.criterion, "alpha": entry["alpha"], "sparsity": cell.sparsity}
            if cell.flops is not None:
                label |= {"flops_target": cell.flops, "modules": "+".join(cell.kinds)}
            plans["|".join(map(str, label.values()))] = label | {"kept": entry["kept"]}
    # In the order of the cells, in whatever order they were found; those of other grids come first.
    wanted = dict.fromkeys(key for cell in cells.values() for key in curve_keys(shared, cell))
    place = {key: number for number, key in enumerate(wanted)}
    return {
        "seed": seed,
        "plans": list(plans.values()),
        "alpha_curves": [journal.alphas[key] for key in sorted(journal.alphas, key=lambda key: place.get(key, -1))],
        "about": {
            "model": shared.delivery.dense,
            "task": base.task.name,
            "calibration_split": splits.calibration.split,
            "evaluation_split": splits.evaluation.split,
            "evaluation_samples": samples_of(base.rows.evaluation),
            "evaluation_of": shared.delivery.evaluation_of,
            "shape": list(next(iter(base.shapes))),
            "environment": machine_facts(),
        },
    }


def _row(cell: Cell, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a finished cell, as in sweep.json."""
    return {
        "criterion": cell.criterion,
        "alpha": entry["alpha"],
        "alpha_by": cell.alpha if isinstance(cell.alpha, str) else None if cell.alpha is None else "given",
        "sparsity": cell.sparsity,
        "seed": cell.seed,
        "calibration_samples": entry["samples"],
        "compensation": cell.compensation,
        "flops_target": cell.flops,
        "modules": "+".join(cell.kinds),
        **entry["result"],
    }
