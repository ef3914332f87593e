"""The maps of which units stay, as text: a mark for every head, and a bar for the neurons of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from ..forms.measure.counts import Count
from ..kinds import ATTENTION, MLP, UNIT_NAMES
from ..select.plan import PruningPlan

KEPT, CUT = "■", "·"
BAR_WIDTH = 24


@dataclass(frozen=True)
class NeuronCount:
    """How many neurons of a feed-forward block stay, and how many it had."""

    kept: Count
    total: Annotated[Count, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.kept > self.total:
            raise ValueError(f"kept must be at most total, got {self.kept} of {self.total}")


class Line(NamedTuple):
    """A module in a map: its name, its marks, and how many of its units stay."""

    module: str
    marks: str
    kept: int
    total: int


class UnitMap(NamedTuple):
    """Which units of one kind stay, a line per module."""

    unit: str
    lines: Sequence[Line]


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


def plan_maps(plan: PruningPlan) -> list[UnitMap]:
    """Return a map for every kind of unit that a plan covers."""
    return unit_maps(head_map(plan), neuron_counts(plan))


def unit_maps(marks: Mapping[str, str], neurons: Mapping[str, NeuronCount]) -> list[UnitMap]:
    """Return a map for every kind of unit that could be removed. Every rendering draws all of them."""
    heads = [Line(name, " ".join(line), line.count(KEPT), len(line)) for name, line in marks.items()]
    blocks = [Line(name, bar(of), of.kept, of.total) for name, of in neurons.items()]
    return [UnitMap(UNIT_NAMES[kind], lines) for kind, lines in ((ATTENTION, heads), (MLP, blocks)) if lines]


def bar(count: NeuronCount) -> str:
    """Return a bar of marks; at least one mark is cut if any unit is cut, and one is kept if any unit stays."""
    full = BAR_WIDTH * count.kept // count.total
    if count.kept:
        full = max(full, 1)
    return KEPT * full + CUT * (BAR_WIDTH - full)
