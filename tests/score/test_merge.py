"""Convex hulls of removal curves, and chains merged by their slopes, against brute force."""

import itertools
import random
from collections.abc import Sequence

import pytest

from hies_export.score.criteria import Chain, Edge, Removal, hull, merged


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
def test_the_hull_is_the_least_of_all_lines(seed: int, falling: bool, gaps: bool) -> None:
    saved, effects = curve(seed, falling=falling, gaps=gaps)
    edges = hull(saved, effects)
    assert [edge.start for edge in edges] == [0, *(edge.end for edge in edges[:-1])][: len(edges)]
    slopes = [edge.slope for edge in edges]
    assert slopes == sorted(slopes)
    x = y = 0.0
    for slope, start, end in edges:
        step = saved[end - 1] - (saved[start - 1] if start else 0.0)
        assert step > 0
        x, y = x + step, y + slope * step
        assert y == pytest.approx(level(effects)[end - 1])
        # Nothing lies below the edge.
        for middle in [s for s in saved if x - step <= s <= x]:
            assert y - slope * (x - middle) == pytest.approx(lowest(saved, effects, middle), abs=1e-12)
    assert x == (max(saved) if max(saved) > 0 else 0)


def test_a_convex_curve_is_its_own_hull_and_a_concave_one_is_a_single_edge() -> None:
    assert hull([1, 2, 3], [1, 3, 6]) == [Edge(1, 0, 1), Edge(2, 1, 2), Edge(3, 2, 3)]
    assert hull([1, 2, 3], [3, 5, 6]) == [Edge(2, 0, 3)]
    assert hull([1, 2, 3], [2, 4, 6]) == [Edge(2, 0, 3)]  # a straight line is a single edge too
    assert hull([1, 2, 3, 4], [4, 4.5, 5, 9]) == [Edge(5 / 3, 0, 3), Edge(4, 3, 4)]
    assert hull([], []) == []


def chain(name: str, *effects: float, width: int = 1) -> Chain:
    return tuple(Removal(name, tuple(range(i * width, (i + 1) * width)), effect) for i, effect in enumerate(effects))


def names(order: Sequence[Removal]) -> str:
    return "".join(removal.module for removal in order)


def test_merged_takes_the_least_slope_first() -> None:
    assert names([*merged([chain("a", 1, 4, 9), chain("b", 2, 4, 10)])]) == "abbaab"
    # The second removal of a is nearly free, so both go together, before the single one of b that looks cheaper.
    assert names([*merged([chain("a", 3, 3.1), chain("b", 2, 8)])]) == "aabb"
    # A removal of several units costs that much less a unit.
    assert names([*merged([chain("a", 1, 3), chain("b", 1.5, 6, width=3)])]) == "baba"


def test_of_equal_slopes_the_later_chain_goes_first() -> None:
    assert names([*merged([chain("a", 1, 2), chain("b", 1, 2), chain("c", 0.5, 3)])]) == "cbbaac"
    assert names([*merged([chain(name, 0, 0) for name in "abc"])]) == "ccbbaa"


@pytest.mark.parametrize("seed", range(8))
def test_merged_orders_are_nested_and_optimal_where_edges_end(seed: int) -> None:
    generator = random.Random(seed)
    chains = []
    for name in "abc":
        effects = itertools.accumulate(generator.uniform(0, 1) ** 3 for _ in range(5))
        chains.append(chain(name, *effects))
    order = [*merged(chains)]
    assert len(order) == 15
    for one in chains:
        assert tuple(removal for removal in order if removal.module == one[0].module) == one
    # Where all edges taken so far are whole, no other choice of as many removals has a smaller total effect.
    ends = [{0, *(e.end for e in hull(range(1, 6), [r.effect for r in one]))} for one in chains]

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
