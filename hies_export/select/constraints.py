"""Check budgets and constraints before anything is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import PlanError, RecipeError
from ..values import AttentionSite

ALLOCATIONS = ("global", "uniform")
UNITS = ("group", "query")


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


def bundle_count(site: AttentionSite, unit: str) -> int:
    """How many bundles of heads, which go together, a module has."""
    return site.key_value_heads if unit == "group" or site.group_size == 1 else site.group_size


def _removable(sites: Sequence[AttentionSite], unit: str, min_heads: int, keep_layers: Sequence[int]) -> list[int]:
    """How many bundles each module may lose at the most."""
    protected = {i % len(sites) for i in keep_layers}
    bundles = [bundle_count(site, unit) for site in sites]
    return [
        0 if i in protected else max(0, count - -(-min_heads // (site.heads // count)))
        for i, (site, count) in enumerate(zip(sites, bundles, strict=True))
    ]
