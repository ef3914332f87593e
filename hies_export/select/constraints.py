"""Define the constraints of a selection, and check budgets against them before anything is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlanError, RecipeError
from ..units import Units
from .bundles import bundle_count

ALLOCATIONS = ("global", "uniform")
UNITS = ("group", "query")


@dataclass(frozen=True)
class Constraints:
    """Limits on a selection, whatever its budget.

    Attributes:
        allocation: "global" (the worst units of all modules go) or "uniform" (every module loses the same share).
        unit: "group" or "query"; see `bundles`.
        min_heads: Least number of units (query heads) that every module keeps.
        keep_layers: Positions of modules that lose nothing, among those that may lose units. Negative ones count from
            the end.
        multiple_of: For tensor-parallel serving: a module that loses units keeps a multiple of this number of groups
            (key/value heads), or of units (query heads) under `unit: query`.
    """

    allocation: str = "global"
    unit: str = "group"
    min_heads: int = 1
    keep_layers: Sequence[int] = ()
    multiple_of: int = 1


NONE = Constraints()


def check_budget(modules: Sequence[Units], *, heads: float, constraints: Constraints = NONE) -> int | list[int]:
    """Return how many bundles a budget of heads removes, after checking that the constraints allow it.

    Nothing needs to be scored yet.

    Args:
        modules: The modules that may lose units.
        heads: Share of heads to remove, in (0, 1).
        constraints: Constraints of the selection.

    Returns:
        Number of bundles: of all modules together under `global`, of each module under `uniform`.

    Raises:
        RecipeError: An option is out of range.
        PlanError: The constraints allow fewer removals than the budget asks for, or the budget rounds to nothing.
    """
    share = [] if 0 < heads < 1 else [f"sparsity (budget.heads) must be in (0, 1), got {heads}"]
    check_constraints(modules, constraints, problems=share)
    unit, whole = constraints.unit, constraints.allocation == "global"
    bundles = [bundle_count(module, unit) for module in modules]
    most = most_removable(modules, constraints)
    protected = sorted({i % len(modules) for i in constraints.keep_layers})
    counts = [0 if i in protected else round(heads * count) for i, count in enumerate(bundles)]
    wanted, possible, of = (
        (round(heads * sum(bundles)), sum(most), sum(bundles))
        if whole
        # The module that falls short the most, for the message.
        else max(zip(counts, most, bundles, strict=True), key=lambda item: item[0] - item[1])
    )
    grouped = any(module.group_size > 1 for module in modules)
    what = "heads" if not grouped else "key/value groups" if unit == "group" else "query heads per group"
    if wanted > possible:
        kept = f" and keep_layers {protected}" if protected else ""
        other = "; unit: query cuts query heads inside the groups" if grouped and unit == "group" else ""
        raise PlanError(
            f"the budget asks to remove {wanted} of {of} {what}, but min_heads {constraints.min_heads}{kept} leave "
            f"only {possible} to remove; lower the share or loosen the constraints{other}"
        )
    if not (wanted if whole else any(counts)):
        raise PlanError(
            f"the budget must remove at least one head, but heads: {heads} of {of} rounds to none; raise the share"
        )
    if constraints.multiple_of == 1:
        return wanted if whole else counts
    options = removable_counts(modules, constraints)
    # Every module loses at most its share.
    fewer = [max(k for k in option if k <= count) for option, count in zip(options, counts, strict=True)]
    smallest = min((k for option in options for k in option if k), default=wanted + 1)
    if smallest > wanted if whole else not any(fewer):
        raise PlanError(
            f"the budget must remove at least one head, but heads: {heads} asks for {wanted} of {of} {what}, and "
            f"multiple_of {constraints.multiple_of} allows no such number; raise the share or lower multiple_of"
        )
    return wanted if whole else fewer


def check_constraints(modules: Sequence[Units], constraints: Constraints, *, problems: Sequence[str] = ()) -> None:
    """Refuse constraints that are out of range.

    Args:
        modules: The modules that may lose units.
        constraints: Constraints of the selection.
        problems: Problems found before, to report with the others.

    Raises:
        RecipeError: An option is out of range; the message has all problems.
    """
    problems = list(problems)
    if constraints.allocation not in ALLOCATIONS:
        problems.append(f"allocation must be global or uniform, got {constraints.allocation!r}")
    if constraints.unit not in UNITS:
        problems.append(f"unit must be group or query, got {constraints.unit!r}")
    if constraints.min_heads < 1:
        problems.append(f"min_heads must be at least 1, got {constraints.min_heads}")
    if constraints.multiple_of < 1:
        problems.append(f"multiple_of must be at least 1, got {constraints.multiple_of}")
    for layer in constraints.keep_layers:
        if not -len(modules) <= layer < len(modules):
            problems.append(f"keep_layers must name layers 0 to {len(modules) - 1}, got {layer}")
    if problems:
        raise RecipeError(problems)


def removable_counts(modules: Sequence[Units], constraints: Constraints) -> list[list[int]]:
    """Return, for every module, the numbers of bundles that it may lose, ascending from 0."""
    found = []
    for module, most in zip(modules, most_removable(modules, constraints), strict=True):
        count = bundle_count(module, constraints.unit)
        # Under unit: query, every bundle has a unit of each group.
        heads = module.groups if constraints.unit == "query" and module.group_size > 1 else 1
        found.append([0, *(k for k in range(1, most + 1) if (count - k) * heads % constraints.multiple_of == 0)])
    return found


def most_removable(modules: Sequence[Units], constraints: Constraints) -> list[int]:
    """Return the most bundles that each module may lose, without regard to `multiple_of`."""
    protected = {i % len(modules) for i in constraints.keep_layers}
    bundles = [bundle_count(module, constraints.unit) for module in modules]
    return [
        0 if i in protected else max(0, count - -(-constraints.min_heads // (module.units // count)))
        for i, (module, count) in enumerate(zip(modules, bundles, strict=True))
    ]
