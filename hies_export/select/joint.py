"""Choose the units of several kinds to keep within one budget of cost, by the slopes of their removal curves.

Every chain of removals has a curve: the cost saved by its first 1, 2, ... removals, and their effect on quality. One
point of every curve is chosen, so that the cost fits the budget and the effects add up to the least: a multiple-choice
knapsack. Up to `MOST_OPTIONS` points it is solved exactly. Beyond, as in large models, the lower convex hull of each
curve is cut into edges, and the edges of all chains are taken in the order of their slope, effect per cost saved (Sinha
and Zoltners 1979). Such curves are so fine that the last edge makes no difference.

A kind with its own uniform allocation has one curve: its points are the shares that all its modules can lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from ..errors import RecipeError
from ..recipe.sections import Constraints
from ..score.criteria import Chain, Removal, Scores, in_order_of_slopes
from ..units.units import Units
from .constraints import bundle_count, removable_counts, worst_first
from .cost import CostTable, check_reachable, saved_by, uniform_counts


def least_loss(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], limit: int
) -> tuple[np.ndarray, Callable[[int], list[int]]]:
    """Solve a multiple-choice knapsack exactly: one option per module, with the cost and the loss of each.

    `costs` are whole numbers from 0 on; total costs up to `limit` are considered. Return the least total loss for every
    exact total cost, (limit + 1,) float64, infinite if no choice has that cost, and a function from a total cost to its
    choice, the place of the option of each module; of equals the first.
    """
    best = np.full(limit + 1, np.inf)
    best[0] = 0.0
    picks = []  # of each module, the option taken at every total cost of the modules up to it
    for cost, loss in zip(costs, losses, strict=True):
        new, pick = np.full(limit + 1, np.inf), np.zeros(limit + 1, dtype=np.int32)
        for option, (own_cost, own_loss) in enumerate(zip(cost, loss, strict=True)):
            if own_cost > limit:
                continue
            candidate = best[: limit + 1 - own_cost] + own_loss
            better = candidate < new[own_cost:]
            new[own_cost:][better] = candidate[better]
            pick[own_cost:][better] = option
        best = new
        picks.append(pick)

    def trace(total: int) -> list[int]:
        chosen = []
        for cost, pick in zip(reversed(costs), reversed(picks), strict=True):
            chosen.append(int(pick[total]))
            total -= cost[chosen[-1]]
        return chosen[::-1]

    return best, trace


def least_loss_saving(curves: Sequence[_Curve], wanted: float) -> list[int]:
    """Return the place of one point per curve, which together save `wanted` or more at the least loss.

    Savings are shares of the dense cost; the first point of a curve saves nothing. Those of several curves count in
    steps of 1 / `GRID` or 1 / `FINE_GRID`, so that enough is saved; those of one are exact.
    """
    saved, losses = [saved for saved, _ in curves], [effects for _, effects in curves]
    if len(curves) == 1:
        enough = [place for place, share in enumerate(saved[0]) if share >= wanted - ROUNDING]
        return [min(enough, key=losses[0].__getitem__)]
    # Timings need not fall with every unit, so costs are relative to the most that a curve can save.
    most = [max(row) for row in saved]
    grid = FINE_GRID if sum(map(len, saved)) <= FEW_OPTIONS else GRID
    costs = [[math.ceil((top - share) * grid - 1e-6) for share in row] for top, row in zip(most, saved, strict=True)]
    best, trace = least_loss(costs, losses, max(0, math.floor((sum(most) - wanted) * grid + 1e-6)))
    return trace(int(best.argmin()))


GRID = 20_000  # costs count in steps of 1 / GRID of the dense model's, rounded so that no budget is exceeded
# Up to this many points of all curves, as heads alone have, the steps are 1 / FINE_GRID.
FEW_OPTIONS, FINE_GRID = 2_000, 100_000
MOST_OPTIONS = 20_000  # up to this many points of all curves, the choice is exact, which takes seconds

# Sums of the same costs in different orders differ by less.
ROUNDING = 1e-12

# What the first 0, 1, 2, ... removals of a chain save together, and their effect.
_Curve = tuple[list[float], list[float]]


def removed_jointly(
    scores: Scores, modules: Sequence[Units], table: CostTable, *, ratio: float, constraints: Constraints
) -> dict[str, set[int]]:
    """Return module -> the units that go, at the least sum of the effects of all chains within a budget of cost."""
    sizes = {module.name: module.units // bundle_count(module, constraints.unit) for module in modules}
    options = dict(zip(sizes, map(set, removable_counts(modules, constraints)), strict=True))
    uniform = [part for part in constraints.parts(modules) if constraints.uniform(part)]  # modules of one allocation
    all_uniform = len(uniform) == 1 and len(uniform[0]) == len(modules)
    chains = chains_of(scores, modules, unit=constraints.unit, compared=not all_uniform)
    # Bundle by bundle, whatever the constraints: `uniform_counts` applies them.
    bundles: dict[str, list[Removal]] = {module.name: [] for part in uniform for module in part}
    for chain in chains:
        for name in bundles.keys() & {removal.module for removal in chain}:
            bundles[name] += allowed_removals(chain, sizes, {name: range(len(scores.scores[name]))})
    shares = [[[0] * len(part), *uniform_counts(part, constraints)] for part in uniform]
    others = {name: counts for name, counts in options.items() if name not in bundles}
    allowed = [removals for chain in chains if (removals := list(allowed_removals(chain, sizes, others)))]
    curves = [
        *(curve_of(chain, sizes, table) for chain in allowed),
        *(_uniform_curve(part, counts, bundles, table) for part, counts in zip(uniform, shares, strict=True)),
    ]
    # A chain over several modules may not reach the least cost of each: timings need not fall with every unit.
    least = 1 - sum(max(saved) for saved, _ in curves)
    check_reachable(modules, table, ratio=ratio + ROUNDING, constraints=constraints, best=least)
    choose = least_loss_saving if sum(len(saved) for saved, _ in curves) <= MOST_OPTIONS else by_slopes
    taken = choose(curves, 1 - ratio)
    # Taken are numbers of removals of the chains, then places of the shares. Not strict: the shares come after.
    gone = [removal for chain, count in zip(allowed, taken, strict=False) for removal in chain[:count]]
    for part, counts, share in zip(uniform, shares, taken[len(allowed) :], strict=True):
        for module, count in zip(part, counts[share], strict=True):
            gone += bundles[module.name][:count]
    removed: dict[str, set[int]] = {}
    for removal in gone:
        removed.setdefault(removal.module, set()).update(removal.units)
    return removed


def _uniform_curve(
    part: Sequence[Units], shares: Sequence[Sequence[int]], bundles: Mapping[str, Sequence[Removal]], table: CostTable
) -> _Curve:
    """Return the saving and the effect of each share that all modules of a part can lose."""
    effects = {module.name: [0.0, *(removal.effect for removal in bundles[module.name])] for module in part}
    of_shares = (sum(effects[m.name][count] for m, count in zip(part, counts, strict=True)) for counts in shares)
    # Where an estimated effect falls, the highest so far counts: no larger share than the budget asks for is better.
    return [saved_by(table, part, counts) for counts in shares], [*accumulate(of_shares, max)]


def chains_of(
    scores: Scores, modules: Sequence[Units], *, unit: str = "group", compared: bool = True
) -> tuple[Chain, ...]:
    """Return the scores' own chains of removals, or make chains from scores and effects.

    Modules of a kind that the scores rank form one chain, in the order of the scores of their bundles. Every other
    module is a chain, in the order of its scores. A removal's effect is the sum of its units' effects. Where kinds are
    not `compared`, or there is only one, scores without effects count as effects.
    """
    if scores.chains:
        return scores.chains
    kinds = tuple(dict.fromkeys(module.kind for module in modules))
    known = scores.effects if scores.effects or (compared and len(kinds) > 1) else scores.scores
    if lacking := [module.name for module in modules if module.name not in known]:
        raise RecipeError(
            f"heads and neurons are compared by effects, but the scores have none of {lacking[0]}; score by "
            "score_units(statistics, modules, ...)"
        )
    chains = []
    for kind in kinds:
        of_kind = [module for module in modules if module.kind == kind]
        modules_of_chains = [of_kind] if kind in scores.ranked else [[module] for module in of_kind]
        for together in modules_of_chains:
            effect, chain = 0.0, []
            effects = {module.name: known[module.name].tolist() for module in together}
            for name, units in worst_first(scores.scores, together, unit):
                effect += sum(effects[name][u] for u in units)
                chain.append(Removal(name, units, effect))
            chains.append(tuple(chain))
    return tuple(chains)


def by_slopes(curves: Sequence[_Curve], wanted: float) -> list[int]:
    """Return how many removals of each chain to take so that they save `wanted`, a share of the dense cost.

    Removals are taken in the order of the slopes of their curves' hulls.
    """
    taken = [0] * len(curves)
    total = 0.0
    for number, place in in_order_of_slopes((saved[1:], effects[1:]) for saved, effects in curves):
        if total >= wanted:
            break
        saved = curves[number][0]
        taken[number] = place + 1
        total += saved[place + 1] - saved[place]
    return taken


def curve_of(chain: Sequence[Removal], sizes: Mapping[str, int], table: CostTable) -> _Curve:
    """Return the savings of the first 0, 1, 2, ... removals of a chain, as shares of the dense cost, and their effects.

    `sizes` has the number of units per bundle of each module.
    """
    lost = dict.fromkeys(sizes, 0)  # module -> bundles lost so far
    saved = [0.0]
    for removal in chain:
        of_module, before = table.saved[removal.module], lost[removal.module]
        lost[removal.module] += len(removal.units) // sizes[removal.module]
        saved.append(saved[-1] + (of_module[lost[removal.module]] - of_module[before]))
    return saved, [0.0, *(removal.effect for removal in chain)]


def allowed_removals(
    chain: Chain, sizes: Mapping[str, int], options: Mapping[str, Collection[int]]
) -> Iterator[Removal]:
    """Yield the bundles of a chain, joined to removals that each leave their module an allowed number of units.

    A bundle waits for later ones of its module until they are enough together; bundles that never are stay. `sizes` has
    the number of units per bundle, and `options` the numbers of bundles that each module may lose; modules that are not
    in `options` lose none. The effects are those of the bundles that are yielded.
    """
    lost = dict.fromkeys(sizes, 0)
    waiting: dict[str, list[tuple[tuple[int, ...], float]]] = {name: [] for name in sizes}
    before = effect = 0.0
    for removal in chain:
        name, rise, before = removal.module, removal.effect - before, removal.effect  # `before` of the next removal
        bundles = [removal.units[i : i + sizes[name]] for i in range(0, len(removal.units), sizes[name])]
        for units in bundles:
            waiting[name].append((units, rise / len(bundles)))
            reached = lost[name] + len(waiting[name])
            if reached in options.get(name, ()):
                effect += sum(rise for _, rise in waiting[name])
                yield Removal(name, tuple(unit for units, _ in waiting[name] for unit in units), effect)
                lost[name], waiting[name] = reached, []
