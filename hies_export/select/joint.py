"""Choose the units of several kinds that stay within one budget of cost, by the slopes of their removal curves.

Every chain of removals has a curve: the cost that its first 1, 2, ... removals save, and their effect on quality. One
point of every curve is chosen, so that the cost fits the budget and the effects add up to the least: a multiple-choice
knapsack. Up to `MOST_OPTIONS` points it is solved exactly. Beyond, as in large models, the lower convex hull of each
curve is cut into edges, and the edges of all chains are taken in the order of their slope, effect per cost saved
(Sinha and Zoltners 1979). Curves are then so fine that the last edge makes no difference.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import RecipeError
from ..score.merge import hull
from ..units import Units
from ..values import Chain, Removal, Scores
from .budget import CostTable, check_reachable
from .bundles import bundle_count, worst_first
from .constraints import Constraints, removable_counts
from .knapsack import least_loss_saving

# Costs count in steps of 1 / GRID of the dense model's, rounded so that no budget is exceeded.
GRID = 20_000
# Up to so many points of all curves, the choice is exact, which takes seconds.
MOST_OPTIONS = 20_000

# Sums of the same costs in different orders differ by less.
ROUNDING = 1e-12

# What the first 0, 1, 2, ... blocks of a chain save together, and their effect.
_Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class _Block:
    """Bundles that one module loses together, and by how much that raises the effect of the chain."""

    module: str
    units: tuple[int, ...]
    bundles: int
    rise: float


def removed_jointly(
    scores: Scores, modules: Sequence[Units], table: CostTable, *, ratio: float, constraints: Constraints
) -> dict[str, set[int]]:
    """Return the units that go, so that the effects of all chains add up to the least within a budget of cost."""
    by_name = {module.name: module for module in modules}
    options = dict(zip(by_name, removable_counts(modules, constraints), strict=True))
    chains = chains_of(scores, modules, unit=constraints.unit)
    blocks = [list(_blocks(chain, by_name, options, constraints.unit)) for chain in chains]
    curves = [_curve(chain, table) for chain in blocks]
    # A chain over several modules may not reach the least cost of each: timings need not fall with every unit.
    least = 1 - sum(max(saved) for saved, _ in curves)
    check_reachable(modules, table, ratio=ratio + ROUNDING, constraints=constraints, best=least)
    if sum(len(saved) for saved, _ in curves) <= MOST_OPTIONS:
        saved, effects = zip(*curves, strict=True) if curves else ((), ())
        taken = least_loss_saving(saved, effects, 1 - ratio, grid=GRID)
    else:
        taken = _by_slopes(curves, 1 - ratio)
    removed: dict[str, set[int]] = {}
    for chain, count in zip(blocks, taken, strict=True):
        for block in chain[:count]:
            removed.setdefault(block.module, set()).update(block.units)
    return removed


def chains_of(scores: Scores, modules: Sequence[Units], *, unit: str = "group") -> tuple[Chain, ...]:
    """Return the scores' own chains of removals, or make chains from scores and effects.

    Modules of a kind that the scores rank form one chain, in the order of the scores of their bundles. Every other
    module is a chain, in the order of its scores. A removal's effect is the sum of its units' effects.
    """
    if scores.chains:
        return scores.chains
    if lacking := [module.name for module in modules if module.name not in scores.effects]:
        raise RecipeError(
            [
                f"heads and neurons are compared by effects, but the scores have none of {lacking[0]}; score by "
                "score_units(statistics, modules, ...)"
            ]
        )
    chains = []
    for kind in dict.fromkeys(module.kind for module in modules):
        of_kind = [module for module in modules if module.kind == kind]
        for together in [of_kind] if kind in scores.ranked else [[module] for module in of_kind]:
            effect, chain = 0.0, []
            effects = {module.name: scores.effects[module.name].tolist() for module in together}
            for name, units in worst_first(scores.scores, together, unit):
                effect += sum(effects[name][u] for u in units)
                chain.append(Removal(name, units, effect))
            chains.append(tuple(chain))
    return tuple(chains)


def _by_slopes(curves: Sequence[_Curve], wanted: float) -> list[int]:
    """Return how many blocks each chain loses, by taking the edges of all hulls in the order of their slopes."""
    edges = [
        (edge.slope, -number, edge)
        for number, (saved, effects) in enumerate(curves)
        for edge in hull(saved[1:], effects[1:])
    ]
    taken = [0] * len(curves)
    total = 0.0
    for _, negative, edge in sorted(edges):
        if total >= wanted:
            break
        saved = curves[-negative][0]
        before = saved[edge.start]
        # All of an edge; of the last one, as little as is enough.
        enough = (p for p in range(edge.start + 1, edge.end) if total + saved[p] - before >= wanted)
        taken[-negative] = next(enough, edge.end)
        total += saved[taken[-negative]] - before
    return taken


def _curve(chain: Sequence[_Block], table: CostTable) -> _Curve:
    """Return what the first 0, 1, 2, ... blocks of a chain save, as a share of the dense cost, and their effect."""
    lost: dict[str, int] = {}
    saved, effects, total, effect = [0.0], [0.0], 0.0, 0.0
    for block in chain:
        before = lost.get(block.module, 0)
        lost[block.module] = before + block.bundles
        total += table.saved[block.module][before + block.bundles] - table.saved[block.module][before]
        effect += block.rise
        saved.append(total)
        effects.append(effect)
    return saved, effects


def _blocks(
    chain: Chain, modules: Mapping[str, Units], options: Mapping[str, Sequence[int]], unit: str
) -> Iterator[_Block]:
    """Yield the removals of a chain in blocks that leave every module a number of units that the constraints allow.

    A unit waits until its module has lost enough others with it. Units beyond what a module may lose stay. `options`
    has the numbers of bundles that each module may lose, ascending from 0.
    """
    lost = dict.fromkeys(modules, 0)
    waiting: dict[str, list[tuple[tuple[int, ...], float]]] = {name: [] for name in modules}
    before = 0.0
    for removal in chain:
        name, rise, before = removal.module, removal.effect - before, removal.effect
        bundles = _bundles(removal, modules[name], unit)
        for units in bundles:
            waiting[name].append((units, rise / len(bundles)))
            reached = lost[name] + len(waiting[name])
            place = bisect_right(options[name], reached) - 1
            if options[name][place] == reached:
                yield _Block(
                    name,
                    tuple(unit for units, _ in waiting[name] for unit in units),
                    len(waiting[name]),
                    sum(rise for _, rise in waiting[name]),
                )
                lost[name], waiting[name] = reached, []


def _bundles(removal: Removal, module: Units, unit: str) -> list[tuple[int, ...]]:
    """Return the bundles of a removal, in its order."""
    size = module.units // bundle_count(module, unit)
    return [removal.units[i : i + size] for i in range(0, len(removal.units), size)]
