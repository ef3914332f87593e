"""Evaluate every cell of a grid: criteria x alphas x modules x budgets x seeds x calibration sizes x compensations.

Statistics are collected once for each seed and calibration size, moments and effects once for each seed. Equal
selections are evaluated once. Finished cells are written to a journal, from which an interrupted sweep continues.
Several processes, on one machine or many, may run the same sweep in one folder, and share its cells.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...data.targets import samples_of, size_of
from ...errors import RecipeError, RequestError
from ...evaluate.predict import Predictions, predict
from ...kinds import ATTENTION, KINDS, MLP
from ...measure.machine import machine_facts
from ...pipeline.quality import Refit, predict_pruned
from ...progress import SILENT, Progress
from ...recipe import PruningRecipe
from ...score.criteria import COMPENSATED_NAMES
from ...select.bundles import bundles_lost
from ...slim.refit import LayerFit, refit
from ...tasks import TASKS
from ...units import Selection
from ...values import dump_json, library_versions
from ..baselines.channels import check_channels, masked_channels, select_channels
from ..baselines.names import CHANNELS, JUDGED_ONLY, SLICED, SLICED_TUNED
from ..baselines.slicing import fine_tuned, sliced
from .choosing import Chooser
from .claims import Claims
from .grid import Cell, SweepGrid, compensation_of
from .journal import Journal
from .latency import LatencyRequest, Stopwatch
from .page import PAGE, write_page
from .remaining import remaining
from .shared import Clock, Shared
from .tables import write_results

# Fields of the recipe that the grid replaces, by section.
_GIVEN_BY_THE_GRID = {"calibration": ("samples", "seed"), "prune": ("criterion", "alpha", "budget", "modules")}


@dataclass(frozen=True)
class SweepResult:
    """The rows of a sweep, and the work that this call did for them.

    Attributes:
        rows: One per cell, as in sweep.json.
        seconds: Seconds spent in this call, by kind of work.
        evaluations: Number of pruned models that this call evaluated on the evaluation rows.
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
    of the dense model. If the folder has journals of the same recipe, their finished rows are reused, also for another
    grid.

    Other processes may do the same at the same time. Each cell is claimed by one of them, and taken over if that one is
    gone; all return when the last cell is finished, with the same rows.

    Args:
        recipe: Model, data, evaluation and constraints. The grid replaces its criterion, alpha, budget, compensation
            method, calibration seed and calibration size.
        grid: The cells to evaluate. Those whose modules cannot meet a budget of FLOPs are left out, unless none can.
        latency: How to time the slim models against the dense one; None to time nothing. Models that keep equal numbers
            of units in every module are timed once.
        folder: Where to write: a new folder, or one with journals of a sweep of the same recipe. Several machines must
            share it.
        overwrite: Discard existing journals. Only the first of several processes may.
        progress: Shows stages and loops.

    Returns:
        The rows of all cells.

    Raises:
        RequestError: The recipe, the grid, the data or the model does not allow the sweep, or the folder holds
            something else, or, with `overwrite`, claims of a process that is alive.
        StepError: A step failed; finished cells stay in the journal.
    """
    if recipe.prune.steps > 1:
        raise RecipeError(
            [f"a sweep scores heads once for all sparsities, got prune.steps: {recipe.prune.steps}; set it to 1"]
        )
    grid = grid.for_modules(recipe.prune.modules)
    claims = Claims(folder)
    if overwrite:
        claims.refuse_others()
    before = _version(folder / "sweep.json")
    with Journal(folder, asked=_asked(recipe), overwrite=overwrite) as journal:
        runner = _Runner(recipe, grid, journal, claims, progress, latency)
        rows = runner.run()
        with claims.waited("results"):
            # One writer is enough: details.json needs the statistics of the first seed.
            if _version(folder / "sweep.json") == before or not _holds(folder / "sweep.json", rows):
                write_results(folder, rows, details=runner.details())
            if not (folder / PAGE).is_file() or _version(folder / "sweep.json") != before:
                write_page(folder)
    return SweepResult(rows=rows, seconds=runner.seconds, evaluations=runner.evaluations)


def _version(file: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is replaced; None if there is no file."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _holds(file: Path, rows: list[dict[str, Any]]) -> bool:
    """Return whether a sweep.json has these rows."""
    return file.is_file() and file.read_text(encoding="utf-8") == dump_json(rows)


def _asked(recipe: PruningRecipe) -> dict[str, Any]:
    """Return the fields of the recipe that decide a row's result besides its cell, and the library versions.

    The grid is not among them, so it may change from one call to the next. Fields at their defaults are left out, so
    that a journal from before a field was added stays valid.
    """
    fields = recipe.model_dump(mode="json", exclude={"output", "export", "measure"}, exclude_defaults=True)
    for section, left_out in _GIVEN_BY_THE_GRID.items():
        fields[section] = {k: v for k, v in fields.get(section, {}).items() if k not in left_out}
    return fields | {"versions": library_versions()}


class _Runner:
    """Evaluation of the cells that are in no journal yet."""

    def __init__(
        self,
        recipe: PruningRecipe,
        grid: SweepGrid,
        journal: Journal,
        claims: Claims,
        progress: Progress,
        latency: LatencyRequest | None = None,
    ):
        self._recipe, self._grid, self._progress = recipe, grid, progress
        self._journal, self._claims = journal, claims
        if latency is not None:
            latency.check(TASKS[recipe.task])
        self._clock = Clock()
        self.evaluations = 0
        progress.stage("load the model and the data")
        self._shared = Shared(recipe, grid, self._clock)
        self._base, self._constraints = self._shared.base, self._shared.options.constraints
        self._chooser = Chooser(self._shared, grid, journal, self._clock, progress)
        self._cells = self._chooser.cells()
        self._stopwatch = None if latency is None else Stopwatch(self._shared, journal, latency, progress)
        self._check_biases()
        if CHANNELS in grid.criteria:
            check_channels(self._base.scored)
        with self._clock("evaluate"):
            self._judge_all = self._shared.judge(self._shared.resolved.evaluation)
            self._dense = self._judge_all.of(self._judge_all.dense)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent, by kind of work."""
        return self._clock.seconds

    @property
    def _judged(self) -> dict[str, dict[str, Any]]:
        """Results by selection, of all workers: equal selections give equal results."""
        return {row["judged"]: row["result"] for row in self._journal.rows.values()}

    def run(self) -> list[dict[str, Any]]:
        """Evaluate the missing cells, together with other workers, and return the rows of all cells."""
        cells, journal = {self._chooser.key(cell): cell for cell in self._cells}, self._journal
        waiting = [cell for key, cell in cells.items() if key not in journal.rows]
        if len(waiting) < len(cells):
            self._progress.stage(f"{len(cells) - len(waiting)} of {len(cells)} rows are in the journal")
        started, part = time.perf_counter(), None
        with closing(remaining(cells, journal, self._claims, self._progress)) as ours:
            for _ in self._progress.track(waiting, f"sweep, {len(waiting)} rows"):
                cell = next(ours, None)
                if cell is None:
                    break
                if part != (cell.seed, cell.compensation):
                    part = (cell.seed, cell.compensation)
                    done = len(waiting) - sum(key not in journal.rows for key in cells)
                    self._say(cell, done, len(waiting), time.perf_counter() - started)
                journal.add(self._chooser.key(cell), self._evaluate(cell))
        if self._stopwatch is not None:
            # One worker times, while the others wait, so that they do not disturb it.
            with self._claims.waited("latency"), self._clock("latency"):
                journal.refresh()
                self._stopwatch.time([self._lost(cell) for cell in self._cells if cell.criterion not in JUDGED_ONLY])
        journal.reread()
        self._claims.forget(cells)
        return [self._row(cell) for cell in self._cells]

    def _say(self, cell: Cell, done: int, wanted: int, seconds: float) -> None:
        """Report the progress of the sweep, by the rows of all workers since this one began."""
        left = f", about {seconds / done * (wanted - done) / 60:.0f} min left" if done else ""
        name = f"seed {cell.seed}, compensation {cell.compensation}"
        self._progress.stage(f"{name}: {done} of {wanted} rows done{left}")

    def details(self) -> dict[str, Any]:
        """Return details.json: statistics and selections of the first seed and size, alpha curves, and row facts."""
        seed, size = self._grid.seeds[0], self._grid.calibration_sizes[0]
        _, statistics = self._shared.calibrated(seed, size)
        plans = {}
        for cell in self._cells:
            # Criteria with a number of samples of their own have 0.
            if cell.seed != seed or cell.samples not in (0, size) or cell.criterion in JUDGED_ONLY:
                continue
            entry = self._journal.rows[self._chooser.key(cell)]
            selection = self._chooser.selection(cell, entry["alpha"])
            kept = {name: kept.units for name, kept in selection.items()}
            label = {"criterion": cell.criterion, "alpha": entry["alpha"], "sparsity": cell.sparsity}
            if cell.flops is not None:
                label |= {"flops_target": cell.flops, "modules": "+".join(cell.kinds)}
            plans["|".join(map(str, label.values()))] = label | {"kept": kept}
        return {
            "seed": seed,
            "calibration_samples": statistics.calibration.samples,
            "key_value_heads": {module.name: module.groups for module in self._base.modules},
            "kinds": {module.name: module.kind for module in self._base.modules},
            "his": statistics["his"],
            "entropy": statistics["entropy"],
            "plans": list(plans.values()),
            "alpha_curves": list(self._journal.alphas.values()),
            "about": self._about(),
        }

    def _about(self) -> dict[str, Any]:
        """Return the facts about the rows: model, data and environment."""
        recipe, base, resolved = self._recipe, self._base, self._shared.resolved
        return {
            "model": recipe.model,
            "task": recipe.task,
            "calibration_split": recipe.calibration.split,
            "evaluation_split": recipe.evaluation.split,
            "evaluation_samples": samples_of(resolved.evaluation),
            "evaluation_of": resolved.evaluation_of,
            "evaluation_rows": recipe.evaluation.rows,
            "shape": list(next(iter(base.measured))),
            "environment": machine_facts(),
        }

    def _evaluate(self, cell: Cell) -> dict[str, Any]:
        """Evaluate a cell, and return its entry for the journal."""
        if cell.criterion in JUDGED_ONLY:
            judged, result = self._evaluate_baseline(cell)
            alpha, lost = None, None
        else:
            alpha = self._chooser.alpha(cell, self._refit(cell))
            selection = self._chooser.selection(cell, alpha)
            lost = bundles_lost(selection, self._base.modules, unit=self._constraints.unit)
            units = ";".join(f"{kept.units}" for kept in selection.values())
            # The seed matters only to compensation: moments differ between seeds.
            judged = f"{cell.compensation}|{'' if cell.compensation == 'none' else cell.seed}|{units}"
            result = self._judged.get(judged) or self._evaluate_selection(selection, cell)
        return {"judged": judged, "alpha": alpha, "samples": self._samples(cell), "result": result, "lost": lost}

    def _lost(self, cell: Cell) -> Mapping[str, int] | None:
        """Return how many bundles each module of a finished cell loses; None in older journals, which lack it."""
        found: Mapping[str, int] | None = self._journal.rows[self._chooser.key(cell)].get("lost")
        return found

    def _samples(self, cell: Cell) -> int:
        """Return the number of calibration samples behind a cell, for its row."""
        if cell.criterion in COMPENSATED_NAMES:
            return sum(map(size_of, self._shared.compensated_candidates(cell.seed).effect_batches))
        return cell.samples or sum(map(size_of, self._shared.unlabelled(cell.seed)))

    def _row(self, cell: Cell) -> dict[str, Any]:
        """Return the row of a finished cell, as in sweep.json."""
        entry = self._journal.rows[self._chooser.key(cell)]
        cut = cell.criterion not in JUDGED_ONLY
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
            # Journals from before neurons have heads only.
            "neurons_removed": 0 if cut else None,
            **entry["result"],
            **timed,
        }

    def _evaluate_selection(self, selection: Selection, cell: Cell) -> dict[str, Any]:
        """Return the result of the model without the units that a selection removes."""
        refitted = self._refit(cell)
        base = self._base
        with self._clock("evaluate"):
            predictions = predict_pruned(
                base.model, selection, base.modules, self._shared.resolved.evaluation, refit=refitted
            )
        removed = dict.fromkeys(KINDS, 0)
        for kept in selection.values():
            removed[kept.kind] += len(kept.removed)
        return self._result(predictions) | {
            "flops_ratio": self._chooser.flops_ratio(selection),
            "heads_removed": removed[ATTENTION],
            "neurons_removed": removed[MLP],
        }

    def _evaluate_baseline(self, cell: Cell) -> tuple[str, dict[str, Any]]:
        """Evaluate a baseline without channels or with sliced inputs; also return a name that equal models share."""
        model, modules = self._base.model, self._base.scored
        assert cell.sparsity is not None
        stay: dict[str, Tensor] = {}
        judged = f"{cell.criterion}|{cell.seed}|{cell.sparsity}"
        if cell.criterion == CHANNELS:
            scores = self._shared.calibrated(cell.seed, cell.samples)[1]["channel_taylor"]
            stay = select_channels(scores, modules, heads=cell.sparsity, constraints=self._constraints)
            kept = ";".join(str(tuple(mask.nonzero().flatten().tolist())) for mask in stay.values())
            judged = f"{CHANNELS}|{kept}"
        if (known := self._judged.get(judged)) is not None:
            return judged, known
        with ExitStack() as stack:
            if cell.criterion == CHANNELS:
                stack.enter_context(masked_channels(model, modules, stay))
            if cell.criterion in (SLICED, SLICED_TUNED):
                bases, batches, targets = self._shared.bases(cell.seed)
                stack.enter_context(sliced(model, modules, bases, share=cell.sparsity))
            if cell.criterion == SLICED_TUNED:
                with self._clock("fine-tune"):
                    stack.enter_context(fine_tuned(model, modules, batches, targets))
            with self._clock("evaluate"):
                predictions = predict(model, self._shared.resolved.evaluation)
        return judged, self._result(predictions) | {"flops_ratio": None, "heads_removed": None, "neurons_removed": None}

    def _result(self, predictions: Predictions) -> dict[str, Any]:
        """Return the metric and the stability of predictions, as fields of a row."""
        self.evaluations += 1
        quality, name = self._judge_all.of(predictions), self._base.judged.metrics[0]
        return {
            "metric": name,
            "quality": quality.metrics[name],
            "quality_dense": self._dense.metrics[name],
            "stability": quality.stability,
        }

    def _refit(self, cell: Cell) -> Refit | None:
        asked = self._shared.options.compensation
        how = compensation_of(cell.compensation, None if asked is None else asked.ridge)
        if how is None:
            return None
        moments = self._shared.moments(cell.seed)

        def refitted(slim: PreTrainedModel, selection: Selection) -> list[LayerFit]:
            with self._clock("refit"):
                return refit(slim, selection, self._base.modules, moments, how)

        return refitted

    def _check_biases(self) -> None:
        """Refuse to refit biases that are not there."""
        for module in self._base.scored if "bias" in self._grid.compensations else ():
            if getattr(self._base.model.get_submodule(module.consumer), "bias", None) is None:
                raise RequestError(
                    f"the compensation bias needs output projections with a bias, but {module.consumer} has none; "
                    "leave it out of the compensations"
                )
