"""Split a budget into rounds, each of which is scored on the model that the previous round left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import PlanError
from ..units.units import Selection, Units
from .constraints import Constraints, bundle_count, check_budget


@dataclass(frozen=True)
class HeadTarget:
    """The heads that all rounds up to one remove together."""

    wanted: int | Sequence[int]  # bundles of all modules together under `global`, of each module under `uniform`
    dense: Sequence[int]  # bundles of each module before the first round
    unit: str  # as in `Constraints`

    def size(self, modules: Sequence[Units]) -> tuple[float | None, list[int] | None]:
        """Return `heads` and `counts` of `select_units`, one of them None, for the modules that the last round left."""
        left = [bundle_count(module, self.unit) for module in modules]
        if isinstance(self.wanted, int):
            return (self.wanted - sum(self.dense) + sum(left)) / sum(left), None
        return None, [w - d + n for w, d, n in zip(self.wanted, self.dense, left, strict=True)]


def head_targets(
    modules: Sequence[Units], *, heads: float, count: int, constraints: Constraints
) -> Iterator[HeadTarget]:
    """Yield the targets of `count` rounds that spend a share of heads evenly, without rounds that remove nothing."""
    dense = [bundle_count(module, constraints.unit) for module in modules]
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
            yield HeadTarget(wanted, dense, constraints.unit)


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
