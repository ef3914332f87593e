"""Split a budget into rounds, each of which is scored on the model that the previous round left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import PlanError
from ..units.units import Selection, Units
from .constraints import Constraints, bundle_count, check_budget
from .cost import CostTable


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
