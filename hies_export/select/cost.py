"""Tables of what removing bundles of units saves, and checks that a budget of cost is reachable."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError
from ..kinds import UNIT_NAMES
from ..units.units import Selection, Units
from .constraints import NONE, Constraints, bundle_count, bundles_lost, check_budget, removable_counts

# At most this many shares are tried one by one.
MOST_SHARES = 1000


@dataclass(frozen=True)
class CostTable:
    """The cost that each module saves by losing bundles, as a share of the dense model's cost."""

    what: str  # name of the cost in messages: "FLOPs", "parameters", or "latency" with the runtime
    saved: Mapping[str, tuple[float, ...]]  # dotted name of a module -> share saved by losing 0, 1, 2, ... bundles
    # The timings behind a table of latency, one row each: kind, kept (share of the bundles), ratio, ratio_low,
    # ratio_high, control_low, control_high. Empty for other costs.
    measured: tuple[Mapping[str, Any], ...] = ()
    # The cost that the shares are of, relative to the reference of the budget: less than 1 where tokens went.
    dense: float = 1.0

    def left(self, selection: Selection, modules: Sequence[Units], *, unit: str) -> float:
        """Return the predicted share of the dense model's cost that a selection leaves."""
        return self.ratio(bundles_lost(selection, modules, unit=unit))

    def ratio(self, counts: Mapping[str, int]) -> float:
        """Return the predicted share of the dense model's cost, for the number of bundles that each module loses."""
        return 1.0 - sum(self.saved[name][count] for name, count in counts.items())

    def after(self, counts: Mapping[str, int]) -> CostTable:
        """Return the table of the remaining model, in shares of the dense cost; `ratio` ignores earlier savings."""
        saved = {
            name: tuple(share - row[counts.get(name, 0)] for share in row[counts.get(name, 0) :])
            for name, row in self.saved.items()
        }
        return replace(self, saved=saved)


def check_reachable(
    modules: Sequence[Units],
    table: CostTable,
    *,
    ratio: float,
    constraints: Constraints = NONE,
    best: float | None = None,
) -> None:
    """Refuse, by a PlanError, a budget that no selection meets; `best` is the lowest cost, or else `lowest_ratio`."""
    best = lowest_ratio(modules, table, constraints) if best is None else best
    if best > ratio:
        names = ("unit", "min_heads", "min_neurons", "keep_layers", "multiple_of")
        given = {name: getattr(constraints, name) for name in names}
        given["multiple_of neurons"] = constraints.neurons_multiple_of
        limits = ", ".join(f"{name} {value}" for name, value in given.items() if value not in (1, (), [], "group"))
        units = " and ".join(dict.fromkeys(f"{UNIT_NAMES[module.kind]}s" for module in modules))
        raise PlanError(
            f"the budget asks for {table.what} at most {ratio:g} of dense, but cutting all {units} that may go"
            f"{f' ({limits})' if limits else ''} gives {best:.3f}, the best there is; raise the target"
            + (" or loosen the constraints" if limits else "")
        )


def lowest_ratio(modules: Sequence[Units], table: CostTable, constraints: Constraints) -> float:
    """Return the lowest cost that the constraints allow, as a share of the dense model's."""
    most = 0.0
    for part in constraints.parts(modules):
        if constraints.uniform(part):
            most += max((saved_by(table, part, counts) for counts in uniform_counts(part, constraints)), default=0.0)
            continue
        options = removable_counts(part, constraints)
        most += sum(max(table.saved[m.name][k] for k in option) for m, option in zip(part, options, strict=True))
    return 1.0 - most


def shares_to_try(modules: Sequence[Units], constraints: Constraints) -> list[float]:
    """Return the shares of heads that remove 1, 2, 3, ... bundles, up to all but one, ascending.

    The bundles are those of all modules under `global`, and those of the largest module under `uniform`. If they are
    more than `MOST_SHARES`, the shares are the multiples of 1 / MOST_SHARES. The modules are one of
    `Constraints.parts`.
    """
    bundles = [bundle_count(module, constraints.unit) for module in modules]
    most = min(max(bundles) if constraints.uniform(modules) else sum(bundles), MOST_SHARES)
    return [k / most for k in range(1, most)]


