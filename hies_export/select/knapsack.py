"""Solve the multiple-choice knapsack: one option per module, at the least loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def least_loss(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], limit: int
) -> tuple[np.ndarray, Callable[[int], list[int]]]:
    """Solve a multiple-choice knapsack exactly, by dynamic programming.

    Args:
        costs: Cost of every option of every module, whole numbers from 0.
        losses: Loss of every option of every module.
        limit: Greatest total cost to consider.

    Returns:
        The least total loss for every exact total cost, (limit + 1,), infinite for a cost that no choice has. Then a
        function that returns the choice for a total cost: the number of one option per module. Of equals it takes the
        earlier option.
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
