"""Choose the units that stay: the best total score that the budget and the constraints allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import PlanError, RecipeError
from ..values import Scores, Selection, Units
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
    """Select the units that stay when a share of the heads goes, or given numbers of them.

    Units go in bundles; see `bundles`. Under `global`, round(share * bundles) bundles go, those with the smallest
    scores, except that every module keeps its best `min_heads`. No other choice of as many keeps a greater total score.
    Under `uniform`, every module loses round(share * its bundles), its own smallest. Ties go to the later module, then
    the later bundle. With `multiple_of`, at most as many go as the share asks for.

    Args:
        scores: From `score_units`.
        modules: From `find_attention`, in the model's order. Those without scores keep all units, and do not count in
            the budget.
        heads: Share of heads to remove, in (0, 1); or
        counts: Per module with scores, how many bundles go, its own smallest; of the constraints only `unit` is then
            looked at. See `hies_export.select.budget`.
        constraints: What the selection is subject to.

    Returns:
        The units that stay, for every module; equal inputs give equal selections.

    Raises:
        RecipeError: An option is out of range.
        PlanError: The constraints leave less to remove than the budget asks for.
        NonFiniteError: A score is NaN or infinite.

    Examples:
        >>> selection = select_units(scores, modules, heads=0.5)
        >>> sum(len(kept.removed) for kept in selection.values())
        9
    """
    scored = [module for module in modules if module.name in scores.scores]
    # Per module its bundles, worst first.
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
    """Return how many bundles each module loses, at most so many in all, to keep what `multiple_of` wants."""
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
