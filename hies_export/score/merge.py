"""Merge chains of removals into one order, least effect per saving first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .criteria import Chain, Removal


class Edge(NamedTuple):
    """An edge of the lower convex hull of a chain's (saving, effect) points; its removals are those in [start, end)."""

    slope: float
    start: int
    end: int


def edges_by_slope(curves: Iterable[tuple[Sequence[float], Sequence[float]]]) -> list[tuple[int, Edge]]:
    """Return the edges of the hulls of several curves, each with its curve's number, least slope first.

    A curve has the savings and the effect of the first 1, 2, ... removals. Among equal slopes the later curve's come
    first.
    """
    edges = [(edge.slope, -number, edge) for number, curve in enumerate(curves) for edge in hull(*curve)]
    return [(-number, edge) for _, number, edge in sorted(edges)]


def hull(saved: Sequence[float], effects: Sequence[float]) -> list[Edge]:
    """Return the lower convex hull of a chain's points, from (0, 0) on; slopes, of effect per unit saved, ascend.

    `saved` and `effects` are totals over the first 1, 2, ... removals. A point that saves no more than an earlier one
    is never the end of an edge. An estimated effect that falls counts as level.
    """
    points = [(0.0, 0.0, 0)]
    highest = 0.0
    for end, (total, effect) in enumerate(zip(saved, effects, strict=True), start=1):
        highest = max(highest, effect)
        if total <= points[-1][0]:
            continue
        points.append((total, highest, end))
        while len(points) > 2 and _slope(points[-2], points[-1]) <= _slope(points[-3], points[-2]):
            del points[-2]
    return [Edge(_slope(one, other), one[2], other[2]) for one, other in pairwise(points)]


def _slope(one: tuple[float, float, int], other: tuple[float, float, int]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def merged(chains: Sequence[Chain]) -> Iterator[Removal]:
    """Yield the removals of all chains by least effect per unit; among equals the later chain's come first."""
    curves = (
        ([*accumulate(len(removal.units) for removal in chain)], [removal.effect for removal in chain])
        for chain in chains
    )
    for number, edge in edges_by_slope(curves):
        yield from chains[number][edge.start : edge.end]
