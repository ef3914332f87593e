"""Say what a selection may keep by its constraints, and bundle the units that are removed together.

By default (`unit: group`) a bundle is a group: in attention, a key/value head with its query heads. Without grouped
queries that is a single head. Under `unit: query` every group stays, and the n-th bundle has the n-th worst unit of
each group, so that all groups keep the same number. A bundle's score is the mean score of its units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..errors import NonFiniteError, PlanError, RecipeError
from ..kinds import KINDS
from ..recipe.sections import Constraints
from ..units.units import Selection, Units


def bundle_count(module: Units, unit: str) -> int:
    """Return the number of bundles in a module, whose units are removed by "group" or by "query"."""
    return module.groups if unit == "group" or module.group_size == 1 else module.group_size


def ranked_bundles(scores: Tensor, module: Units, unit: str) -> list[tuple[float, tuple[int, ...]]]:
    """Return score and units of every bundle of a module, worst first; of equals the later unit comes first."""
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise NonFiniteError(
            f"every score must be a finite number, but {KINDS[module.kind].unit} {wrong[0]} of {module.name} has "
            f"{scores[wrong[0]].item()}; check the criterion, and the model's dtype"
        )
    size, values = module.group_size, scores.tolist()
    groups = [[(values[u], u) for u in range(start, start + size)] for start in range(0, module.units, size)]

    def bundle_of(members: Sequence[tuple[float, int]]) -> tuple[float, tuple[int, ...]]:
        return sum(score for score, _ in members) / len(members), tuple(u for _, u in members)

    if unit == "group" or size == 1:
        return sorted(map(bundle_of, groups), key=lambda bundle: (bundle[0], -bundle[1][0]))
    ranked = [sorted(group, key=lambda member: (member[0], -member[1])) for group in groups]
    # The means ascend, because the scores of each group do.
    return [bundle_of(members) for members in zip(*ranked, strict=True)]


def worst_first(scores: Mapping[str, Tensor], modules: Sequence[Units], unit: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return module and units of every bundle of all modules, worst first; of equals the later module's come first."""
    order = sorted(
        (score, -number, place, units)
        for number, module in enumerate(modules)
        for place, (score, units) in enumerate(ranked_bundles(scores[module.name], module, unit))
    )
    return [(modules[-number].name, units) for _, number, _, units in order]


def bundles_lost(selection: Selection, modules: Sequence[Units], *, unit: str) -> dict[str, int]:
    """Return how many bundles each module loses, without those that lose none; `unit` is "group" or "query"."""
    lost = {
        module.name: bundle_count(module, unit) * len(selection[module.name].removed) // module.units
        for module in modules
    }
    return {name: count for name, count in lost.items() if count}


NONE = Constraints()


def check_budget(modules: Sequence[Units], *, heads: float, constraints: Constraints = NONE) -> int | list[int]:
    """Return how many bundles go for a share of heads: in all under `global`, of each module under `uniform`.

    Raises a RecipeError for options out of range, and a PlanError if the constraints allow no such cut.
    """
    problems = [] if 0 < heads < 1 else [f"sparsity (budget.heads) must be in (0, 1), got {heads}"]
    check_constraints(modules, constraints, problems=problems)
    unit, uniform, protected = constraints.unit, constraints.uniform(modules), constraints.protected(modules)
    bundles = [bundle_count(module, unit) for module in modules]
    counts = [0 if i in protected else round(heads * count) for i, count in enumerate(bundles)]
    most, options = most_removable(modules, constraints), removable_counts(modules, constraints)
    # With `multiple_of`, every module loses at most its share.
    fewer = [max(k for k in option if k <= count) for option, count in zip(options, counts, strict=True)]
    fewest = min((k for option in options for k in option if k), default=0)
    if uniform:  # the message is on the module that falls furthest short, or loses most
        wanted, possible, total = max(zip(counts, most, bundles, strict=True), key=lambda n: (n[0] > n[1], n))
        some_go = any(fewer)
    else:
        wanted, possible, total = round(heads * sum(bundles)), sum(most), sum(bundles)
        some_go = 0 < fewest <= wanted
    if wanted > possible or not some_go:
        what = "heads"
        if any(module.group_size > 1 for module in modules):
            what = "key/value groups" if unit == "group" else "query heads per group"
        raise PlanError(
            f"the budget asks to remove {wanted} of {total} {what}, but min_heads, keep_layers and multiple_of let "
            f"{fewest} to {possible} go; change the share or the constraints"
        )
    return fewer if uniform else wanted


def check_constraints(modules: Sequence[Units], constraints: Constraints, *, problems: Sequence[str] = ()) -> None:
    """Refuse, by a RecipeError, constraints that are out of range, together with problems found before."""
    most = max(Counter(module.kind for module in modules).values())
    outside = [layer for layer in constraints.keep_layers if not -most <= layer < most]
    undivided = {  # one message for each kind
        module.kind: f"multiple_of must divide the units of every layer, but {module.name} has {module.units} "
        f"{KINDS[module.kind].units}, and would keep a multiple of {constraints.multiple(module)}"
        for module in modules
        if module.units % constraints.multiple(module)
    }
    found = [*problems, *(f"keep_layers must name layers 0 to {most - 1}, got {layer}" for layer in outside)]
    if found or undivided:
        raise RecipeError(found or list(undivided.values()))


def removable_counts(modules: Sequence[Units], constraints: Constraints) -> list[list[int]]:
    """Return, for every module, the numbers of bundles that it may lose, ascending from 0."""
    counts = []
    for module, most in zip(modules, most_removable(modules, constraints), strict=True):
        bundles = bundle_count(module, constraints.unit)
        size, multiple = module.units // bundles, constraints.multiple(module)
        counts.append([0, *(k for k in range(1, most + 1) if (bundles - k) * size % multiple == 0)])
    return counts


def most_removable(modules: Sequence[Units], constraints: Constraints) -> list[int]:
    """Return the most bundles that each module may lose, without regard to `multiple_of`."""
    protected = constraints.protected(modules)
    counts = []
    for position, module in enumerate(modules):
        bundles = bundle_count(module, constraints.unit)
        least = math.ceil(constraints.least(module) / (module.units // bundles))
        counts.append(0 if position in protected else max(0, bundles - least))
    return counts
