"""Choose the heads that stay: the best total score that the budget and the constraints allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import PlanError, RecipeError
from ..values import AttentionSite, HeadScores, KeptHeads, PruningPlan, library_versions
from .constraints import _removable, check_budget, removable_counts
from .knapsack import _bundles, least_loss, lost_scores


def select_heads(
    scores: HeadScores,
    sites: Sequence[AttentionSite],
    *,
    heads: float | None = None,
    counts: Sequence[int] | None = None,
    allocation: str = "global",
    unit: str = "group",
    min_heads: int = 1,
    keep_layers: Sequence[int] = (),
    multiple_of: int = 1,
    seed: int = 0,
    calibration: Mapping[str, Any] | None = None,
    model: Mapping[str, float] | None = None,
) -> PruningPlan:
    """Plan the removal of a share of the heads, or of given numbers of them.

    What is removed or kept together is a bundle of heads. By default (`unit: group`) it is a key/value head with its
    query heads, which in ordinary attention is one head; in grouped-query attention the cache shrinks with it. Under
    `unit: query` the key/value heads stay, and a bundle is one query head of every group, the n-th worst of each, so
    that the groups stay even. A bundle's score is the mean of its heads'.

    Under `global`, round(share * bundles) bundles go, the ones with the smallest scores, except that every module
    keeps its best `min_heads`; no other choice of as many keeps a greater total score. Under `uniform`, every module
    loses round(share * its bundles), its own smallest. Ties go to the later module, then the later bundle.

    With `multiple_of`, for tensor-parallel serving, every module that loses heads keeps a multiple of it: of key/value
    heads, or of query heads under `unit: query`. Then at most as many go as the share asks for.

    Args:
        scores: From `score_heads`.
        sites: From `find_attention`, in the model's order. Those that `scores` says nothing of keep all heads, and do
            not count in the budget.
        heads: Share of heads to remove, in (0, 1); or
        counts: Per module with scores, how many bundles go, its own smallest; `allocation` and the constraints are then
            the caller's affair. See `hies_export.budget`.
        allocation: "global" (uneven) or "uniform" (the same count in every module).
        unit: "group" or "query".
        min_heads: Query heads every module keeps at least.
        keep_layers: Positions, among the modules with scores, of those that lose nothing; negative ones count from the
            end.
        multiple_of: What the number of heads kept in a pruned module must be a multiple of.
        seed: Recorded in the plan.
        calibration: Recorded in the plan.
        model: Recorded in the plan, from `weight_norms`.

    Returns:
        The plan; equal inputs give equal plans.

    Raises:
        RecipeError: An option is out of range.
        PlanError: The constraints leave less to remove than the budget asks for.
        NonFiniteError: A score is NaN or infinite.

    Examples:
        >>> plan = select_heads(scores, sites, heads=0.5)
        >>> plan.removed, plan.heads
        (9, 18)
    """
    scored = [site for site in sites if site.name in scores.scores]
    constraints: dict[str, Any] = {
        "unit": unit,
        "min_heads": min_heads,
        "keep_layers": keep_layers,
        "multiple_of": multiple_of,
    }
    # Per module its bundles of query heads, worst first.
    ranked = [_bundles(scores.scores[site.name], site, unit) for site in scored]
    size: int | Sequence[int]
    if counts is None:
        if heads is None:
            raise RecipeError(["select_heads needs heads (a share) or counts (bundles per module), got neither"])
        size = check_budget(scored, heads=heads, allocation=allocation, **constraints)
    else:
        _check_counts(counts, ranked)
        size = counts
    if isinstance(size, int) and multiple_of > 1:
        options = removable_counts(scored, **constraints)
        lost = [lost_scores(scores.scores[site.name], site, unit=unit) for site in scored]
        best, trace = least_loss(options, [[row[k] for k in o] for row, o in zip(lost, options, strict=True)], size)
        chosen = trace(int(np.flatnonzero(np.isfinite(best))[-1]))
        size = [o[place] for o, place in zip(options, chosen, strict=True)]
    if isinstance(size, int):
        most = _removable(scored, unit, min_heads, keep_layers)
        candidates = sorted(
            (score, -i, place) for i, found in enumerate(ranked) for place, (score, _) in enumerate(found[: most[i]])
        )
        gone = {(-i, place) for _, i, place in candidates[:size]}
    else:
        gone = {(i, place) for i, count in enumerate(size) for place in range(count)}
    kept = {}
    positions = {site.name: i for i, site in enumerate(scored)}
    for site in sites:
        i = positions.get(site.name)
        bundles = [(0.0, range(site.heads))] if i is None else ranked[i]
        stay = sorted(q for place, (_, bundle) in enumerate(bundles) if (i, place) not in gone for q in bundle)
        kept[site.name] = KeptHeads(
            query=tuple(stay),
            key_value=tuple(sorted({q // site.group_size for q in stay})),
            heads=site.heads,
            key_value_heads=site.key_value_heads,
        )
    return PruningPlan(
        kept=kept,
        criterion=scores.criterion,
        alpha=scores.parameters.get("alpha"),
        seed=seed,
        calibration=dict(calibration or {}),
        versions=library_versions(),
        model=dict(model or {}),
    )


def _check_counts(counts: Sequence[int], ranked: Sequence[Sequence[Any]]) -> None:
    most = [len(bundles) - 1 for bundles in ranked]
    if len(counts) != len(most) or any(not 0 <= k <= m for k, m in zip(counts, most, strict=True)):
        raise PlanError(
            f"counts must say for each of {len(most)} modules how many heads go, at most {most}, got {list(counts)}"
        )
