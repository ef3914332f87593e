"""The maps of which units stay: a mark for every head, and a bar for the neurons of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..kinds import ATTENTION, MLP, UNIT_NAMES
from ..values import PruningPlan
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
    counts: Mapping[str, tuple[int, int]]

    @property
    def lines(self) -> list[Line]:
        """The bars as text, `BAR_WIDTH` marks long."""
        return [Line(name, _bar(kept, total), kept, total) for name, (kept, total) in self.counts.items()]


Map = UnitMap | UnitBars


def head_map(plan: PruningPlan) -> dict[str, str]:
    """Return one mark per head of every attention module: ■ kept, · cut."""
    return {
        name: "".join(CUT if head in removed else KEPT for head in range(kept.total))
        for name, kept in plan.of_kind(ATTENTION).items()
        for removed in (set(kept.removed),)
    }


def neuron_counts(plan: PruningPlan) -> dict[str, dict[str, int]]:
    """Return for every feed-forward block how many neurons stay, "kept", and how many there were, "total"."""
    return {name: {"kept": len(kept.units), "total": kept.total} for name, kept in plan.of_kind(MLP).items()}


def unit_maps(report: Report) -> tuple[Map, ...]:
    """Return a map for every kind of unit that the run could remove. Every rendering draws all of them."""
    details = report.details
    return _maps(details.get("head_map", {}), details.get("heads", {}), details.get("neurons", {}))


def plan_maps(plan: PruningPlan) -> tuple[Map, ...]:
    """Return a map for every kind of unit that a plan covers."""
    return _maps(head_map(plan), {}, neuron_counts(plan))


def _maps(
    marks: Mapping[str, str],
    numbers: Mapping[str, Mapping[str, Sequence[float]]],
    neurons: Mapping[str, Mapping[str, Any]],
) -> tuple[Map, ...]:
    maps: list[Map] = []
    if marks:
        maps.append(UnitMap(UNIT_NAMES[ATTENTION], marks, numbers))
    if neurons:
        counts = {name: (count["kept"], count["total"]) for name, count in neurons.items()}
        maps.append(UnitBars(UNIT_NAMES[MLP], counts))
    return tuple(maps)


def _bar(kept: int, total: int) -> str:
    """Return a bar of marks; a mark is cut where any unit is cut, and one is kept where any unit stays."""
    full = BAR_WIDTH * kept // total
    if kept:
        full = max(full, 1)
    return KEPT * full + CUT * (BAR_WIDTH - full)
