"""Choose the heads that stay: the best total score that the budget and the constraints allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .errors import NonFiniteError, PlanError, RecipeError
from .values import AttentionSite, HeadScores, KeptHeads, PruningPlan, library_versions

ALLOCATIONS = ("global", "uniform")
UNITS = ("group", "query")


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


def check_budget(
    sites: Sequence[AttentionSite],
    *,
    heads: float,
    allocation: str,
    unit: str = "group",
    min_heads: int,
    keep_layers: Sequence[int],
    multiple_of: int = 1,
) -> int | list[int]:
    """Check, before anything is scored, that a budget of heads can be met.

    Returns:
        How many bundles of heads will go: of all under `global`, of each module under `uniform`.

    Raises:
        RecipeError: An option is out of range.
        PlanError: The constraints leave less to remove than the budget asks for, or it rounds to nothing.
    """
    share = [] if 0 < heads < 1 else [f"sparsity (budget.heads) must be in (0, 1), got {heads}"]
    constraints: dict[str, Any] = {
        "unit": unit,
        "min_heads": min_heads,
        "keep_layers": keep_layers,
        "multiple_of": multiple_of,
    }
    check_constraints(sites, allocation=allocation, problems=share, **constraints)
    bundles = [bundle_count(site, unit) for site in sites]
    most = _removable(sites, unit, min_heads, keep_layers)
    protected = sorted({i % len(sites) for i in keep_layers})
    counts = [0 if i in protected else round(heads * count) for i, count in enumerate(bundles)]
    wanted, possible, of = (
        (round(heads * sum(bundles)), sum(most), sum(bundles))
        if allocation == "global"
        # The first module that cannot lose its share, else any: all are the same to the message.
        else max(zip(counts, most, bundles, strict=True), key=lambda item: item[0] - item[1])
    )
    grouped = any(site.group_size > 1 for site in sites)
    what = "heads" if not grouped else "key/value groups" if unit == "group" else "query heads per group"
    if wanted > possible:
        kept = f" and keep_layers {protected}" if protected else ""
        other = "; unit: query cuts query heads inside the groups" if grouped and unit == "group" else ""
        raise PlanError(
            f"the budget asks to remove {wanted} of {of} {what}, but min_heads {min_heads}{kept} leave only "
            f"{possible} to remove; lower the share or loosen the constraints{other}"
        )
    if not (wanted if allocation == "global" else any(counts)):
        raise PlanError(
            f"the budget must remove at least one head, but heads: {heads} of {of} rounds to none; raise the share"
        )
    if multiple_of == 1:
        return wanted if allocation == "global" else counts
    options = removable_counts(sites, **constraints)
    # Of every module, at most what its share asks for.
    fewer = [max(k for k in option if k <= count) for option, count in zip(options, counts, strict=True)]
    smallest = min((k for option in options for k in option if k), default=wanted + 1)
    if smallest > wanted if allocation == "global" else not any(fewer):
        raise PlanError(
            f"the budget must remove at least one head, but heads: {heads} asks for {wanted} of {of} {what}, and "
            f"multiple_of {multiple_of} allows no such number; raise the share or lower multiple_of"
        )
    return wanted if allocation == "global" else fewer


def check_constraints(
    sites: Sequence[AttentionSite],
    *,
    allocation: str = "global",
    unit: str = "group",
    min_heads: int = 1,
    keep_layers: Sequence[int] = (),
    multiple_of: int = 1,
    problems: Sequence[str] = (),
) -> None:
    """Check what any budget is subject to; see `select_heads`.

    Args:
        sites: The modules that may lose heads.
        allocation, unit, min_heads, keep_layers, multiple_of: As in `select_heads`.
        problems: What is already known to be wrong.

    Raises:
        RecipeError: An option is out of range; all problems at once.
    """
    problems = list(problems)
    if allocation not in ALLOCATIONS:
        problems.append(f"allocation must be global or uniform, got {allocation!r}")
    if unit not in UNITS:
        problems.append(f"unit must be group or query, got {unit!r}")
    if min_heads < 1:
        problems.append(f"min_heads must be at least 1, got {min_heads}")
    if multiple_of < 1:
        problems.append(f"multiple_of must be at least 1, got {multiple_of}")
    for layer in keep_layers:
        if not -len(sites) <= layer < len(sites):
            problems.append(f"keep_layers must name layers 0 to {len(sites) - 1}, got {layer}")
    if problems:
        raise RecipeError(problems)


def removable_counts(
    sites: Sequence[AttentionSite],
    *,
    unit: str = "group",
    min_heads: int = 1,
    keep_layers: Sequence[int] = (),
    multiple_of: int = 1,
) -> list[list[int]]:
    """Per module the numbers of bundles it may lose, ascending from none."""
    found = []
    for site, most in zip(sites, _removable(sites, unit, min_heads, keep_layers), strict=True):
        count = bundle_count(site, unit)
        # Under unit: query every bundle has a head in each group.
        heads = site.key_value_heads if unit == "query" and site.group_size > 1 else 1
        found.append([0, *(k for k in range(1, most + 1) if (count - k) * heads % multiple_of == 0)])
    return found


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


def bundle_count(site: AttentionSite, unit: str) -> int:
    """How many bundles of heads, which go together, a module has."""
    return site.key_value_heads if unit == "group" or site.group_size == 1 else site.group_size


def _check_counts(counts: Sequence[int], ranked: Sequence[Sequence[Any]]) -> None:
    most = [len(bundles) - 1 for bundles in ranked]
    if len(counts) != len(most) or any(not 0 <= k <= m for k, m in zip(counts, most, strict=True)):
        raise PlanError(
            f"counts must say for each of {len(most)} modules how many heads go, at most {most}, got {list(counts)}"
        )


def _removable(sites: Sequence[AttentionSite], unit: str, min_heads: int, keep_layers: Sequence[int]) -> list[int]:
    """How many bundles each module may lose at the most."""
    protected = {i % len(sites) for i in keep_layers}
    bundles = [bundle_count(site, unit) for site in sites]
    return [
        0 if i in protected else max(0, count - -(-min_heads // (site.heads // count)))
        for i, (site, count) in enumerate(zip(sites, bundles, strict=True))
    ]


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
