"""Removals by the slopes of the convex hulls of their curves, and merged chains, against brute force."""

import itertools
import random
from collections.abc import Sequence

import pytest

from hies_export.score.criteria import Chain, Removal, in_order_of_slopes, merged


def level(effects: Sequence[float]) -> list[float]:
    """Return the effects with every fall, and every effect below zero, levelled."""
    return [max(0.0, *effects[: i + 1]) for i in range(len(effects))]


def lowest(saved: Sequence[float], effects: Sequence[float], at: float) -> float:
    """Return the lower convex hull at a saving: the least of all lines between two points, by trying them all."""
    points = [(0.0, 0.0), *zip(saved, level(effects), strict=True)]
    found = [y for x, y in points if x == at]
    for (x0, y0), (x1, y1) in itertools.product(points, points):
        if x0 < at < x1:
            found.append(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
    return min(found)


def curve(seed: int, *, falling: bool, gaps: bool) -> tuple[list[float], list[float]]:
    generator = random.Random(seed)
    saved, effects, total, effect = [], [], 0.0, 0.0
    for _ in range(generator.randint(1, 14)):
        total += generator.choice([0, 1, 2]) if gaps else 1
        effect += generator.uniform(-0.4 if falling else 0, 1) ** 3
        saved.append(total)
        effects.append(effect)
    return saved, effects


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_removals_of_a_curve_go_in_their_order_and_hulls_before_steeper_ones(
    seed: int, falling: bool, gaps: bool
) -> None:
    """A straight line of a given slope comes after the removals up to the hull's first point with a steeper edge."""
    saved, effects = curve(seed, falling=falling, gaps=gaps)
    assert [place for _, place in in_order_of_slopes([(saved, effects)])] == [
        *range(saved.index(max(saved)) + 1 if max(saved) > 0 else 0)
    ]
    for slope in (0.01, 0.1, 0.3, 0.9):
        order = in_order_of_slopes([(saved, effects), ([1.0], [slope])])
        before = order.index((1, 0))
        total = saved[before - 1] if before else 0.0
        # Of all points of the hull, the one where a line of this slope touches it.
        points = [(0.0, 0.0), *zip(saved, level(effects), strict=True)]
        assert min(y - slope * x for x, y in points) == pytest.approx(
            lowest(saved, effects, total) - slope * total, abs=1e-12
        )


def chain(name: str, *effects: float, width: int = 1) -> Chain:
    return tuple(Removal(name, tuple(range(i * width, (i + 1) * width)), effect) for i, effect in enumerate(effects))


def names(order: Sequence[Removal]) -> str:
    return "".join(removal.module for removal in order)


def test_merged_takes_the_least_slope_first() -> None:
    assert names(merged([chain("a", 1, 4, 9), chain("b", 2, 4, 10)])) == "abbaab"
    # The second removal of a is nearly free, so both go together, before the single one of b that looks cheaper.
    assert names(merged([chain("a", 3, 3.1), chain("b", 2, 8)])) == "aabb"
    # A removal of several units costs that much less a unit.
    assert names(merged([chain("a", 1, 3), chain("b", 1.5, 6, width=3)])) == "baba"


def test_of_equal_slopes_the_later_chain_goes_first() -> None:
    assert names(merged([chain("a", 1, 2), chain("b", 1, 2), chain("c", 0.5, 3)])) == "cbbaac"
    assert names(merged([chain(name, 0, 0) for name in "abc"])) == "ccbbaa"


def points_of_hull(effects: Sequence[float]) -> set[int]:
    """Return the numbers of removals at which a curve of one unit each touches its lower convex hull."""
    saved, points = range(1, len(effects) + 1), [0.0, *level(effects)]
    return {n for n, effect in enumerate(points) if effect <= lowest(saved, effects, n) + 1e-12}


@pytest.mark.parametrize("seed", range(8))
def test_merged_orders_are_nested_and_optimal_where_edges_end(seed: int) -> None:
    generator = random.Random(seed)
    chains = []
    for name in "abc":
        effects = itertools.accumulate(generator.uniform(0, 1) ** 3 for _ in range(5))
        chains.append(chain(name, *effects))
    order = merged(chains)
    assert len(order) == 15
    for one in chains:
        assert tuple(removal for removal in order if removal.module == one[0].module) == one
    # Where counts are at points of the hulls, no other choice of as many removals has a smaller total effect.
    ends = [points_of_hull([r.effect for r in one]) for one in chains]

    def total(counts: Sequence[int]) -> float:
        return sum(one[count - 1].effect if count else 0.0 for one, count in zip(chains, counts, strict=True))

    checked = 0
    for size in range(1, 16):
        counts = [sum(removal.module == name for removal in order[:size]) for name in "abc"]
        if all(count in whole for count, whole in zip(counts, ends, strict=True)):
            best = min(total(c) for c in itertools.product(range(6), repeat=3) if sum(c) == size)
            assert total(counts) == pytest.approx(best)
            checked += 1
    assert checked > 3
