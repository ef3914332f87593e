"""Evaluate a cell of a sweep: choose its units as a run does, and judge the model without the others.

A process loads the model once. What a seed's rows say is computed once, when a cell first reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from scipy.integrate import trapezoid
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.calibrate.statistics import DEFAULT_NEEDS, Statistics, collect_statistics
from hies_export.data.batches import samples_of
from hies_export.errors import RecipeError
from hies_export.evaluate.judge import Judge, Quality
from hies_export.evaluate.metrics import higher_is_better
from hies_export.evaluate.predict import predict
from hies_export.kinds import BOTH
from hies_export.model.copies import share_weights
from hies_export.pipeline import stages
from hies_export.pipeline.delivery import Delivery
from hies_export.pipeline.draw import Splits, draw
from hies_export.pipeline.load_recipe import load_recipe, read_drawn
from hies_export.pipeline.pruning import Pruning, check_criteria
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.pipeline.trials import Trials, choose_alpha
from hies_export.progress import SILENT, Clock, Progress
from hies_export.recipe.budget import Budget
from hies_export.recipe.sections import CompensationSection
from hies_export.score.criteria import AUTO, COMPENSATED, FALLBACK, Scores, needs_of, uses_alpha
from hies_export.select.constraints import bundles_lost, check_budget
from hies_export.select.cost import Goal, check_reachable, lowest_ratio
from hies_export.slim.certainty import fit_logit_scale
from hies_export.slim.cut import prune_units
from hies_export.slim.refit import LayerFit, compensate
from hies_export.tasks import Predictions
from hies_export.units.counts import count_flops
from hies_export.units.units import Selection

from ..baselines import channels, flap, kwon, slicing
from ..baselines.names import CHANNELS, FLAP, JUDGED_ONLY, KWON, MARTRA, OWN_SAMPLES, SLICED_TUNED, UNIFORM, WANDA
from .grid import AUTOMATIC, MODULES, SCALARS, WEIGHTED, Cell, SweepGrid, compensation_of
from .journal import digest


@dataclass
class Calibrated:
    """The model with the rows of a seed and a calibration size, and what is computed when it is first read."""

    pruning: Pruning
    grid: SweepGrid

    @cached_property
    def statistics(self) -> Statistics:
        """The averages that the criteria of the grid score by, and the moments that layers are refitted from."""
        pruning, grid = self.pruning, self.grid
        needs = (*DEFAULT_NEEDS, *needs_of(*grid.criteria))
        found = collect_statistics(pruning.model, pruning.rows.score, pruning.scored, needs=needs)
        how = compensation_of(WEIGHTED if WEIGHTED in grid.compensations else "least_squares", pruning.options)
        options = pruning.options.model_copy(update={"compensation": how})
        return replace(found, moments=stages.moments_of(replace(pruning, options=options)))

    @cached_property
    def channel_scores(self) -> dict[str, Tensor]:
        """The first-order Taylor importance of every channel of heads, (groups * unit_width,) by module."""
        return channels.channel_taylor(self.pruning.model, self.pruning.rows.score, self.pruning.scored)

    @cached_property
    def removal(self) -> Scores:
        """The orders of removal of `compensated` for all modules, and their effects; cells of all sizes share them."""
        return stages.score_by_removal(self.pruning, self.statistics)

    @cached_property
    def averages(self) -> dict[str, flap.Averages]:
        """The averages of what consumers read, by module name."""
        return flap.input_averages(self.pruning.model, self.pruning.rows.refit, self.pruning.modules)

    @cached_property
    def mask_gradients(self) -> dict[str, Tensor]:
        """The gradients that `kwon` rearranges units by, (samples, units) by module name."""
        return kwon.mask_gradients(self.pruning.model, self.pruning.rows.score, self.pruning.scored)

    @cached_property
    def bases(self) -> tuple[slicing.Bases, Predictions]:
        """The principal components on the rows to refit on, and the dense model's predictions there."""
        model, rows = self.pruning.model, self.pruning.rows.refit
        return slicing.collect_bases(model, rows, self.pruning.scored), predict(model, rows)

    @cached_property
    def judge(self) -> Judge:
        """The judge on the held-out rows."""
        return self.pruning.judge(self.pruning.rows.held_out)


