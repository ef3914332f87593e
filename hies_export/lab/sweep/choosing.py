"""Choose the units of every cell of a sweep: score, choose alpha, select."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.integrate import trapezoid

from ...errors import RecipeError
from ...evaluate.metrics import higher_is_better
from ...pipeline.held_out import HeldOut, choose_alpha
from ...pipeline.stages import ALPHAS, Refit
from ...progress import Clock, Progress
from ...score.criteria import COMPENSATED_NAMES, Scores, score_units
from ...select.constraints import check_budget
from ...select.cost import check_reachable, lowest_ratio
from ...select.select import select_units
from ...units.units import Selection
from ..baselines.flap import fluctuations, score_flap
from ..baselines.kwon import rearranged
from ..baselines.martra import score_martra
from ..baselines.names import FLAP, KWON, MARTRA, UNIFORM, WANDA
from ..baselines.wanda import score_wanda
from .grid import MODULES, Cell, SweepGrid
from .shared import Shared


def weighted_area(removed: Sequence[float], values: Sequence[float]) -> float:
    """Return the mean of a curve over the share removed, weighted by that share, so that deep cuts count most.

    The mean is the integral of s * value(s) divided by the integral of s, both by the trapezoidal rule. For a single
    point, it is that point's value.
    """
    s, v = np.array(sorted(zip(removed, values, strict=True))).T
    return float(trapezoid(s * v, s) / trapezoid(s, s)) if len(s) > 1 else float(v[0])


class Chooser:
    """The units that the cells of a grid keep.

    Budgets that the constraints do not allow are refused at once. `curves` has the known curves of alpha, and
    `keep_curve` adds one.
    """

    def __init__(
        self,
        shared: Shared,
        grid: SweepGrid,
        curves: Mapping[str, dict[str, Any]],
        keep_curve: Callable[[str, dict[str, Any]], None],
        clock: Clock,
        progress: Progress,
    ):
        self._shared, self._grid, self._clock = shared, grid, clock
        self._curves, self._keep_curve = curves, keep_curve
        self._base, self._options = shared.base, shared.options
        self._constraints = self._options.constraints
        for sparsity in grid.shares:
            check_budget(self._base.scored, heads=sparsity, constraints=self._constraints)
        grouped = any(module.group_size > 1 for module in self._base.scored)
        if KWON in grid.criteria and grouped and self._constraints.unit == "query":
            raise RecipeError(
                [f"{KWON} removes whole key/value groups, got unit: query; set unit: group or leave it out"]
            )
        for modules in grid.modules:
            lowest = self._lowest.get(modules, 0.0)
            if out := [f"{flops:g}" for flops in grid.flops if flops < lowest]:
                progress.stage(f"{modules}: {', '.join(out)} of the FLOPs left out, the lowest is {lowest:.3f}")

    @cached_property
    def _lowest(self) -> dict[str, float]:
        """The lowest share of FLOPs that cuts of the grid's modules reach; empty without budgets of FLOPs."""
        if not self._grid.flops:
            return {}
        parts = {name: self._shared.scored(MODULES[name]) for name in self._grid.modules}
        found = {name: lowest_ratio(part, self._base.flops_table, self._constraints) for name, part in parts.items()}
        best, least = parts[min(found, key=lambda name: found[name])], min(self._grid.flops)
        check_reachable(best, self._base.flops_table, ratio=least, constraints=self._constraints)
        return found

    def cells(self) -> list[Cell]:
        """Return the cells of the grid whose budget their modules can meet."""
        return [cell for cell in self._grid.cells() if cell.flops is None or self._lowest[cell.modules] <= cell.flops]

    def selection(self, cell: Cell, alpha: float | None) -> Selection:
        """Return the units that a cell keeps at an alpha."""
        selection = self._select(self._scores(cell, alpha), cell)
        if cell.criterion != KWON:
            return selection
        gradients = self._shared.mask_gradients(cell.seed, cell.samples)
        return rearranged(selection, self._shared.scored(cell.kinds), gradients)

    def _select(self, scores: Scores, cell: Cell) -> Selection:
        constraints = self._constraints
        if cell.criterion in UNIFORM:
            constraints = replace(constraints, allocation="uniform")
        if cell.flops is None:
            assert cell.sparsity is not None
            return select_units(scores, self._base.modules, heads=cell.sparsity, constraints=constraints)
        table = self._base.flops_table
        return select_units(scores, self._base.modules, table=table, ratio=cell.flops, constraints=constraints)

    def flops_ratio(self, selection: Selection) -> float:
        """Return the FLOPs of the slim model as a share of the dense model's; a budget's table has them already."""
        return self._base.flops_left(selection) if self._grid.flops else self._shared.flops_ratio(selection)

    def _scores(self, cell: Cell, alpha: float | None) -> Scores:
        modules = self._shared.scored(cell.kinds)
        if cell.criterion in COMPENSATED_NAMES:
            every = self._shared.compensated_scores(cell.seed)
            names = {module.name for module in modules}
            return replace(
                every,
                scores={name: scores for name, scores in every.scores.items() if name in names},
                chains=tuple(chain for chain in every.chains if chain[0].module in names),
            )
        model = self._base.model
        if cell.criterion == FLAP:
            found = fluctuations(model, modules, self._shared.averages(cell.seed))
            return score_flap(found, modules, unit=self._constraints.unit)
        if cell.criterion == WANDA:
            return score_wanda(model, modules, self._shared.averages(cell.seed))
        if cell.criterion == MARTRA:
            return score_martra(model, modules)
        statistics = self._shared.statistics(cell.seed, cell.samples)
        criterion = "fisher" if cell.criterion == KWON else cell.criterion
        options: dict[str, Any] = {"normalize": self._options.normalize, "seed": cell.seed}
        if alpha is not None:
            options["alpha"] = alpha
        return score_units(statistics, modules, criterion=criterion, **options)

    def alpha(self, cell: Cell, refit: Refit | None) -> float | None:
        """Return the alpha of a cell; "auto" and "auto-area" choose it on held-out rows, refitted or masked."""
        if not isinstance(cell.alpha, str):
            return cell.alpha
        alike = self._alike(cell)
        if cell.alpha == "auto":
            return float(self._curve(alike[0], refit)["chosen"])
        # "auto-area": the alpha with the largest weighted area under the held-out curve; ties go to the larger alpha.
        curves = [self._curve(at, refit)["curve"] for at in alike]
        labelled = curves[0][0]["quality"] is not None
        sign = 1 if not labelled or higher_is_better(self._base.metrics[0]) else -1
        quantity = "quality" if labelled else "stability"
        areas = [
            (sign * weighted_area([at.removed for at in alike], [curve[i][quantity] for curve in curves]), alpha)
            for i, alpha in enumerate(ALPHAS)
        ]
        return max(areas)[1]

    def curve_keys(self, cell: Cell) -> list[str]:
        """Return the keys of the curves that choose the alpha of a cell; none if it is given or not used."""
        return [self.key(at) for at in self._alike(cell)]

    def _alike(self, cell: Cell) -> list[Cell]:
        """Return a cell, without its alpha, at the budgets whose curves choose that alpha."""
        if not isinstance(cell.alpha, str):
            return []
        budgets = [(cell.sparsity, cell.flops)]
        if cell.alpha != "auto":
            lowest = self._lowest.get(cell.modules, 0.0)
            budgets = [(share, flops) for share, flops in self._grid.budgets() if flops is None or lowest <= flops]
        return [replace(cell, alpha=None, sparsity=sparsity, flops=flops) for sparsity, flops in budgets]

    def _curve(self, at: Cell, refit: Refit | None) -> dict[str, Any]:
        """Return all alphas' judgements on the held-out rows at a budget ("curve"), and the best alpha ("chosen")."""
        key = self.key(at)
        if key not in self._curves:
            judge = self._shared.held_out_judge(at.seed, at.samples)
            held_out = HeldOut(judge, self._base.model, self._base.modules, refit)
            with self._clock("choose alpha"):
                candidates = [self._scores(at, alpha) for alpha in ALPHAS]
                choice = choose_alpha([(scores, self._select(scores, at)) for scores in candidates], held_out)
            left_out = ("alpha", *(("flops", "modules") if at.flops is None else ()))
            found = {name: value for name, value in asdict(at).items() if name not in left_out}
            found |= {"chosen": choice.scores.parameters["alpha"], "curve": list(choice.curve)}
            self._keep_curve(key, found)
        return self._curves[key]

    def key(self, cell: Cell) -> str:
        """Return the cell's name in the journal."""
        return cell.key(self._grid, shape=next(iter(self._base.shapes)))
