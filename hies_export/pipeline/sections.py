"""Resolve the `prune` section, of a recipe or of keyword arguments, into plain options."""

from __future__ import annotations

from ..measure.exports import ExportOptions
from ..measure.timing import Timing
from ..recipe import BudgetSection, CompensationSection, PruneSection
from ..select.constraints import Constraints
from .options import Budget, DropBudget, LatencyBudget, PruneOptions, RefitOptions


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
        latency=None if timed is None else LatencyBudget(timed.ratio, timed.runtime, timed.batch, timed.sequence),
        max_drop=None if drop is None else DropBudget(drop.metric, drop.by),
    )


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
