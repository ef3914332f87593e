"""Evaluate every cell of a grid: criteria x alphas x modules x budgets x seeds x calibration sizes x compensations.

Statistics are collected once for each seed and calibration size, moments and effects once for each seed. Equal
selections are evaluated once. Finished cells are written to a journal, from which an interrupted sweep continues.
On an executor, all this is once per worker, and the journal is still written here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...data.batches import samples_of
from ...errors import RecipeError, StepError, first_line
from ...forms.measure.machine import machine_facts
from ...pipeline.recipe import PruningRecipe
from ...progress import SILENT, Progress
from ...report.provenance import digests_of
from ...select.plan import library_versions
from ...tasks import TASKS
from ..baselines.names import JUDGED_ONLY
from .evaluating import Evaluated, Evaluator, Work, evaluate
from .grid import Cell, SweepGrid
from .journal import Journal
from .page import write_page
from .results import write_results
from .stopwatch import LatencyRequest, Stopwatch

# Fields of the recipe that the grid replaces, by section.
_GIVEN_BY_THE_GRID = {"calibration": ("samples", "seed"), "prune": ("criterion", "alpha", "budget", "modules")}


@dataclass(frozen=True)
class SweepResult:
    """The rows of a sweep, as in sweep.json, and the work that this call did for them.

    `seconds` are by kind of work, of all workers together; `evaluations` is the number of pruned models evaluated.
    """

    rows: list[dict[str, Any]]
    seconds: dict[str, float]
    evaluations: int


def sweep(
    recipe: PruningRecipe,
    grid: SweepGrid,
    folder: Path,
    *,
    executor: Executor | None = None,
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
        executor: Where to evaluate the cells: any of concurrent.futures, or Dask's `Client.get_executor()`; None for
            this process. Workers need this package, the recipe's files under the same paths, and of processes, each
            must be started afresh ("spawn").
        latency: How to time the slim models against the dense one; None to time nothing.
        overwrite: Discard an existing journal.

    Raises:
        RequestError: The recipe, the grid, the data or the model does not allow the sweep, or the folder holds
            something else.
        StepError: A step failed, or the executor lost its workers; finished cells stay in the journal.
    """
    if recipe.prune.steps > 1:
        raise RecipeError(
            [f"a sweep scores heads once for all sparsities, got prune.steps: {recipe.prune.steps}; set it to 1"]
        )
    grid = grid.for_modules(recipe.prune.modules)
    with Journal(folder, asked=_asked(recipe), overwrite=overwrite) as journal:
        runner = _Runner(recipe, grid, journal, progress, latency)
        rows = runner.run(executor)
        write_results(folder, rows, details=runner.details())
        write_page(folder)
    return SweepResult(rows, runner.evaluator.clock.seconds, runner.evaluator.evaluations)


def _asked(recipe: PruningRecipe) -> dict[str, Any]:
    """Return what decides a row's result besides its cell: fields of the recipe, contents of files, library versions.

    The grid is not among them, so it may change from one call to the next. Fields at their defaults are left out, so
    that a journal from before a field was added stays valid.
    """
    fields = recipe.model_dump(mode="json", exclude={"output", "export", "measure"}, exclude_defaults=True)
    for section, left_out in _GIVEN_BY_THE_GRID.items():
        fields[section] = {k: v for k, v in fields.get(section, {}).items() if k not in left_out}
    contents = {f"content of {name}": digest for name, digest in digests_of(recipe.inputs).items()}
    return fields | contents | {"versions": library_versions()}


