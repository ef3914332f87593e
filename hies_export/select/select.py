"""Choose the units that stay, within a budget and constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ..errors import PlanError, RecipeError
from ..recipe.sections import Constraints
from ..score.criteria import Scores
from ..units.units import Selection, Units
from .constraints import NONE, check_budget, check_constraints, most_removable, ranked_bundles, removable_counts
from .cost import CostTable
from .joint import least_loss, removed_jointly


def select_units(
    scores: Scores,
    modules: Sequence[Units],
    *,
    heads: float | None = None,
    table: CostTable | None = None,
    ratio: float | None = None,
    constraints: Constraints = NONE,
) -> Selection:
    """Select the units that stay under one budget: a share of heads, or a share of the cost.

    Units are removed in bundles: whole groups, or one unit of every group; see `Constraints`. Under `uniform`, every
    module loses the same share of its bundles, its worst first: round(share * bundles) by `heads`, the smallest share
    that meets the budget by `ratio`. Under `global`:

    - `heads`: the round(share * bundles) bundles with the smallest scores go, except that every module keeps its best
      `min_heads`. Of equal scores, the later module's go first, then the later bundle. With `multiple_of`, the number
      removed is rounded down.
    - `ratio`: the least total effect goes; see `hies_export.select.joint`. Units that a criterion ranks, such as heads
      by HIES, go in the order of their scores.

    Args:
        scores: From `score_units` or `score_compensated`.
        modules: In the model's order. Modules without scores keep all units, and do not count towards the budget.
        heads: Share of heads to remove, in (0, 1).
        table: What each module saves, e.g. from `flops_table`; given with `ratio`.
        ratio: Greatest cost left, as a share of the dense model's.
        constraints: Constraints of the selection.

    Returns:
        The units that stay, for every module. Equal inputs give equal selections.

    Raises:
        RecipeError: An option is out of range, or not exactly one budget is given.
        PlanError: The constraints allow no selection that meets the budget, or the scores do not fit the modules.
        NonFiniteError: A score is NaN or infinite.

    Examples:
        >>> selection = select_units(scores, modules, heads=0.5)
        >>> sum(len(kept.removed) for kept in selection.values())
        9
    """
    if (heads is None) == (ratio is None) or (table is None) != (ratio is None):
        raise RecipeError("select_units needs one budget: heads (a share), or a table with a ratio")
    scored = [module for module in modules if module.name in scores.scores]
    if (modules and not scored) or any(len(scores.scores[module.name]) != module.units for module in scored):
        raise PlanError("scores must be of the modules given, one for each unit; score the modules of this model")
    if table is not None and ratio is not None:
        check_constraints(scored, constraints)
        removed = removed_jointly(scores, scored, table, ratio=ratio, constraints=constraints)
    elif heads is not None:
        removed = _removed_by_share(scores, scored, heads, constraints)
    return {
        module.name: module.kept(set(range(module.units)).difference(removed.get(module.name, ())))
        for module in modules
    }


def _removed_by_share(
    scores: Scores, modules: Sequence[Units], heads: float, constraints: Constraints
) -> dict[str, set[int]]:
    """Return module -> the units that go when the share `heads` of all bundles goes."""
    counts = check_budget(modules, heads=heads, constraints=constraints)
    ranked = [ranked_bundles(scores.scores[module.name], module, constraints.unit) for module in modules]
    if isinstance(counts, int):
        counts = _global_counts([[score for score, _ in bundles] for bundles in ranked], modules, counts, constraints)
    return {
        module.name: {unit for _, units in bundles[:count] for unit in units}
        for module, bundles, count in zip(modules, ranked, counts, strict=True)
    }


def _global_counts(
    scores: Sequence[Sequence[float]], modules: Sequence[Units], size: int, constraints: Constraints
) -> list[int]:
    """Return how many bundles each module loses when `size` go in all; `scores` has those of its bundles, ascending."""
    if constraints.multiple_of.heads > 1:
        options = removable_counts(modules, constraints)
        totals = [[*accumulate(of_module, initial=0.0)] for of_module in scores]  # of the first 0, 1, 2, ... bundles
        losses = [[total[k] for k in option] for total, option in zip(totals, options, strict=True)]
        best, trace = least_loss(options, losses, size)
        chosen = trace(int(np.flatnonzero(np.isfinite(best))[-1]))  # as many bundles as can go, up to `size`
        return [option[place] for option, place in zip(options, chosen, strict=True)]
    # Not a knapsack with a cost of one per bundle: of equal total scores, that would take other bundles.
    candidates = sorted(
        (score, -number)  # of equal scores, the later module's come first
        for number, most in enumerate(most_removable(modules, constraints))
        for score in scores[number][:most]
    )
    lost = Counter(-number for _, number in candidates[:size])
    return [lost[number] for number in range(len(modules))]
