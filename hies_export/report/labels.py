"""Find room for the names of points in a picture: beside the point, off the other points and names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

Place = tuple[float, float]
Segment = tuple[float, float, float, float]

# Text size on a narrow screen, the largest case, in units of the SVG; lines are a fifth further apart.
TEXT = 19
LINE = 23
# Where a name stands: how far its near edge is from the point to the right and below, and which part of it that is.
_SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (0.8, -0.8), (-0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
_AWAY = (13, 30, 52)
_ANCHORS = {-1: "end", 0: "middle", 1: "start"}
# What it costs to cover a point or a name, to cross a line, to stand further away and on a later side.
# A name that is nearer to another point seems to belong to that one, unless a line leads to its own.
_COVERS, _CROSSES, _FAR, _SIDE, _MISREAD = 100.0, 1.0, 0.12, 0.15, 20.0


class Area(NamedTuple):
    """A rectangle in units of the SVG."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Area) -> bool:
        """Return whether two rectangles share a place."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def has(self, place: Place) -> bool:
        """Return whether a place lies within."""
        return self.left < place[0] < self.right and self.top < place[1] < self.bottom

    def away(self, place: Place) -> float:
        """Return the distance to a place; 0 within."""
        across = max(self.left - place[0], place[0] - self.right, 0.0)
        return math.hypot(across, max(self.top - place[1], place[1] - self.bottom, 0.0))


class Label(NamedTuple):
    """Lines of text: the place of the first one, the end of it at that place, and a thin line to a distant point."""

    x: float
    y: float
    anchor: str
    lines: tuple[str, ...]
    area: Area
    leader: Segment | None


def text_width(text: str) -> float:
    """Return about how wide a text is, in units of the SVG."""
    return 0.58 * TEXT * len(text)


def place_labels(
    points: Sequence[Place], texts: Sequence[tuple[str, ...]], *, within: Area, lines: Sequence[Segment]
) -> list[Label | None]:
    """Return the place of each point's text, None if it is empty; the first points matter most.

    Every text takes the cheapest place beside the placed ones, in three rounds. Among those that then cover something,
    the last ones move. They keep their text if there is room, else its first line, else a number, from 1, where it
    covers least.
    """
    discs = [Area(x - 8, y - 8, x + 8, y + 8) for x, y in points]
    crossed = [place for line in lines for place in _along(line)]
    found: list[Label | None] = [None] * len(points)

    def priced(number: int, text: tuple[str, ...]) -> list[tuple[Label, float]]:
        own, choices = points[number], []
        for label, price in _candidates(own, text, within):
            nearer = any(label.area.away(point) < label.area.away(own) for point in points)
            choices.append((label, _cost(label, discs, crossed) + price + _MISREAD * (nearer and not label.leader)))
        return choices

    def others(number: int) -> list[Area]:
        return [label.area for place, label in enumerate(found) if label is not None and place != number]

    def settle(number: int, choices: Sequence[tuple[Label, float]]) -> None:
        taken = others(number)
        costs = [price + _COVERS * sum(map(label.area.meets, taken)) for label, price in choices]
        found[number] = choices[costs.index(min(costs))][0] if choices else None

    def give_way(number: int) -> None:
        label = found[number]
        if label is not None and any(map(label.area.meets, [*others(number), *discs])):
            found[number] = None

    named = {number: priced(number, text) for number, text in enumerate(texts) if text}
    for _, (number, choices) in itertools.product(range(3), named.items()):
        settle(number, choices)
    for number in reversed(named):
        give_way(number)
    for number, shown in itertools.product(named, (slice(None), slice(1))):
        if found[number] is None:
            settle(number, priced(number, texts[number][shown]))
            give_way(number)
    for count, number in enumerate([number for number in named if found[number] is None], 1):
        settle(number, priced(number, (str(count),)))
    return found


def _candidates(point: Place, text: tuple[str, ...], within: Area) -> list[tuple[Label, float]]:
    """Return the places of a text within the picture, with the cost of each by itself."""
    width, height = max(map(text_width, text), default=0.0), LINE * (len(text) - 1) + TEXT
    found = []
    for away, (rank, (right, down)) in itertools.product(_AWAY, enumerate(_SIDES)):
        if not text:
            break
        near = point[0] + away * right, point[1] + away * down
        side, fall = (right > 0) - (right < 0), (down > 0) - (down < 0)
        left = near[0] - width * (1 - side) / 2
        top = near[1] - height * (1 - fall) / 2
        area = Area(left, top, left + width, top + height)
        if within.left <= left and area.right <= within.right and within.top <= top and area.bottom <= within.bottom:
            leader = (*point, *near) if away > _AWAY[0] else None
            label = Label(near[0], top + 0.78 * TEXT, _ANCHORS[side], text, area, leader)
            found.append((label, _SIDE * rank + _FAR * (away - _AWAY[0])))
    return found


def _cost(label: Label, discs: Sequence[Area], crossed: Sequence[Place]) -> float:
    """Return the cost of covering these points and lines; a leader must not run over a point either."""
    through = () if label.leader is None else _along(label.leader)[2:]
    covered = sum(map(label.area.meets, discs)) + sum(disc.has(place) for disc in discs for place in through)
    return _COVERS * covered + _CROSSES * sum(map(label.area.has, crossed))


def _along(line: Segment) -> list[Place]:
    """Return places along a line, eight units apart."""
    x, y, to_x, to_y = line
    steps = max(1, round(max(abs(to_x - x), abs(to_y - y)) / 8))
    return [(x + (to_x - x) * step / steps, y + (to_y - y) * step / steps) for step in range(steps + 1)]
