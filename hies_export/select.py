"""Choose the heads that stay: the best total score that the budget and the constraints allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .errors import PlanError, RecipeError
from .values import AttentionSite, HeadScores, KeptHeads, PruningPlan, library_versions

ALLOCATIONS = ("global", "uniform")


def select_heads(
    scores: HeadScores,
    sites: Sequence[AttentionSite],
    *,
    heads: float,
    allocation: str = "global",
    min_heads: int = 1,
    keep_layers: Sequence[int] = (),
    seed: int = 0,
    calibration: Mapping[str, Any] | None = None,
) -> PruningPlan:
    """Plan the removal of a share of the heads.

    What is removed or kept together is a key/value group: one head in ordinary attention; in grouped-query attention
    a key/value head with its query heads, so that the cache shrinks. A group's score is the mean of its heads'.

    Under `global`, round(share * groups) groups go, the ones with the smallest scores, except that every module
    keeps its best `min_heads`; no other choice of as many keeps a greater total score. Under `uniform`, every module
    loses round(share * its groups), its own smallest. Ties go to the later module, then the later head.

    Args:
        scores: From `score_heads`.
        sites: From `find_attention`, in the model's order.
        heads: Share of heads to remove, in (0, 1).
        allocation: "global" (uneven) or "uniform" (the same count in every module).
        min_heads: Query heads every module keeps at least.
        keep_layers: Positions in `sites` of modules that lose nothing; negative ones count from the end.
        seed: Recorded in the plan.
        calibration: Recorded in the plan.

    Returns:
        The plan; equal inputs give equal plans.

    Raises:
        RecipeError: An option is out of range.
        PlanError: The constraints leave less to remove than the budget asks for.
    """
    counts = check_budget(sites, heads=heads, allocation=allocation, min_heads=min_heads, keep_layers=keep_layers)
    removed: set[tuple[int, int]] = set()
    ranked = [_ranked(scores.scores[site.name], site) for site in sites]  # worst group first
    if isinstance(counts, int):
        most = _removable(sites, min_heads, keep_layers)
        candidates = sorted(
            (score, -i, -group) for i, groups in enumerate(ranked) for score, group in groups[: most[i]]
        )
        removed = {(-i, -group) for _, i, group in candidates[:counts]}
    else:
        removed = {(i, group) for i, count in enumerate(counts) for _, group in ranked[i][:count]}
    kept = {}
    for i, site in enumerate(sites):
        groups = tuple(g for g in range(site.key_value_heads) if (i, g) not in removed)
        kept[site.name] = KeptHeads(
            query=tuple(g * site.group_size + j for g in groups for j in range(site.group_size)),
            key_value=groups,
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
    )


def check_budget(
    sites: Sequence[AttentionSite], *, heads: float, allocation: str, min_heads: int, keep_layers: Sequence[int]
) -> int | list[int]:
    """Check, before anything is scored, that a budget can be met.

    Returns:
        How many groups will go: of all under `global`, of each module under `uniform`.

    Raises:
        RecipeError: An option is out of range.
        PlanError: The constraints leave less to remove than the budget asks for, or it rounds to nothing.
    """
    problems = []
    if not 0 < heads < 1:
        problems.append(f"sparsity (budget.heads) must be in (0, 1), got {heads}")
    if allocation not in ALLOCATIONS:
        problems.append(f"allocation must be global or uniform, got {allocation!r}")
    if min_heads < 1:
        problems.append(f"min_heads must be at least 1, got {min_heads}")
    for layer in keep_layers:
        if not -len(sites) <= layer < len(sites):
            problems.append(f"keep_layers must name layers 0 to {len(sites) - 1}, got {layer}")
    if problems:
        raise RecipeError(problems)
    groups = [site.key_value_heads for site in sites]
    most = _removable(sites, min_heads, keep_layers)
    protected = sorted({i % len(sites) for i in keep_layers})
    counts = [0 if i in protected else round(heads * count) for i, count in enumerate(groups)]
    wanted, possible, of = (
        (round(heads * sum(groups)), sum(most), sum(groups))
        if allocation == "global"
        # The first module that cannot lose its share, else any: all are the same to the message.
        else max(zip(counts, most, groups, strict=True), key=lambda item: item[0] - item[1])
    )
    if wanted > possible:
        kept = f" and keep_layers {protected}" if protected else ""
        raise PlanError(
            f"the budget asks to remove {wanted} of {of} heads, but min_heads {min_heads}{kept} leave only "
            f"{possible} to remove; lower the share or loosen the constraints"
        )
    if not (wanted if allocation == "global" else any(counts)):
        raise PlanError(
            f"the budget must remove at least one head, but heads: {heads} of {of} rounds to none; raise the share"
        )
    return wanted if allocation == "global" else counts


def _removable(sites: Sequence[AttentionSite], min_heads: int, keep_layers: Sequence[int]) -> list[int]:
    """How many groups each module may lose at the most."""
    protected = {i % len(sites) for i in keep_layers}
    return [
        0 if i in protected else max(0, site.key_value_heads - -(-min_heads // site.group_size))
        for i, site in enumerate(sites)
    ]


def _ranked(scores: Tensor, site: AttentionSite) -> list[tuple[float, int]]:
    groups = scores.double().view(site.key_value_heads, site.group_size).mean(1).tolist()
    return sorted(((score, group) for group, score in enumerate(groups)), key=lambda item: (item[0], -item[1]))
