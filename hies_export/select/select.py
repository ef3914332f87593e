"""Choose the units that stay, within a budget and constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from ..errors import PlanError, RecipeError
from ..kinds import MLP
from ..score.criteria import Scores
from ..units.units import Selection, Units
from .constraints import (
    NONE,
    Constraints,
    bundle_count,
    check_budget,
    check_constraints,
    most_removable,
    ranked_bundles,
    removable_counts,
)
from .cost import CostTable, check_reachable, saved_by, uniform_counts
from .joint import least_loss, least_loss_saving, removed_jointly

# Costs of heads count in steps of 1 / GRID of the dense model's.
GRID = 100_000


def select_units(
    scores: Scores,
    modules: Sequence[Units],
    *,
    heads: float | None = None,
    counts: Sequence[int] | None = None,
    table: CostTable | None = None,
    ratio: float | None = None,
    constraints: Constraints = NONE,
) -> Selection:
    """Select the units that stay under one budget: a share of heads, numbers of bundles, or a share of the cost.

    Units are removed in bundles: whole groups, or one unit of every group; see `Constraints`. Under `uniform`, every
    module loses the same share of its bundles, its worst first: round(share * bundles) by `heads`, the smallest share
    that meets the budget by `ratio`. Under `global`:

    - `heads`: the round(share * bundles) bundles with the smallest scores go, except that every module keeps its best
      `min_heads`. Of equal scores, the later module's go first, then the later bundle. With `multiple_of`, the number
      removed is rounded down.
    - `ratio`, heads alone: the heads with the least total score that meet the budget go (a knapsack).
    - `ratio`, with neurons or chains of removals: the least total effect goes; see `hies_export.select.joint`.
      That also holds where each kind has its own allocation.

    Args:
        scores: From `score_units` or `score_compensated`.
        modules: In the model's order. Modules without scores keep all units, and do not count towards the budget.
        heads: Share of heads to remove, in (0, 1).
        counts: Number of bundles that each module with scores loses. Only the constraint `unit` then applies.
        table: What each module saves, e.g. from `flops_table`; given with `ratio`.
        ratio: Greatest cost left, as a share of the dense model's.
        constraints: Constraints of the selection.

    Returns:
        The units that stay, for every module. Equal inputs give equal selections.

    Raises:
        RecipeError: An option is out of range, or not exactly one budget is given.
        PlanError: The constraints allow no selection that meets the budget, or the scores or `counts` do not fit the
            modules.
        NonFiniteError: A score is NaN or infinite.

    Examples:
        >>> selection = select_units(scores, modules, heads=0.5)
        >>> sum(len(kept.removed) for kept in selection.values())
        9
    """
    if sum(budget is not None for budget in (heads, counts, ratio)) != 1 or (table is None) != (ratio is None):
        raise RecipeError(
            "select_units needs one budget: heads (a share), counts (bundles per module), or a table with a ratio"
        )
    scored = [module for module in modules if module.name in scores.scores]
    if modules and not scored:
        raise PlanError(
            f"scores must be of the modules given, but none of these has any ({modules[0].name} is the first); score "
            "the modules of this model"
        )
    for module in scored:
        if len(scores.scores[module.name]) != module.units:
            raise PlanError(
                f"a module must have one score for each of its units, but {module.name} has {module.units} units and "
                f"{len(scores.scores[module.name])} scores; score the modules of this model"
            )
    if table is not None and ratio is not None:
        check_constraints(scored, constraints)
        parts = constraints.parts(scored)
        compared = bool(scores.chains) or any(module.kind == MLP for module in scored)
        if len(parts) > 1 or (compared and not constraints.uniform(scored)):
            return _without(removed_jointly(scores, scored, table, ratio=ratio, constraints=constraints), modules)
        counts = _counts_within(scores, scored, table, ratio, constraints)
    elif heads is not None:
        counts = _counts_of_share(scores, scored, heads, constraints)
    sizes = [bundle_count(module, constraints.unit) for module in scored]
    most = [size - 1 for size in sizes]
    assert counts is not None
    if len(counts) != len(sizes) or any(not 0 <= k <= limit for k, limit in zip(counts, most, strict=True)):
        raise PlanError(
            f"counts must say for each of {len(sizes)} modules how many heads go, at most {most}, got {list(counts)}"
        )
    order = _worst_first(scores, scored, constraints.unit, by_chains=ratio is not None)
    lost = (count * module.units // size for module, count, size in zip(scored, counts, sizes, strict=True))
    return _without({module.name: order[module.name][:n] for module, n in zip(scored, lost, strict=True)}, modules)


def _without(removed: Mapping[str, Iterable[int]], modules: Sequence[Units]) -> Selection:
    """Return the selection that keeps all units but those of `removed`, module -> units."""
    return {
        module.name: module.kept(set(range(module.units)).difference(removed.get(module.name, ())))
        for module in modules
    }


def _worst_first(scores: Scores, modules: Sequence[Units], unit: str, *, by_chains: bool) -> dict[str, list[int]]:
    """Return the units of each module, those of its worst bundle first, by the scores or by the chains, if any."""
    if by_chains and scores.chains:
        order: dict[str, list[int]] = {module.name: [] for module in modules}
        for removal in chain.from_iterable(scores.chains):
            order[removal.module].extend(removal.units)
        return order
    return {
        module.name: [u for _, units in ranked_bundles(scores.scores[module.name], module, unit) for u in units]
        for module in modules
    }


def _counts_of_share(scores: Scores, modules: Sequence[Units], heads: float, constraints: Constraints) -> Sequence[int]:
    """Return how many bundles each module loses when the share `heads` of all bundles goes."""
    size = check_budget(modules, heads=heads, constraints=constraints)
    if not isinstance(size, int):
        return size
    if constraints.multiple_of > 1:
        options = removable_counts(modules, constraints)
        best, trace = least_loss(options, _losses(scores, modules, options, constraints.unit), size)
        chosen = trace(int(np.flatnonzero(np.isfinite(best))[-1]))
        return [option[place] for option, place in zip(options, chosen, strict=True)]
    # Not a knapsack with a cost of one per bundle: of equal total scores, that would take other bundles.
    candidates = sorted(
        (score, -number)
        for number, (module, most) in enumerate(zip(modules, most_removable(modules, constraints), strict=True))
        for score, _ in ranked_bundles(scores.scores[module.name], module, constraints.unit)[:most]
    )
    lost = Counter(-number for _, number in candidates[:size])
    return [lost[number] for number in range(len(modules))]


def _counts_within(
    scores: Scores, modules: Sequence[Units], table: CostTable, ratio: float, constraints: Constraints
) -> Sequence[int]:
    """Return how many bundles each module loses within a budget of cost: uniformly, or with the least total score."""
    check_reachable(modules, table, ratio=ratio, constraints=constraints)
    if constraints.uniform(modules):
        return next(c for c in uniform_counts(modules, constraints) if 1.0 - saved_by(table, modules, c) <= ratio)
    options = removable_counts(modules, constraints)
    saved = [[table.saved[module.name][k] for k in option] for module, option in zip(modules, options, strict=True)]
    chosen = least_loss_saving(saved, _losses(scores, modules, options, constraints.unit), 1 - ratio, grid=GRID)
    return [option[place] for option, place in zip(options, chosen, strict=True)]


def _losses(scores: Scores, modules: Sequence[Units], options: Sequence[Sequence[int]], unit: str) -> list[list[float]]:
    """Return the total score of the worst bundles of each module, for each number of bundles in its `options`."""
    found = []
    for module, option in zip(modules, options, strict=True):
        lost = np.cumsum([0.0, *(score for score, _ in ranked_bundles(scores.scores[module.name], module, unit))])
        found.append([float(lost[k]) for k in option])
    return found
