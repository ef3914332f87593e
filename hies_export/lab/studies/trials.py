"""The plans that a run or a sweep evaluated, with their measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...values import PruningPlan

_REMOVES = {"attention": "heads only", "mlp": "neurons only", "attention+mlp": "heads and neurons"}


@dataclass(frozen=True)
class Result:
    """The measurements of a plan; `how` describes the models and rows in words, as in `Measured`."""

    how: str
    quality: float | None
    stability: float

    @classmethod
    def of(cls, how: str, quality: float | None, stability: float) -> Result:
        """Return a result whose metric is None if it is undefined."""
        return cls(how, quality if quality is not None and math.isfinite(quality) else None, stability)


@dataclass(frozen=True)
class Trial:
    """A plan that was evaluated, with a result for every compensation; no FLOPs if they were not counted."""

    plan: PruningPlan
    label: str
    results: tuple[Result, ...]
    flops_ratio: float | None = None


def row_label(row: Mapping[str, Any]) -> str:
    """Return the name of the plan of a sweep's row."""
    alpha = "" if row["alpha"] is None else f", alpha {row['alpha']:g}"
    target = row.get("flops_target")
    budget = "of the heads removed" if target is None else "of the FLOPs left"
    share = f"{100 * (row['sparsity'] if target is None else target):g}%"
    removes = "" if target is None else f", {_REMOVES[row.get('modules') or 'attention']}"
    return f"{row['criterion']}{alpha}: {share} {budget}{removes}"


def compensation_how(compensation: str) -> str:
    """Return how a sweep made the models of a compensation, and on which rows they were judged."""
    made = "masked" if compensation == "none" else f"cut and compensated ({compensation})"
    return f"the dense model and the sweep's plans: {made}, on the evaluation rows"


def same_units(one: PruningPlan, other: PruningPlan) -> bool:
    """Return whether two plans keep the same units."""
    return {name: kept.units for name, kept in one.kept.items()} == {n: kept.units for n, kept in other.kept.items()}


def results_of(trials: Sequence[Trial], plan: PruningPlan) -> list[Result]:
    """Return the measurements of the plans that keep the same units, once for each `how`."""
    found: dict[str, Result] = {}
    for trial in trials:
        if same_units(trial.plan, plan):
            for result in trial.results:
                found.setdefault(result.how, result)
    return list(found.values())
