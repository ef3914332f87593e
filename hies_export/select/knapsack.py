"""Choose how many units each module loses within a budget of cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import NonFiniteError, PlanError
from ..values import AttentionSite, HeadScores
from .constraints import bundle_count, removable_counts

# Costs are whole numbers of this share of the dense model's, rounded so that no budget is exceeded.
GRID = 100_000


@dataclass(frozen=True)
class CostTable:
    """What the modules save with every number of bundles removed, as shares of the dense model's cost.

    Attributes:
        what: "FLOPs", or "latency" and where.
        saved: Per module, by its dotted name, the share saved with 0, 1, 2, ... bundles removed.
        measured: What was timed: rows of kept (share of the bundles), ratio, ratio_low, ratio_high, control_low,
            control_high; empty for FLOPs.
    """

    what: str
    saved: Mapping[str, tuple[float, ...]]
    measured: tuple[Mapping[str, float], ...] = ()

    def ratio(self, counts: Mapping[str, int]) -> float:
        """Predicted cost, as a share of the dense model's, with so many bundles removed from each module."""
        return 1.0 - sum(self.saved[name][count] for name, count in counts.items())


def counts_within(
    scores: HeadScores,
    sites: Sequence[AttentionSite],
    table: CostTable,
    *,
    ratio: float,
    allocation: str = "global",
    **constraints: Any,
) -> list[int]:
    """Choose how many bundles each module loses, so that the least score is lost within a budget of cost.

    Exact up to the rounding of each module's cost to 1/100,000 of the dense model's; `uniform` takes the smallest
    share of the heads that meets the budget.

    Args:
        scores: From `score_heads`.
        sites: The modules that may lose heads.
        table: What they save.
        ratio: Cost at the most, as a share of the dense model's.
        allocation: "global" or "uniform".
        **constraints: unit, min_heads, keep_layers, multiple_of, as in `select_heads`.

    Returns:
        For `select_heads(..., counts=...)`.

    Raises:
        PlanError: The budget cannot be met; the message says the best there is.
    """
    check_reachable(sites, table, ratio=ratio, allocation=allocation, **constraints)
    if allocation == "uniform":
        return next(c for c in _uniform_counts(sites, constraints) if _ratio(table, sites, c) <= ratio)
    options = removable_counts(sites, **constraints)
    unit = constraints.get("unit", "group")
    saved = [[table.saved[site.name][k] for k in option] for site, option in zip(sites, options, strict=True)]
    # A timed table need not be monotone: costs count from the most that a module can save.
    costs = [[math.ceil((max(row) - s) * GRID - 1e-6) for s in row] for row in saved]
    limit = math.floor((ratio - 1 + sum(max(row) for row in saved)) * GRID + 1e-6)
    lost = [lost_scores(scores.scores[site.name], site, unit=unit) for site in sites]
    losses = [[row[k] for k in option] for row, option in zip(lost, options, strict=True)]
    best, trace = least_loss(costs, losses, limit)
    chosen = trace(int(best.argmin()))
    return [option[place] for option, place in zip(options, chosen, strict=True)]


def check_reachable(
    sites: Sequence[AttentionSite], table: CostTable, *, ratio: float, allocation: str = "global", **constraints: Any
) -> None:
    """Refuse a budget of cost that no plan meets.

    Raises:
        PlanError: There is none; the message says the best there is.
    """
    if allocation == "uniform":
        best = min((_ratio(table, sites, counts) for counts in _uniform_counts(sites, constraints)), default=1.0)
    else:
        options = removable_counts(sites, **constraints)
        best = 1.0 - sum(
            max(table.saved[site.name][k] for k in option) for site, option in zip(sites, options, strict=True)
        )
    if best > ratio:
        said = ", ".join(f"{name} {value}" for name, value in constraints.items() if value not in (1, (), [], "group"))
        raise PlanError(
            f"the budget asks for {table.what} at most {ratio:g} of dense, but cutting all heads that may go"
            f"{f' ({said})' if said else ''} gives {best:.3f}, the best there is; raise the target"
            + (" or loosen the constraints" if said else "")
        )


