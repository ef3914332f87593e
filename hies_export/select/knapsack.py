"""Solve the multiple-choice knapsack, one option per module at the least loss, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def least_loss(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], limit: int
) -> tuple[np.ndarray, Callable[[int], list[int]]]:
    """Solve a multiple-choice knapsack exactly, from the cost (whole, from 0) and loss of every option of every module.

    Return the least total loss for every exact total cost, (limit + 1,), infinite if no choice has that cost. Also
    return a function from a total cost to its choice: the number of one option per module, among equals the earlier.
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


def least_loss_saving(
    saved: Sequence[Sequence[float]], losses: Sequence[Sequence[float]], wanted: float, *, grid: int
) -> list[int]:
    """Return one option per module, by number, so that together they save enough at the least loss.

    Savings are shares of the dense cost, for every option of every module; the first option saves nothing. They count
    in steps of 1 / grid, rounded so that enough is saved.
    """
    # Timings need not fall with every unit, so costs are relative to the most that a module can save.
    most = [max(row) for row in saved]
    costs = [[math.ceil((top - share) * grid - 1e-6) for share in row] for top, row in zip(most, saved, strict=True)]
    best, trace = least_loss(costs, losses, max(0, math.floor((sum(most) - wanted) * grid + 1e-6)))
    return trace(int(best.argmin()))
