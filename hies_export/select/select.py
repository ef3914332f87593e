"""Choose the units that stay: the best total score that the budget and the constraints allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import PlanError, RecipeError
from ..units import Selection, Units
from ..values import Scores
from .bundles import lost_scores, ranked_bundles
from .constraints import NONE, Constraints, check_budget, most_removable, removable_counts
from .knapsack import least_loss


def select_units(
    scores: Scores,
    modules: Sequence[Units],
    *,
    heads: float | None = None,
    counts: Sequence[int] | None = None,
    constraints: Constraints = NONE,
) -> Selection:
    """Select the units that stay when a share of the heads is removed, or a given number of bundles per module.

    Units are removed in bundles; see `bundles`. Under `global`, the round(share * bundles) bundles with the smallest
    scores go, except that every module keeps its best `min_heads`. No other choice of that many keeps a greater total
    score. Under `uniform`, every module loses its round(share * bundles) worst bundles. Of equal scores, the later
    module's go first, then the later bundle. With `multiple_of`, the number removed is rounded down.

    Args:
        scores: From `score_units`.
        modules: From `find_attention`, in the model's order. Modules without scores keep all units, and do not count
            towards the budget.
        heads: Share of heads to remove, in (0, 1). Either this or `counts` is needed.
        counts: Number of bundles that each module with scores loses, its worst first; see `hies_export.select.budget`.
            Of the constraints, only `unit` applies then.
        constraints: Constraints of the selection.

    Returns:
        The units that stay, for every module. Equal inputs give equal selections.

    Raises:
        RecipeError: An option is out of range, or neither `heads` nor `counts` is given.
        PlanError: The constraints allow fewer removals than the budget asks for, or `counts` does not fit the modules.
        NonFiniteError: A score is NaN or infinite.

    Examples:
        >>> selection = select_units(scores, modules, heads=0.5)
        >>> sum(len(kept.removed) for kept in selection.values())
        9
    """
    scored = [module for module in modules if module.name in scores.scores]
    # The bundles of each module, worst first.
    ranked = [ranked_bundles(scores.scores[module.name], module, constraints.unit) for module in scored]
    if counts is not None:
        _check_counts(counts, ranked)
        size: int | Sequence[int] = counts
    elif heads is not None:
        size = check_budget(scored, heads=heads, constraints=constraints)
        if isinstance(size, int) and constraints.multiple_of > 1:
            size = _counts_in_multiples(scores, scored, size, constraints)
    else:
        raise RecipeError(["select_units needs heads (a share) or counts (bundles per module), got neither"])
    if isinstance(size, int):
        most = most_removable(scored, constraints)
        candidates = sorted(
            (score, -i, place) for i, found in enumerate(ranked) for place, (score, _) in enumerate(found[: most[i]])
        )
        gone = {(-i, place) for _, i, place in candidates[:size]}
    else:
        gone = {(i, place) for i, count in enumerate(size) for place in range(count)}
    selection = {module.name: module.kept(range(module.units)) for module in modules}
    for i, (module, bundles) in enumerate(zip(scored, ranked, strict=True)):
        selection[module.name] = module.kept(
            unit for place, (_, bundle) in enumerate(bundles) if (i, place) not in gone for unit in bundle
        )
    return selection


def _counts_in_multiples(scores: Scores, modules: Sequence[Units], most: int, constraints: Constraints) -> list[int]:
    """Return how many bundles each module loses under `multiple_of`: as many as possible, at most `most` in all."""
    options = removable_counts(modules, constraints)
    lost = [lost_scores(scores.scores[module.name], module, unit=constraints.unit) for module in modules]
    best, trace = least_loss(options, [[row[k] for k in o] for row, o in zip(lost, options, strict=True)], most)
    chosen = trace(int(np.flatnonzero(np.isfinite(best))[-1]))
    return [option[place] for option, place in zip(options, chosen, strict=True)]


def _check_counts(counts: Sequence[int], ranked: Sequence[Sequence[Any]]) -> None:
    most = [len(bundles) - 1 for bundles in ranked]
    if len(counts) != len(most) or any(not 0 <= k <= m for k, m in zip(counts, most, strict=True)):
        raise PlanError(
            f"counts must say for each of {len(most)} modules how many heads go, at most {most}, got {list(counts)}"
        )