def uniform_shares(sites: Sequence[AttentionSite], *, allocation: str = "global", unit: str = "group") -> list[float]:
    """The shares of heads worth trying, ascending: every number of bundles once."""
    bundles = [bundle_count(site, unit) for site in sites]
    steps = sum(bundles) if allocation == "global" else max(bundles)
    return [k / steps for k in range(1, steps)]


def _uniform_counts(sites: Sequence[AttentionSite], constraints: Mapping[str, Any]) -> list[list[int]]:
    """Removals of the same share of every module, ascending, as far as the constraints allow."""
    options = removable_counts(sites, **constraints)
    unit = constraints.get("unit", "group")
    found: list[list[int]] = []
    for share in uniform_shares(sites, allocation="uniform", unit=unit):
        wanted = [
            round(share * bundle_count(site, unit)) if len(option) > 1 else 0
            for site, option in zip(sites, options, strict=True)
        ]
        counts = [max(k for k in o if k <= w) for o, w in zip(options, wanted, strict=True)]
        # Beyond what min_heads leaves, the modules would no longer lose the same share.
        if any(w > o[-1] for w, o in zip(wanted, options, strict=True)):
            break
        if any(counts) and counts not in found:
            found.append(counts)
    return found


def _ratio(table: CostTable, sites: Sequence[AttentionSite], counts: Sequence[int]) -> float:
    return table.ratio({site.name: count for site, count in zip(sites, counts, strict=True)})


def lost_scores(scores: Tensor, site: AttentionSite, *, unit: str = "group") -> list[float]:
    """The total score that a module loses with its 0, 1, 2, ... worst bundles."""
    worst_first = [score for score, _ in _bundles(scores, site, unit)]
    return [float(total) for total in np.cumsum([0.0, *worst_first])]


def least_loss(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], limit: int
) -> tuple[np.ndarray, Callable[[int], list[int]]]:
    """Solve a multiple-choice knapsack exactly by dynamic programming: one option of every module.

    Args:
        costs: Per module and option its cost, whole numbers from 0.
        losses: Per module and option its loss.
        limit: Greatest total cost of interest.

    Returns:
        The least loss of every exact total cost, (limit + 1,), infinite where no choice costs that; and a function
        from a total cost to the option of every module. Ties go to the earlier option.
    """
    best = np.full(limit + 1, np.inf)
    best[0] = 0.0
    picks = []
    for cost, loss in zip(costs, losses, strict=True):
        new, pick = np.full(limit + 1, np.inf), np.zeros(limit + 1, dtype=np.int32)
        for option, (c, lost) in enumerate(zip(cost, loss, strict=True)):
            if c > limit:
                continue
            candidate = best[: limit + 1 - c] + lost
            better = candidate < new[c:]
            new[c:][better] = candidate[better]
            pick[c:][better] = option
        best = new
        picks.append(pick)

    def trace(total: int) -> list[int]:
        chosen = []
        for cost, pick in zip(reversed(costs), reversed(picks), strict=True):
            chosen.append(int(pick[total]))
            total -= cost[chosen[-1]]
        return chosen[::-1]

    return best, trace


def _bundles(scores: Tensor, site: AttentionSite, unit: str) -> list[tuple[float, tuple[int, ...]]]:
    """Score and query heads of everything that goes together, worst first; ties go to the later head.

    Raises:
        NonFiniteError: A score is NaN or infinite, which has no place in an order.
    """
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise NonFiniteError(
            f"every score must be a finite number, but head {wrong[0]} of {site.name} has {scores[wrong[0]].item()}; "
            "check the criterion, and the model's dtype"
        )
    values = scores.double().view(site.key_value_heads, site.group_size).tolist()
    heads = [[g * site.group_size + j for j in range(site.group_size)] for g in range(site.key_value_heads)]
    if unit == "group" or site.group_size == 1:
        found = [(sum(v) / len(v), tuple(h)) for v, h in zip(values, heads, strict=True)]
    else:
        ranked = [
            sorted(zip(v, h, strict=True), key=lambda item: (item[0], -item[1]))
            for v, h in zip(values, heads, strict=True)
        ]
        # Their means ascend, as every group's own scores do.
        return [(sum(v for v, _ in b) / len(b), tuple(h for _, h in b)) for b in zip(*ranked, strict=True)]
    return sorted(found, key=lambda item: (item[0], -item[1][0]))
