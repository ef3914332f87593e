"""Bundle the units that are removed together.

By default (`unit: group`) a bundle is a group: in attention, a key/value head with its query heads. Without grouped
queries that is a single head. Under `unit: query` every group stays, and the n-th bundle has the n-th worst unit of
each group, so that all groups keep the same number. A bundle's score is the mean score of its units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..errors import NonFiniteError
from ..kinds import UNIT_NAMES
from ..units import Selection, Units


def bundle_count(module: Units, unit: str) -> int:
    """Return the number of bundles in a module."""
    return module.groups if unit == "group" or module.group_size == 1 else module.group_size


def ranked_bundles(scores: Tensor, module: Units, unit: str) -> list[tuple[float, tuple[int, ...]]]:
    """Return score and units of every bundle of a module, worst first; among equals the later unit comes first."""
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise NonFiniteError(
            f"every score must be a finite number, but {UNIT_NAMES[module.kind]} {wrong[0]} of {module.name} has "
            f"{scores[wrong[0]].item()}; check the criterion, and the model's dtype"
        )
    values = scores.double().view(module.groups, module.group_size).tolist()
    units = [[g * module.group_size + j for j in range(module.group_size)] for g in range(module.groups)]
    if unit == "group" or module.group_size == 1:
        found = [(sum(v) / len(v), tuple(h)) for v, h in zip(values, units, strict=True)]
    else:
        ranked = [
            sorted(zip(v, h, strict=True), key=lambda item: (item[0], -item[1]))
            for v, h in zip(values, units, strict=True)
        ]
        # The means ascend, because the scores of each group do.
        return [(sum(v for v, _ in b) / len(b), tuple(h for _, h in b)) for b in zip(*ranked, strict=True)]
    return sorted(found, key=lambda item: (item[0], -item[1][0]))


def worst_first(scores: Mapping[str, Tensor], modules: Sequence[Units], unit: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return module and units of every bundle of all modules, worst first; of equals the later module's come first."""
    order = sorted(
        (score, -number, place, units)
        for number, module in enumerate(modules)
        for place, (score, units) in enumerate(ranked_bundles(scores[module.name], module, unit))
    )
    return [(modules[-number].name, units) for _, number, _, units in order]


def bundles_lost(selection: Selection, modules: Sequence[Units], *, unit: str) -> dict[str, int]:
    """Return how many bundles each module loses, for modules that lose any; `unit` is "group" or "query"."""
    lost = {
        module.name: bundle_count(module, unit) * len(selection[module.name].removed) // module.units
        for module in modules
    }
    return {name: count for name, count in lost.items() if count}
