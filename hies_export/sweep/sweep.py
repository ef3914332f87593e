"""Evaluate every cell of a grid: criteria x alphas x sparsities x seeds x calibration sizes x compensations.

Statistics are collected once for each seed and calibration size, moments and effects once for each seed. Equal
selections are evaluated once. Finished cells are written to a journal, from which an interrupted sweep continues.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..baselines.channels import check_channels, masked_channels, select_channels
from ..baselines.names import CHANNELS, JUDGED_ONLY, SLICED, SLICED_TUNED
from ..baselines.slicing import fine_tuned, sliced
from ..data.targets import size_of
from ..errors import RecipeError
from ..evaluate.metrics import higher_is_better
from ..evaluate.predict import Predictions, predict
from ..pipeline.prepare import constraints_of
from ..pipeline.quality import Refit, predict_pruned
from ..pipeline.search import ALPHAS, HeldOut, choose_alpha
from ..progress import SILENT, Progress
from ..recipe import PruningRecipe
from ..score.criteria import COMPENSATED, score_units
from ..select.constraints import check_budget
from ..select.select import select_units
from ..slim.refit import Compensation, LayerFit, refit
from ..units import Selection
from ..values import Scores, library_versions
from .grid import Cell, SweepGrid
from .journal import Journal
from .shared import Clock, Shared
from .tables import write_results

# Fields of the recipe that the grid replaces, by section.
_GIVEN_BY_THE_GRID = {"calibration": ("samples", "seed"), "prune": ("criterion", "alpha", "budget")}


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
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> SweepResult:
    """Evaluate every cell of a grid and write sweep.json, details.json, sweep.csv, tables.md and tables.tex.

    Without compensation, a selection is evaluated masked. With compensation, the model is cut and refitted from moments
    of the dense model. If the folder has a journal of the same recipe, its finished rows are reused, also for another
    grid.

    Args:
        recipe: Model, data, evaluation and constraints. The grid replaces its criterion, alpha, budget, compensation
            method, calibration seed and calibration size.
        grid: The cells to evaluate.
        folder: Where to write: a new folder, or one with the journal of a sweep of the same recipe.
        overwrite: Discard an existing journal.
        progress: Shows stages and loops.

    Returns:
        The rows of all cells.

    Raises:
        RequestError: The recipe, the grid, the data or the model does not allow the sweep, or the folder holds
            something else.
        StepError: A step failed; finished cells stay in the journal.
    """
    if recipe.prune.steps > 1:
        raise RecipeError(
            [f"a sweep scores heads once for all sparsities, got prune.steps: {recipe.prune.steps}; set it to 1"]
        )
    with Journal(folder, asked=_asked(recipe), overwrite=overwrite) as journal:
        runner = _Runner(recipe, grid, journal, progress)
        rows = runner.run()
        write_results(folder, rows, details=runner.details())
    return SweepResult(rows=rows, seconds=runner.seconds, evaluations=runner.evaluations)


def weighted_area(sparsities: Sequence[float], values: Sequence[float]) -> float:
    """Return the mean of a curve over sparsity, weighted by sparsity, so that deep cuts count most.

    The mean is the integral of s * value(s) divided by the integral of s, both by the trapezoidal rule. For a single
    point, it is that point's value.
    """
    points = sorted(zip(sparsities, values, strict=True))
    if len(points) == 1:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    area = sum((t - s) * (s * v + t * w) / 2 for (s, v), (t, w) in pairs)
    return area / sum((t - s) * (s + t) / 2 for (s, _), (t, _) in pairs)


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
    """Evaluation of the cells that are not yet in the journal."""

    def __init__(self, recipe: PruningRecipe, grid: SweepGrid, journal: Journal, progress: Progress):
        self._recipe, self._grid, self._journal, self._progress = recipe, grid, journal, progress
        self._constraints = constraints_of(recipe)
        self._clock = Clock()
        self.evaluations = 0
        progress.stage("load")
        self._shared = Shared(recipe, grid, self._clock)
        self._base = self._shared.base
        for sparsity in grid.sparsities:
            check_budget(self._base.scored, heads=sparsity, constraints=self._constraints)
        if CHANNELS in grid.criteria:
            check_channels(self._base.scored)
        with self._clock("evaluate"):
            self._judge_all = self._shared.judge(self._base.evaluation)
            self._dense = self._judge_all.of(self._judge_all.dense)
        # Results by selection: equal selections give equal results, so those in the journal are not evaluated again.
        self._judged = {row["judged"]: row["result"] for row in journal.rows.values()}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent, by kind of work."""
        return self._clock.seconds

    def run(self) -> list[dict[str, Any]]:
        """Evaluate the missing cells, and return the rows of all cells."""
        cells = self._grid.cells()
        waiting = [cell for cell in cells if cell.key(self._grid) not in self._journal.rows]
        if len(waiting) < len(cells):
            self._progress.stage(f"{len(cells) - len(waiting)} of {len(cells)} rows are in the journal")
        started, part = time.perf_counter(), None
        for number, cell in enumerate(self._progress.track(waiting, f"sweep, {len(waiting)} rows")):
            if part != (cell.seed, cell.compensation):
                part = (cell.seed, cell.compensation)
                left = (time.perf_counter() - started) / number * (len(waiting) - number) if number else None
                known = "" if left is None else f", about {left / 60:.0f} min left"
                name = f"seed {cell.seed}, compensation {cell.compensation}"
                self._progress.stage(f"{name}: {number} of {len(waiting)} rows done{known}")
            self._journal.add(cell.key(self._grid), self._evaluate(cell))
        return [self._row(cell) for cell in cells]

    def details(self) -> dict[str, Any]:
        """Return the content of details.json.

        It has the statistics and selections of the first seed and calibration size, and all alpha curves.
        """
        seed, size = self._grid.seeds[0], self._grid.calibration_sizes[0]
        _, statistics = self._shared.calibrated(seed, size)
        plans = {}
        for cell in self._grid.cells():
            if (cell.seed, cell.samples) != (seed, size) or cell.criterion in JUDGED_ONLY:
                continue
            entry = self._journal.rows[cell.key(self._grid)]
            selection = self._select(self._scores(cell, entry["alpha"]), cell)
            kept = {name: kept.units for name, kept in selection.items()}
            label = {"criterion": cell.criterion, "alpha": entry["alpha"], "sparsity": cell.sparsity}
            plans["|".join(map(str, label.values()))] = label | {"kept": kept}
        return {
            "seed": seed,
            "calibration_samples": statistics.calibration.samples,
            "key_value_heads": {module.name: module.groups for module in self._base.sites},
            "his": statistics["his"],
            "entropy": statistics["entropy"],
            "plans": list(plans.values()),
            "alpha_curves": list(self._journal.alphas.values()),
        }

    def _evaluate(self, cell: Cell) -> dict[str, Any]:
        """Evaluate a cell, and return its entry for the journal."""
        alpha = self._alpha(cell) if isinstance(cell.alpha, str) else cell.alpha
        if cell.criterion in JUDGED_ONLY:
            judged, result = self._evaluate_baseline(cell)
        else:
            selection = self._select(self._scores(cell, alpha), cell)
            units = ";".join(f"{kept.units}" for kept in selection.values())
            # The seed matters only to compensation: moments differ between seeds.
            judged = f"{cell.compensation}|{'' if cell.compensation == 'none' else cell.seed}|{units}"
            result = self._judged.get(judged) or self._evaluate_selection(selection, cell)
        self._judged[judged] = result
        return {"judged": judged, "alpha": alpha, "samples": self._samples(cell), "result": result}

    def _samples(self, cell: Cell) -> int:
        """Return the number of calibration samples behind a cell, for its row."""
        if cell.criterion == COMPENSATED:
            return self._shared.effects(cell.seed).samples
        return cell.samples or sum(map(size_of, self._shared.unlabelled(cell.seed)))

    def _row(self, cell: Cell) -> dict[str, Any]:
        """Return the row of a finished cell, as in sweep.json."""
        entry = self._journal.rows[cell.key(self._grid)]
        return {
            "criterion": cell.criterion,
            "alpha": entry["alpha"],
            "alpha_by": cell.alpha if isinstance(cell.alpha, str) else None if cell.alpha is None else "given",
            "sparsity": cell.sparsity,
            "seed": cell.seed,
            "calibration_samples": entry["samples"],
            "compensation": cell.compensation,
            **entry["result"],
        }

    def _evaluate_selection(self, selection: Selection, cell: Cell) -> dict[str, Any]:
        """Return the result of the model without the units that a selection removes."""
        refitted = self._refit(cell)
        base = self._base
        with self._clock("evaluate"):
            predictions = predict_pruned(base.model, selection, base.sites, base.evaluation, refit=refitted)
        removed = sum(len(kept.removed) for kept in selection.values())
        ratio = self._shared.flops_ratio(selection)
        return self._result(predictions) | {"flops_ratio": ratio, "heads_removed": removed}

    def _evaluate_baseline(self, cell: Cell) -> tuple[str, dict[str, Any]]:
        """Evaluate a baseline that does not remove heads: without channels, or with sliced inputs.

        Returns:
            A name that is equal for equal models, and the result.
        """
        model, modules = self._base.model, self._base.scored
        stay: dict[str, Tensor] = {}
        judged = f"{cell.criterion}|{cell.seed}|{cell.sparsity}"
        if cell.criterion == CHANNELS:
            scores = self._shared.calibrated(cell.seed, cell.samples)[1]["channel_taylor"]
            stay = select_channels(scores, modules, heads=cell.sparsity, constraints=self._constraints)
            kept = ";".join(str(tuple(mask.nonzero().flatten().tolist())) for mask in stay.values())
            judged = f"{CHANNELS}|{kept}"
        if judged in self._judged:
            return judged, self._judged[judged]
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
                predictions = predict(model, self._base.evaluation)
        return judged, self._result(predictions) | {"flops_ratio": None, "heads_removed": None}

    def _result(self, predictions: Predictions) -> dict[str, Any]:
        """Return the metric and the stability of predictions, as fields of a row."""
        self.evaluations += 1
        quality, name = self._judge_all.of(predictions), self._base.metrics[0]
        return {
            "metric": name,
            "quality": quality.metrics[name],
            "quality_dense": self._dense.metrics[name],
            "stability": quality.stability,
        }

    def _refit(self, cell: Cell) -> Refit | None:
        if cell.compensation == "none":
            return None
        moments, section = self._shared.moments(cell.seed), self._recipe.prune.compensation
        how = Compensation(method=cell.compensation, ridge=None if section is None else section.ridge)

        def refitted(slim: PreTrainedModel, selection: Selection) -> list[LayerFit]:
            with self._clock("refit"):
                return refit(slim, selection, self._base.sites, moments, how)

        return refitted

    def _select(self, scores: Scores, cell: Cell) -> Selection:
        return select_units(scores, self._base.sites, heads=cell.sparsity, constraints=self._constraints)

    def _scores(self, cell: Cell, alpha: float | None) -> Scores:
        if cell.criterion == COMPENSATED:
            return self._shared.compensated_scores(cell.seed)
        _, statistics = self._shared.calibrated(cell.seed, cell.samples)
        normalize = self._recipe.prune.normalize
        given = {} if alpha is None else {"alpha": alpha}
        return score_units(statistics, criterion=cell.criterion, normalize=normalize, seed=cell.seed, **given)

    def _alpha(self, cell: Cell) -> float:
        """Return the alpha that "auto" or "auto-area" chooses for a cell, from held-out rows."""
        if cell.alpha == "auto":
            return float(self._curve(cell, cell.sparsity)["chosen"])
        # "auto-area": the alpha with the largest weighted area under the held-out curve; ties go to the larger alpha.
        curves = [self._curve(cell, sparsity)["curve"] for sparsity in self._grid.sparsities]
        labelled = curves[0][0]["quality"] is not None
        sign = 1 if not labelled or higher_is_better(self._base.metrics[0]) else -1
        quantity = "quality" if labelled else "stability"
        areas = [
            (sign * weighted_area(self._grid.sparsities, [curve[i][quantity] for curve in curves]), alpha)
            for i, alpha in enumerate(ALPHAS)
        ]
        return max(areas)[1]

    def _curve(self, cell: Cell, sparsity: float) -> dict[str, Any]:
        """Return all alphas' judgements on the held-out rows at a sparsity ("curve"), and the best alpha ("chosen")."""
        at = replace(cell, alpha=None, sparsity=sparsity)
        key = at.key(self._grid)
        if key not in self._journal.alphas:
            judge = self._shared.held_out_judge(cell.seed, cell.samples)
            held_out = HeldOut(judge, self._base.model, self._base.sites, self._refit(cell))
            with self._clock("choose alpha"):
                candidates = [self._scores(at, alpha) for alpha in ALPHAS]
                choice = choose_alpha(candidates, lambda scores: self._select(scores, at), held_out)
            found = {name: value for name, value in asdict(at).items() if name != "alpha"}
            found |= {"chosen": choice.scores.parameters["alpha"], "curve": list(choice.curve)}
            self._journal.add_alpha(key, found)
        return self._journal.alphas[key]
