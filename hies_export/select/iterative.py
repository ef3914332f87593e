"""Prune iteratively: a share of the budget at a time, each scored on the model that the rounds before leave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PlanError
from ..values import Kept, Selection, Units
from .bundles import bundle_count
from .constraints import Constraints, check_budget


@dataclass(frozen=True)
class Round:
    """What one round removes.

    Attributes:
        wanted: Bundles that are gone after the round: of all modules under `global`, of each under `uniform`.
        dense: Bundles of each module before the first round.
        unit: What a bundle is.
    """

    wanted: int | Sequence[int]
    dense: Sequence[int]
    unit: str

    def size(self, modules: Sequence[Units]) -> tuple[float | None, list[int] | None]:
        """Return `heads` and `counts` for `select_units`, one of them None.

        Args:
            modules: Those that may lose units, as the rounds before left them.
        """
        left = [bundle_count(module, self.unit) for module in modules]
        if isinstance(self.wanted, int):
            return (self.wanted - sum(self.dense) + sum(left)) / sum(left), None
        return None, [w - d + n for w, d, n in zip(self.wanted, self.dense, left, strict=True)]


def rounds_of(modules: Sequence[Units], *, heads: float, count: int, constraints: Constraints) -> Iterator[Round]:
    """Divide a budget of heads into rounds; rounds that would remove nothing are left out.

    Args:
        modules: Those that may lose units, before the first round.
        heads: Share of heads that all rounds together remove.
        count: How many; the first n of them remove n/count of that share.
        constraints: What the selection is subject to.
    """
    dense = [bundle_count(module, constraints.unit) for module in modules]
    before: int | list[int] = 0
    for number in range(1, count + 1):
        # The last says why when nothing can go.
        with contextlib.suppress(PlanError) if number < count else contextlib.nullcontext():
            wanted = check_budget(modules, heads=heads * number / count, constraints=constraints)
            if wanted != before:
                before = wanted
                yield Round(wanted, dense, constraints.unit)


def compose(first: Selection, second: Selection) -> Selection:
    """Return the selection that does to a model what `second` does to the model that `first` leaves."""
    return {
        name: Kept(tuple(before.units[i] for i in second[name].units), before.total, before.groups)
        for name, before in first.items()
    }


def filled_in(earlier: Mapping[str, Tensor], later: Mapping[str, Tensor], selection: Selection) -> dict[str, Tensor]:
    """Return numbers of all units, (units,) per module: the later ones of those that `selection` left."""
    kept = {name: torch.tensor(selection[name].units) for name in earlier}
    return {name: values.index_copy(0, kept[name], later[name]) for name, values in earlier.items()}