class _Runner:
    """Evaluation of the cells that are not in the journal yet."""

    def __init__(
        self,
        recipe: PruningRecipe,
        grid: SweepGrid,
        journal: Journal,
        progress: Progress,
        latency: LatencyRequest | None = None,
    ):
        self._recipe, self._grid, self._journal, self._progress = recipe, grid, journal, progress
        if latency is not None:
            latency.check(TASKS[recipe.task])
        progress.stage("load the model and the data")
        self.evaluator = Evaluator(recipe, grid, journal.alphas, partial(journal.add, kind="alpha"), progress)
        self.evaluator.judged.update((row["judged"], row["result"]) for row in journal.rows.values())
        self._shared, self._chooser = self.evaluator.shared, self.evaluator.chooser
        self._cells = self._chooser.cells()
        self._stopwatch = None if latency is None else Stopwatch(self._shared, journal, latency, progress)

    def run(self, executor: Executor | None) -> list[dict[str, Any]]:
        """Evaluate the missing cells, and return the rows of all."""
        cells, journal = {self._chooser.key(cell): cell for cell in self._cells}, self._journal
        waiting = {key: cell for key, cell in cells.items() if key not in journal.rows}
        if len(waiting) < len(cells):
            self._progress.stage(f"{len(cells) - len(waiting)} of {len(cells)} rows are in the journal")
        started, part = time.perf_counter(), None
        here = ((key, self.evaluator.evaluate(cell)) for key, cell in waiting.items())
        with closing(here if executor is None else self._on(executor, waiting)) as entries:
            # An executor may finish them in another order, but begins in this one.
            for done, cell in enumerate(self._progress.track(list(waiting.values()), f"sweep, {len(waiting)} rows")):
                if part != (cell.seed, cell.compensation):
                    part = (cell.seed, cell.compensation)
                    per_row = (time.perf_counter() - started) / max(1, done)
                    left = f", about {per_row * (len(waiting) - done) / 60:.0f} min left" if done else ""
                    name = f"seed {cell.seed}, compensation {cell.compensation}"
                    self._progress.stage(f"{name}: {done} of {len(waiting)} rows done{left}")
                journal.add(*next(entries))
        if self._stopwatch is not None:
            with self.evaluator.clock("latency"):
                self._stopwatch.time([journal.rows[key].get("lost") for key, cell in cells.items() if _is_cut(cell)])
        return [self._row(cell) for cell in self._cells]

    def _on(self, executor: Executor, waiting: Mapping[str, Cell]) -> Generator[tuple[str, dict[str, Any]], None, None]:
        """Yield the keys and entries of cells as the workers of an executor finish them."""
        name, versions, known = uuid.uuid4().hex, library_versions(), self._journal.alphas
        futures: dict[Future[Evaluated], str] = {}
        try:
            for key, cell in waiting.items():
                curves = {curve: known[curve] for curve in self._chooser.curve_keys(cell) if curve in known}
                work = Work(name, self._recipe, self._grid, cell, curves, versions)
                futures[executor.submit(evaluate, work)] = key
            for future in as_completed(futures):
                yield futures[future], self._take(future.result())
        except BrokenExecutor as error:
            raise StepError(
                f"the workers of the executor must live until the last cell, but one died: {first_line(error)}; look "
                "into its log, and run the same again to go on"
            ) from error
        finally:
            for future in futures:
                future.cancel()

    def _take(self, found: Evaluated) -> dict[str, Any]:
        """Keep what a worker found besides an entry, and return the entry."""
        for key, curve in found.curves.items():
            if key not in self._journal.alphas:
                self._journal.add(key, curve, kind="alpha")
        spent = self.evaluator.clock.seconds
        for name, seconds in found.seconds.items():
            spent[name] = spent.get(name, 0.0) + seconds
        self.evaluator.evaluations += found.evaluations
        return found.entry

    def details(self) -> dict[str, Any]:
        """Return details.json: statistics and selections of the first seed and size, alpha curves, and row facts."""
        seed, size = self._grid.seeds[0], self._grid.calibration_sizes[0]
        base, statistics = self._shared.base, self._shared.statistics(seed, size)
        splits = base.rows.splits
        assert splits is not None
        assert base.asked is not None
        plans = {}
        for cell in self._cells:
            # Criteria with a number of samples of their own have 0.
            if cell.seed != seed or cell.samples not in (0, size) or not _is_cut(cell):
                continue
            entry = self._journal.rows[self._chooser.key(cell)]
            selection = self._chooser.selection(cell, entry["alpha"])
            kept = {name: kept.units for name, kept in selection.items()}
            label = {"criterion": cell.criterion, "alpha": entry["alpha"], "sparsity": cell.sparsity}
            if cell.flops is not None:
                label |= {"flops_target": cell.flops, "modules": "+".join(cell.kinds)}
            plans["|".join(map(str, label.values()))] = label | {"kept": kept}
        # In the order of the cells, in whatever order they were found; those of other grids come first.
        wanted = dict.fromkeys(key for cell in self._cells for key in self._chooser.curve_keys(cell))
        place = {key: number for number, key in enumerate(wanted)}
        curves = sorted(self._journal.alphas.items(), key=lambda item: place.get(item[0], -1))
        return {
            "seed": seed,
            "calibration_samples": statistics.calibration.samples,
            "key_value_heads": {module.name: module.groups for module in base.modules},
            "kinds": {module.name: module.kind for module in base.modules},
            "his": statistics["his"],
            "entropy": statistics.values.get("entropy", {}),
            "plans": list(plans.values()),
            "alpha_curves": [curve for _, curve in curves],
            "about": {
                "model": base.asked.model,
                "task": base.task.name,
                "calibration_split": splits.calibration.split,
                "evaluation_split": splits.evaluation.split,
                "evaluation_samples": samples_of(base.rows.evaluation),
                "evaluation_of": base.rows.evaluation_of,
                "evaluation_rows": splits.evaluation.rows,
                "shape": list(next(iter(base.shapes))),
                "environment": machine_facts(),
            },
        }

    def _row(self, cell: Cell) -> dict[str, Any]:
        """Return the row of a finished cell, as in sweep.json."""
        entry = self._journal.rows[self._chooser.key(cell)]
        cut = _is_cut(cell)
        timed = {} if self._stopwatch is None else self._stopwatch.fields(entry.get("lost") if cut else None)
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
            **timed,
        }


def _is_cut(cell: Cell) -> bool:
    return cell.criterion not in JUDGED_ONLY