@dataclass
class Shared:
    """What the cells of a sweep share in a process.

    Attributes:
        base: The model with the rows of the first seed and calibration size.
        delivery: How its rows are read, and how models are exported and timed.
        curves: How the alphas did on held-out rows, by the key of a cell.
        judged: Results by the name of what stays; what is equal is evaluated once.
        evaluations: How many models were judged on the evaluation rows.
    """

    recipe: PruningRecipe
    grid: SweepGrid
    base: Pruning
    delivery: Delivery
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    judged: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluations: int = 0
    _calibrated: dict[tuple[int, int], Calibrated] = field(default_factory=dict)

    def calibrated(self, seed: int, samples: int = 0) -> Calibrated:
        """Return the `Calibrated` of a seed and a calibration size, by default the first; drop those of other seeds."""
        first = self.grid.seeds[0], self.grid.calibration_sizes[0]
        key = seed, samples or first[1]
        if key not in self._calibrated:
            self._calibrated = {other: kept for other, kept in self._calibrated.items() if other[0] == seed}
            pruning = self.base if key == first else self._redrawn(key)
            self._calibrated[key] = Calibrated(pruning, self.grid)
        return self._calibrated[key]

    def _redrawn(self, key: tuple[int, int]) -> Pruning:
        return redrawn(self.base, self.delivery, _recipe_of(self.recipe, self.grid, *key))

    @cached_property
    def judge(self) -> tuple[Judge, Quality]:
        """The judge on the evaluation rows, and what it says of the dense model."""
        judge = self.base.judge(self.base.rows.evaluation)
        return judge, judge.of(judge.dense)

    @cached_property
    def dense_flops(self) -> int:
        """The FLOPs of the dense model."""
        return count_flops(self.base.model, next(iter(self.base.shapes.values())))

    @cached_property
    def lowest(self) -> dict[str, float]:
        """The lowest share of FLOPs that cuts of the grid's modules reach; empty without budgets of FLOPs."""
        if not self.grid.flops:
            return {}
        base, constraints = self.base, self.base.options
        parts = {name: [m for m in base.scored if m.kind in MODULES[name]] for name in self.grid.modules}
        found = {name: lowest_ratio(part, base.flops_table, constraints) for name, part in parts.items()}
        best = parts[min(found, key=lambda name: found[name])]
        check_reachable(best, base.flops_table, ratio=min(self.grid.flops), constraints=constraints)
        return found

    def key(self, cell: Cell) -> str:
        """Return the cell's name in the journal, with the shape of FLOPs; "auto-area" depends on all budgets."""
        over = (self.grid.budgets(),) if cell.alpha == "auto-area" else ()
        return "|".join(map(str, (*astuple(cell), next(iter(self.base.shapes)), *over)))


def load_shared(recipe: PruningRecipe, grid: SweepGrid) -> Shared:
    """Load the model, and the rows of the first seed and calibration size; refuse what does not suit the grid."""
    clock = Clock()
    with clock("load"):
        pruning, delivery = load_recipe(_recipe_of(recipe, grid, grid.seeds[0], grid.calibration_sizes[0]))
    check_criteria(pruning, *grid.criteria)
    # What a cell refits with follows from its compensation and these.
    options = pruning.options.model_copy(update={"compensation": recipe.options.compensation})
    return Shared(recipe, grid, replace(pruning, options=options, clock=clock), delivery)


def _recipe_of(recipe: PruningRecipe, grid: SweepGrid, seed: int, samples: int) -> PruningRecipe:
    """Return the recipe of a seed and calibration size, which draws all rows that cells of the grid read."""
    weighed = next(filter(uses_alpha, grid.criteria), None)
    automatic = weighed is not None and any(alpha in AUTOMATIC for alpha in grid.alphas)
    refitted = not set(OWN_SAMPLES).isdisjoint(grid.criteria) or set(grid.compensations) != {"none"}
    asked: dict[str, Any] = {
        "criterion": weighed if automatic else FALLBACK,
        "alpha": AUTO if automatic else 0.0,
        "modules": grid.kinds,
        "budget": Budget(flops=min(grid.flops)) if grid.flops else Budget(heads=max(grid.sparsities)),
        "compensation": recipe.options.compensation or CompensationSection() if refitted else None,
    }
    sections = {
        "calibration": recipe.calibration.model_copy(update={"seed": seed, "samples": samples}),
        "prune": recipe.prune.model_copy(update=asked),
        # Cells are timed on the sweep's own runtimes, so the recipe's need not be installed.
        "measure": recipe.measure.model_copy(update={"runtimes": ("torch",)}),
        "cascade": None,
    }
    return recipe.model_copy(update=sections)


