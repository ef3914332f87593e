"""The maps of which units stay: a mark for every head, and a bar for the neurons of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..kinds import ATTENTION, MLP, UNIT_NAMES
from ..values import PruningPlan
from .details import NeuronCount
from .report import Report

KEPT, CUT = "■", "·"
BAR_WIDTH = 24


class Line(NamedTuple):
    """A module in a map as text: its name, its marks, and how many of its units stay."""

    module: str
    marks: str
    kept: int
    total: int


@dataclass(frozen=True)
class UnitMap:
    """Which units of every module stay, a mark each, and what was computed of each: module -> name -> numbers."""

    unit: str
    marks: Mapping[str, str]
    numbers: Mapping[str, Mapping[str, Sequence[float]]]

    @property
    def lines(self) -> list[Line]:
        """The map as text."""
        return [Line(name, " ".join(marks), marks.count(KEPT), len(marks)) for name, marks in self.marks.items()]


@dataclass(frozen=True)
class UnitBars:
    """How many units of every module stay and there were, where there are too many for a mark each."""

    unit: str
    counts: Mapping[str, NeuronCount]

    @property
    def lines(self) -> list[Line]:
        """The bars as text, `BAR_WIDTH` marks long."""
        return [Line(name, _bar(of.kept, of.total), of.kept, of.total) for name, of in self.counts.items()]


Map = UnitMap | UnitBars


def head_map(plan: PruningPlan) -> dict[str, str]:
    """Return one mark per head of every attention module: ■ kept, · cut."""
    return {
        name: "".join(CUT if head in removed else KEPT for head in range(kept.total))
        for name, kept in plan.of_kind(ATTENTION).items()
        for removed in (set(kept.removed),)
    }


def neuron_counts(plan: PruningPlan) -> dict[str, NeuronCount]:
    """Return how many neurons of every feed-forward block stay."""
    return {name: NeuronCount(len(kept.units), kept.total) for name, kept in plan.of_kind(MLP).items()}


def unit_maps(report: Report) -> tuple[Map, ...]:
    """Return a map for every kind of unit that the run could remove. Every rendering draws all of them."""
    return _maps(report.details.head_map, report.details.heads, report.details.neurons)


def plan_maps(plan: PruningPlan) -> tuple[Map, ...]:
    """Return a map for every kind of unit that a plan covers."""
    return _maps(head_map(plan), {}, neuron_counts(plan))


def _maps(
    marks: Mapping[str, str],
    numbers: Mapping[str, Mapping[str, Sequence[float]]],
    neurons: Mapping[str, NeuronCount],
) -> tuple[Map, ...]:
    maps: list[Map] = []
    if marks:
        maps.append(UnitMap(UNIT_NAMES[ATTENTION], marks, numbers))
    if neurons:
        maps.append(UnitBars(UNIT_NAMES[MLP], neurons))
    return tuple(maps)


def _bar(kept: int, total: int) -> str:
    """Return a bar of marks; a mark is cut where any unit is cut, and one is kept where any unit stays."""
    full = BAR_WIDTH * kept // total
    if kept:
        full = max(full, 1)
    return KEPT * full + CUT * (BAR_WIDTH - full)
