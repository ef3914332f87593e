"""Turn the sections of a recipe into plain options."""

from __future__ import annotations

from ..measure.exports import ExportOptions
from ..measure.timing import Timing
from ..recipe import BudgetSection, CompensationSection, PruneSection, PruningRecipe
from ..select.constraints import Constraints
from .options import Budget, DropBudget, KeepBudget, LatencyBudget, PruneOptions, RefitOptions, TimedBudget


def options_of(recipe: PruningRecipe) -> PruneOptions:
    """Return how a recipe prunes, as plain options."""
    return prune_options(
        recipe.prune, seed=recipe.calibration.seed, timing=timing_of(recipe), export=export_options(recipe)
    )


def prune_options(
    section: PruneSection, *, seed: int = 0, timing: Timing | None = None, export: ExportOptions | None = None
) -> PruneOptions:
    """Return the options that a section describes."""
    return PruneOptions(
        budget=_budget(section.budget),
        modules=section.modules,
        criterion=section.criterion,
        alpha=None if section.alpha == "auto" else section.alpha,
        normalize=section.normalize,
        constraints=Constraints(
            allocation=section.allocation,
            unit=section.unit,
            min_heads=section.min_heads,
            keep_layers=section.keep_layers,
            multiple_of=section.multiple_of.heads,
            neurons_multiple_of=section.multiple_of.neurons,
        ),
        towers=section.towers,
        steps=section.steps,
        compensation=refit_options(section.compensation),
        timing=timing or Timing(),
        export=export or ExportOptions(),
        seed=seed,
    )


def _budget(section: BudgetSection) -> Budget:
    timed, drop = section.latency, section.max_drop
    return Budget(
        heads=section.heads,
        flops=section.flops,
        parameters=section.parameters,
        latency=None if timed is None else LatencyBudget(**timed.model_dump()),
        max_drop=None if drop is None else DropBudget(drop.metric, drop.by),
        keep=_keep(section),
    )


def _keep(section: BudgetSection) -> KeepBudget | None:
    """Return the promise; if it names a runtime, models are judged and timed there."""
    asked = section.keep
    if asked is None:
        return None
    served = None
    if asked.runtime is not None:
        served = TimedBudget(runtime=asked.runtime, batch=asked.batch, sequence=asked.sequence, dtype=asked.dtype)
    return KeepBudget(asked.predictions, asked.metric, asked.by, served=served, timed=served, samples=asked.samples)


def refit_options(section: CompensationSection | None) -> RefitOptions | None:
    """Return how to refit, None for no section."""
    if section is None:
        return None
    return RefitOptions(
        method=section.method,
        ridge=section.ridge,
        sequential=section.sequential,
        token_weights=section.token_weights,
        samples=section.samples,
        limit_bytes=round(section.memory_gb * (1 << 30)),
    )


def export_options(recipe: PruningRecipe) -> ExportOptions:
    """Return what a recipe exports to, as plain options."""
    return ExportOptions(**recipe.export.model_dump())


def timing_of(recipe: PruningRecipe) -> Timing:
    """Return how often a recipe times, as plain options."""
    return Timing(repeats=recipe.measure.repeats, min_seconds=recipe.measure.min_seconds)