def redrawn(pruning: Pruning, delivery: Delivery, recipe: PruningRecipe) -> Pruning:
    """Return a pruning with the same model and evaluation rows, and other rows drawn as a recipe says."""
    with pruning.clock("load"):
        reading = delivery.reading
        assert reading is not None
        splits = Splits(recipe.data, recipe.calibration, recipe.evaluation, recipe.held_out)
        drawn = draw(splits, partial(reading.dense.load, **recipe.data.source), recipe.options)
        found = read_drawn(recipe, reading, drawn)
    untrimmed = {**pruning.rows.untrimmed, **found.untrimmed}
    rows = replace(pruning.rows, score=found.score, held_out=found.held_out, refit=found.refit, untrimmed=untrimmed)
    return replace(pruning, rows=rows, seed=recipe.calibration.seed)


def reachable_cells(shared: Shared, progress: Progress = SILENT) -> list[Cell]:
    """Return the cells whose budget their modules can meet; refuse what the constraints do not allow."""
    base, grid, lowest = shared.base, shared.grid, shared.lowest
    for sparsity in grid.sparsities:
        check_budget(base.scored, heads=sparsity, constraints=base.options)
    if KWON in grid.criteria and base.options.unit == "query" and any(m.group_size > 1 for m in base.scored):
        raise RecipeError([f"{KWON} removes whole key/value groups, got unit: query; set unit: group or leave it out"])
    if CHANNELS in grid.criteria:
        channels.check_channels(base.scored)
    for modules, least in lowest.items():
        if out := [f"{flops:g}" for flops in grid.flops if flops < least]:
            progress.stage(f"{modules}: {', '.join(out)} of the FLOPs left out, the lowest is {least:.3f}")
    return [cell for cell in grid.cells() if cell.flops is None or lowest[cell.modules] <= cell.flops]


def evaluate_cell(shared: Shared, cell: Cell) -> dict[str, Any]:
    """Evaluate a cell, and return its entry for the journal."""
    alpha, selection, kept, lost = None, None, None, None
    judged = f"{cell.criterion}|{cell.seed}|{cell.samples}|{cell.sparsity}"
    if cell.criterion not in JUDGED_ONLY:
        with shared.base.clock("choose"):
            alpha = alpha_of(shared, cell)
            selection = selection_of(shared, cell, alpha)
        kept = {name: [*of.units] for name, of in selection.items()}
        lost = bundles_lost(selection, shared.base.modules, unit=shared.base.options.unit)
        # The seed matters only to compensation: moments differ between seeds.
        judged = f"{cell.compensation}|{'' if cell.compensation == 'none' else cell.seed}|{digest(kept)}"
    if judged not in shared.judged:
        with shared.base.clock("evaluate"):
            shared.judged[judged] = _judge(shared, cell, selection)
    entry = {"judged": judged, "alpha": alpha, "samples": _samples(shared, cell), "result": shared.judged[judged]}
    return entry | {"kept": kept, "lost": lost}


def _judge(shared: Shared, cell: Cell, selection: Selection | None) -> dict[str, Any]:
    """Return the result of the model that a cell leaves: of a selection, or of a baseline that removes other things."""
    base, (judge, dense), name = shared.base, shared.judge, shared.base.metrics[0]
    flops, heads, neurons = None, None, None
    if selection is None:
        with _baseline(shared, cell):
            predictions = predict(base.model, judge.batches)
    else:
        predictions = _predict(shared, selection, judge, refit_for(shared, cell))
        flops = flops_ratio(shared, selection)
        heads, neurons = (sum(len(of.removed) for of in selection.values() if of.kind == kind) for kind in BOTH)
    shared.evaluations += 1
    quality = judge.of(predictions)
    return {
        "metric": name,
        "quality": quality.metrics[name],
        "quality_dense": dense.metrics[name],
        "stability": quality.stability,
        "flops_ratio": flops,
        "heads_removed": heads,
        "neurons_removed": neurons,
    }


def _samples(shared: Shared, cell: Cell) -> int:
    """Return the number of calibration samples behind a cell, for its row."""
    if cell.criterion == MARTRA:
        return 0
    if cell.criterion == COMPENSATED:
        return samples_of(stages.effect_batches(shared.calibrated(cell.seed).pruning))
    return cell.samples or samples_of(shared.calibrated(cell.seed).pruning.rows.refit)


