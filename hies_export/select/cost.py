"""Look up what removing bundles of units saves, and check that a budget of cost is reachable."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from ..kinds import KINDS
from ..recipe.sections import Constraints
from ..units.units import Selection, Units
from .constraints import NONE, bundle_count, bundles_lost, removable_counts

MOST_SHARES = 1000  # at most this many shares are tried one by one


@dataclass(frozen=True)
class CostTable:
    """The cost that each module saves by losing bundles, as a share of the dense model's cost."""

    what: str  # name of the cost in messages: "FLOPs", "parameters", or "latency" with the runtime
    saved: Mapping[str, tuple[float, ...]]  # dotted name of a module -> share saved by losing 0, 1, 2, ... bundles
    # The timings behind a table of latency, one row each: kind, kept (share of the bundles), ratio, ratio_low,
    # ratio_high. Empty for other costs.
    measured: tuple[Mapping[str, Any], ...] = ()
    # The cost that the shares are of, relative to the reference of the budget: less than 1 where tokens went.
    dense: float = 1.0

    def left(self, selection: Selection, modules: Sequence[Units], *, unit: str) -> float:
        """Return the predicted share of the dense model's cost that a selection leaves."""
        return self.ratio(bundles_lost(selection, modules, unit=unit))

    def ratio(self, counts: Mapping[str, int]) -> float:
        """Return the predicted share of the dense model's cost, for the number of bundles that each module loses."""
        return 1.0 - sum(self.saved[name][count] for name, count in counts.items())


def check_reachable(
    modules: Sequence[Units],
    table: CostTable,
    *,
    ratio: float,
    constraints: Constraints = NONE,
    best: float | None = None,
) -> None:
    """Refuse, by a PlanError, a budget below the lowest possible cost, which is `best`, by default `lowest_ratio`."""
    best = lowest_ratio(modules, table, constraints) if best is None else best
    if best > ratio:
        units = " and ".join(dict.fromkeys(KINDS[module.kind].units for module in modules))
        raise PlanError(
            f"the budget asks for {table.what} at most {ratio:g} of dense, but cutting all {units} that may go gives "
            f"{best:.3f}, the best there is; raise the target, or loosen min_heads, keep_layers or multiple_of"
        )


def lowest_ratio(modules: Sequence[Units], table: CostTable, constraints: Constraints) -> float:
    """Return the lowest cost that the constraints allow, as a share of the dense model's."""
    most = 0.0
    for part in constraints.parts(modules):  # the modules that share an allocation
        if constraints.uniform(part):
            most += max((saved_by(table, part, counts) for counts in uniform_counts(part, constraints)), default=0.0)
            continue
        options = removable_counts(part, constraints)
        most += sum(max(table.saved[m.name][k] for k in option) for m, option in zip(part, options, strict=True))
    return 1.0 - most


def shares_to_try(modules: Sequence[Units], constraints: Constraints) -> list[float]:
    """Return the shares of heads that remove 1, 2, 3, ... bundles, up to all but one, ascending.

    The bundles are those of all modules under `global`, and those of the largest module under `uniform`. If they are
    more than `MOST_SHARES`, the shares are multiples of 1 / MOST_SHARES. The modules are one of `Constraints.parts`.
    """
    bundles = [bundle_count(module, constraints.unit) for module in modules]
    most = min(max(bundles) if constraints.uniform(modules) else sum(bundles), MOST_SHARES)
    return [k / most for k in range(1, most)]


def uniform_counts(modules: Sequence[Units], constraints: Constraints) -> list[list[int]]:
    """Return, for every share that all modules can lose, the bundles that each loses; ascending, without doubles."""
    options = removable_counts(modules, constraints)  # (module, count), ascending from 0
    distinct: list[list[int]] = []
    for share in shares_to_try(modules, constraints):
        wanted = [
            round(share * bundle_count(module, constraints.unit)) if len(option) > 1 else 0
            for module, option in zip(modules, options, strict=True)
        ]
        # A module at its min_heads would lose a smaller share than the others.
        if any(count > option[-1] for count, option in zip(wanted, options, strict=True)):
            break
        # Of the counts that a module may lose, the largest up to the wanted one.
        counts = [option[bisect_right(option, count) - 1] for count, option in zip(wanted, options, strict=True)]
        if any(counts) and (not distinct or counts != distinct[-1]):
            distinct.append(counts)
    return distinct


def saved_by(table: CostTable, modules: Sequence[Units], counts: Sequence[int]) -> float:
    """Return the share of the dense model's cost that is saved when each module loses a number of bundles."""
    return sum(table.saved[module.name][count] for module, count in zip(modules, counts, strict=True))


@dataclass(frozen=True)
class Goal:
    """How much of a model is to go: a share of the heads, or all but a share of its cost."""

    heads: float | None = None
    ratio: float | None = None  # greatest share of the dense cost left
    table: CostTable | None = None  # what removals save; given with `ratio`