def uniform_counts(modules: Sequence[Units], constraints: Constraints) -> list[list[int]]:
    """Return the counts per module for every share that all modules can lose, ascending."""
    options = removable_counts(modules, constraints)
    found: list[list[int]] = []
    for share in shares_to_try(modules, constraints):
        wanted = [
            round(share * bundle_count(module, constraints.unit)) if len(option) > 1 else 0
            for module, option in zip(modules, options, strict=True)
        ]
        counts = [o[bisect_right(o, w) - 1] for o, w in zip(options, wanted, strict=True)]
        # A module at its min_heads would lose a smaller share than the others.
        if any(w > o[-1] for w, o in zip(wanted, options, strict=True)):
            break
        if any(counts) and (not found or counts != found[-1]):
            found.append(counts)
    return found


def saved_by(table: CostTable, modules: Sequence[Units], counts: Sequence[int]) -> float:
    """Return the share of the dense model's cost that is saved when each module loses a number of bundles."""
    return sum(table.saved[module.name][count] for module, count in zip(modules, counts, strict=True))


@dataclass(frozen=True)
class Goal:
    """How much goes of a model: a share of the heads, bundles of each module, or all but a share of its cost."""

    heads: float | None = None
    counts: Sequence[int] | None = None
    ratio: float | None = None  # greatest share of the dense cost left, not counting what earlier rounds saved
    table: CostTable | None = None  # what removals save; given with `ratio`


def head_totals(
    modules: Sequence[Units], *, heads: float, count: int, constraints: Constraints
) -> Iterator[int | list[int]]:
    """Yield how many bundles are gone after each of `count` rounds that remove a share of heads in equal parts.

    The number is for all modules together under `global`, and for each module under `uniform`. Rounds that would remove
    nothing are left out.
    """
    before: int | list[int] = 0
    for number in range(1, count + 1):
        try:
            wanted = check_budget(modules, heads=heads * number / count, constraints=constraints)
        except PlanError:
            # A share that rounds to nothing is skipped, but the last round must succeed or say why not.
            if number == count:
                raise
            continue
        if wanted != before:
            before = wanted
            yield wanted


def heads_to_go(modules: Sequence[Units], total: int | Sequence[int], lost: Mapping[str, int], *, unit: str) -> Goal:
    """Return the goal of a round after which `total` bundles are gone, `lost` of them in earlier rounds, by module."""
    before = [lost.get(module.name, 0) for module in modules]
    if isinstance(total, int):
        left = sum(bundle_count(module, unit) for module in modules) - sum(before)
        return Goal(heads=(total - sum(before)) / left)
    return Goal(counts=[wanted - gone for wanted, gone in zip(total, before, strict=True)])


def cost_to_go(table: CostTable, ratio: float, lost: Mapping[str, int]) -> Goal:
    """Return the goal of a round that leaves a share of the dense cost, after the bundles lost to earlier rounds."""
    return Goal(ratio=ratio + (1 - table.ratio(lost)), table=table.after(lost))


def compose(first: Selection, second: Selection) -> Selection:
    """Return the selection that equals `first`, then `second`, which selects from the model cut by `first`."""
    return {
        name: replace(before, units=tuple(before.units[i] for i in second[name].units))
        for name, before in first.items()
    }


def filled_in(earlier: Mapping[str, Tensor], later: Mapping[str, Tensor], selection: Selection) -> dict[str, Tensor]:
    """Return values for all units, (units,) by module: the later ones for units that stay, else the earlier."""
    kept = {name: torch.tensor(selection[name].units) for name in earlier}
    return {name: values.index_copy(0, kept[name], later[name]) for name, values in earlier.items()}