def flops_ratio(shared: Shared, selection: Selection) -> float:
    """Return the FLOPs of the slim model as a share of the dense model's; a budget's table has them already."""
    base = shared.base
    if shared.grid.flops:
        return base.flops_left(selection)
    # The forward of vision-language models and text encoders depends on values, which a meta device has not.
    copy = share_weights(base.model, device=None if base.task.in_parts or base.task.embeds else "meta")
    slim = prune_units(copy, selection, base.modules, inplace=True)
    return count_flops(slim, next(iter(base.shapes.values()))) / shared.dense_flops


def pruning_of(shared: Shared, cell: Cell) -> Pruning:
    """Return the pruning of the run that a cell stands for, apart from its criterion and its budget."""
    pruning = shared.calibrated(cell.seed, cell.samples).pruning
    asked = {"alpha": cell.alpha or 0.0, "compensation": compensation_of(cell.compensation, pruning.options)}
    if cell.criterion in UNIFORM:
        asked["allocation"] = "uniform"
    scored = tuple(module for module in pruning.scored if module.kind in MODULES[cell.modules])
    return replace(pruning, scored=scored, options=pruning.options.model_copy(update=asked))


def selection_of(shared: Shared, cell: Cell, alpha: float | None) -> Selection:
    """Return the units that a cell keeps at an alpha."""
    ((_, selection),) = _selected(shared, replace(cell, alpha=alpha))
    if cell.criterion != KWON:
        return selection
    of_seed = shared.calibrated(cell.seed, cell.samples)
    return kwon.rearranged(selection, pruning_of(shared, cell).scored, of_seed.mask_gradients)


def _selected(shared: Shared, cell: Cell) -> list[tuple[Scores, Selection]]:
    """Return pairs of scores and the selection by them: one pair, or one for each alpha that a cell tries."""
    pruning = pruning_of(shared, cell)
    goal = Goal(heads=cell.sparsity)
    if cell.flops is not None:
        goal = Goal(ratio=cell.flops, table=shared.base.flops_table)
    return [(scores, stages.select(pruning, scores, goal)) for scores in _scores(shared, cell, pruning)]


def _scores(shared: Shared, cell: Cell, pruning: Pruning) -> list[Scores]:
    of_seed, model, modules = shared.calibrated(cell.seed), pruning.model, pruning.scored
    if cell.criterion == COMPENSATED:
        names = {module.name for module in modules}
        scores = {name: values for name, values in of_seed.removal.scores.items() if name in names}
        chains = tuple(chain for chain in of_seed.removal.chains if chain[0].module in names)
        return [replace(of_seed.removal, scores=scores, chains=chains)]
    if cell.criterion == FLAP:
        fluctuations = flap.fluctuations(model, modules, of_seed.averages)
        return [flap.score_flap(fluctuations, modules, unit=pruning.options.unit)]
    if cell.criterion == WANDA:
        return [flap.score_wanda(model, modules, of_seed.averages)]
    if cell.criterion == MARTRA:
        return [flap.score_martra(model, modules)]
    statistics = shared.calibrated(cell.seed, cell.samples).statistics
    return stages.score(pruning, statistics, "fisher" if cell.criterion == KWON else cell.criterion)


def alpha_of(shared: Shared, cell: Cell) -> float | None:
    """Return the alpha of a cell; "auto" and "auto-area" choose it on held-out rows, refitted or masked."""
    if not isinstance(cell.alpha, str):
        return cell.alpha
    alike = _alike(shared, cell)
    found = [_curve(shared, at) for at in alike]
    if cell.alpha == "auto":
        return float(found[0]["chosen"])
    # "auto-area": the alpha with the largest weighted area under the held-out curve; ties go to the larger alpha.
    labelled = found[0]["curve"][0]["quality"] is not None
    quantity = "quality" if labelled else "stability"
    sign = 1 if not labelled or higher_is_better(shared.base.metrics[0]) else -1
    areas = [
        (sign * weighted_area([at.removed for at in alike], [point[quantity] for point in points]), points[0]["alpha"])
        for points in zip(*(curve["curve"] for curve in found), strict=True)
    ]
    return float(max(areas)[1])


def weighted_area(removed: Sequence[float], values: Sequence[float]) -> float:
    """Return the mean of a curve over the share removed, weighted by that share, so that deep cuts count most.

    The mean is the integral of s * value(s) divided by the integral of s, both by the trapezoidal rule. For a single
    point, it is that point's value.
    """
    s, v = np.array(sorted(zip(removed, values, strict=True))).T
    return float(trapezoid(s * v, s) / trapezoid(s, s)) if len(s) > 1 else float(v[0])


def curve_keys(shared: Shared, cell: Cell) -> list[str]:
    """Return the keys of the curves that choose the alpha of a cell; none if it is given or not used."""
    return [shared.key(at) for at in _alike(shared, cell)]


def _alike(shared: Shared, cell: Cell) -> list[Cell]:
    """Return the cells whose curves on held-out rows choose the alpha of a cell, none if it is given.

    For auto it is the cell itself without an alpha, and for auto-area the same at all budgets.
    """
    if not isinstance(cell.alpha, str):
        return []
    budgets = [(cell.sparsity, cell.flops)]
    if cell.alpha != "auto":
        least = shared.lowest.get(cell.modules, 0.0)
        budgets = [(share, flops) for share, flops in shared.grid.budgets() if flops is None or least <= flops]
    return [replace(cell, alpha=None, sparsity=sparsity, flops=flops) for sparsity, flops in budgets]


def _curve(shared: Shared, at: Cell) -> dict[str, Any]:
    """Return all alphas' judgements on the held-out rows at a budget ("curve"), and the best alpha ("chosen")."""
    key = shared.key(at)
    if key not in shared.curves:
        judge, refit = shared.calibrated(at.seed, at.samples).judge, refit_for(shared, at)
        trials = Trials(judge, lambda trial: _predict(shared, trial.selection, judge, refit))
        candidates = [stages.Trial(*one) for one in _selected(shared, replace(at, alpha="auto"))]
        chosen, tried = choose_alpha(candidates, trials)
        left_out = ("alpha", *(("flops", "modules") if at.flops is None else ()))
        found = {name: value for name, value in asdict(at).items() if name not in left_out}
        found |= {"chosen": chosen.scores.parameters["alpha"], "curve": [asdict(one) for one in tried]}
        shared.curves[key] = found
    return shared.curves[key]


def _predict(shared: Shared, selection: Selection, judge: Judge, refit: stages.Refit | None) -> Predictions:
    return stages.predict_pruned(shared.base, selection, judge.batches, refit)


def refit_for(shared: Shared, cell: Cell) -> stages.Refit | None:
    """Return what refits a model cut for a cell; None if nothing does."""
    pruning, of_seed = pruning_of(shared, cell), shared.calibrated(cell.seed)
    how = pruning.options.compensation
    if how is None:
        return None

    def refitted(slim: PreTrainedModel, selection: Selection) -> list[LayerFit]:
        with pruning.clock("refit"):
            # The bias needs no moments, which take longer to collect, and models without biases get them only here.
            if how.method == "bias":
                flap.add_means(slim, pruning.model, selection, pruning.modules, of_seed.averages)
                return []
            if cell.compensation == SCALARS:
                moments = of_seed.statistics.moments
                assert moments is not None
                kwon.scale_units(slim, selection, pruning.modules, moments)
                return []
            dense, rows = pruning.model, of_seed.pruning.rows.refit
            if how.sequential:
                fits = compensate(dense, slim, selection, pruning.modules, rows, how)
            else:
                refit = stages.refit_of(pruning, of_seed.statistics)
                assert refit is not None
                fits = refit(slim, selection)
            fit_logit_scale(dense, slim, rows)
            return fits

    return refitted


@contextmanager
def _baseline(shared: Shared, cell: Cell) -> Iterator[None]:
    """Mask or slice the dense model inside the block, as the cell's baseline of `JUDGED_ONLY` does."""
    base, of_seed = shared.base, shared.calibrated(cell.seed, cell.samples)
    model, modules = base.model, base.scored
    assert cell.sparsity is not None
    with ExitStack() as stack:
        if cell.criterion == CHANNELS:
            scores = of_seed.channel_scores
            stay = channels.select_channels(scores, modules, heads=cell.sparsity, constraints=base.options)
            stack.enter_context(channels.masked_channels(model, modules, stay))
        else:
            bases, targets = of_seed.bases
            stack.enter_context(slicing.sliced(model, modules, bases, share=cell.sparsity))
        if cell.criterion == SLICED_TUNED:
            stack.enter_context(slicing.fine_tuned(model, modules, of_seed.pruning.rows.refit, targets))
        yield
