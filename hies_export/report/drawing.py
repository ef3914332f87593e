"""The smaller figures of the pages: maps and bars, which the templates draw as grids, and curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..forms.measured import LatencyRow
from .canvas import ACCENT, CARD, LINE, MUTED, SECOND, canvas, for_page
from .maps import CUT, NeuronCount


class UnitCell(NamedTuple):
    """A unit in a map: how full its cell is, from 0 to 1, and whether it was cut."""

    shade: float
    cut: bool


@dataclass(frozen=True)
class MapFigure:
    """A map of all units, layers down and units across; `kind` is its CSS class.

    `ends` are the numbers of an empty and of a full cell; empty for the plan.
    """

    kind: str
    title: str
    note: str
    rows: Sequence[Sequence[UnitCell]]
    ends: tuple[str, ...] = ()

    @property
    def widest(self) -> int:
        """Units of the layer that has most."""
        return max(len(row) for row in self.rows)


class Bar(NamedTuple):
    """The bar of a layer: the share of its units that stay, the text beside it, and its tooltip."""

    share: float
    text: str
    note: str


@dataclass(frozen=True)
class BarFigure:
    """A bar per layer, layers down; None leaves a row free. `text_width` is that of the longest text."""

    title: str
    note: str
    rows: Sequence[Bar | None]
    text_width: int


class Dot(NamedTuple):
    """A measured point of a curve; the one that was chosen is drawn larger."""

    x: float
    y: float
    chosen: bool
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """The axis of shares of the dense model's, from 0 to `high`, at least 1; all bars of a chart have the same."""

    high: float

    def __call__(self, share: float) -> float:
        """Return a place in percent of the width; values outside are at the end."""
        return 100 * min(max(share, 0.0), self.high) / self.high

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places of at most nine round shares, and the shares as text."""
        step = next(s * 10**power for power in range(-1, 20) for s in (2, 5, 10) if self.high / (s * 10**power) <= 8)
        shares = [step * number for number in range(int(self.high / step) + 1)]
        return [(self(share), f"{share:.3g}") for share in shares]


@dataclass(frozen=True)
class Curve:
    """A curve with its measured points.

    `axis` is the text at both ends of the axis, which ends at `most` and has numbers at `ticks`. `kind` is the CSS
    class: stability has a colour of its own. `chosen` is where the choice is marked, `band` the ends of a shaded band.
    """

    label: str
    line: Sequence[tuple[float, float]]
    dots: Sequence[Dot]
    axis: tuple[str, str]
    kind: str = ""
    ticks: Sequence[float] = ()
    chosen: float | None = None
    band: Sequence[float] = ()
    most: float = 1.0


def draw_curve(curve: Curve) -> str:
    """Return a curve as an SVG element."""
    colour, values = SECOND if curve.kind == "stability" else ACCENT, [*(dot.y for dot in curve.dots), *curve.band]
    height = 160 if curve.ticks else 140
    with canvas(400, height, size=13, within=(50, 52, 16, 14)) as drawn:
        axes = drawn.axes
        axes.tick_params("x", length=3 if curve.ticks else 0, color=LINE)
        axes.set_xticks(curve.ticks, [f"{tick:g}" for tick in curve.ticks])
        ends = sorted({min(values), max(values)})
        axes.set_yticks(ends, [f"{end:.3g}" for end in ends])
        axes.tick_params("y", pad=8)
        if curve.band:
            axes.axhspan(min(curve.band), max(curve.band), color=colour, alpha=0.13, lw=0)
        if curve.chosen is not None:
            axes.axvline(curve.chosen, color=MUTED, lw=1, ls=(0, (3, 4)), zorder=0)
        axes.plot(*zip(*curve.line, strict=True), color=colour, lw=1.5, clip_on=False)
        for dot in curve.dots:
            gid = drawn.gid("chosen" if dot.chosen else "dot", dot.note)
            size = {"ms": 11, "mec": CARD, "mew": 1.5} if dot.chosen else {"ms": 5}
            axes.plot(dot.x, dot.y, "o", color=colour, gid=gid, clip_on=False, zorder=3, **size)
        axes.set(xlim=(0, curve.most), ylim=(ends[0], ends[-1]) if len(ends) > 1 else (ends[0] - 1, ends[0] + 1))
        drawn.figure.text(50 / 400, 8 / height, curve.axis[0])
        drawn.figure.text(384 / 400, 8 / height, curve.axis[1], ha="right")
        return drawn.svg(f"plot {curve.kind}".strip(), curve.label)


def page_curve(curve: Curve) -> str:
    """Return a curve in the colours of a page."""
    return for_page(draw_curve(curve))


def plan_figure(marks: Mapping[str, str]) -> MapFigure:
    """Return the map of which units stay."""
    rows = [[UnitCell(float(mark != CUT), mark == CUT) for mark in line] for line in marks.values()]
    return MapFigure("plan", "Plan", "filled: kept; crossed: cut", rows)


def number_figure(
    marks: Mapping[str, str], numbers: Mapping[str, Sequence[float]], kind: str, *, title: str, note: str
) -> MapFigure | None:
    """Return the map of a number of every unit, between its smallest and largest; None without numbers."""
    values = [list(numbers.get(module, ())) for module in marks]
    if not any(values):
        return None
    low, high = min(v for row in values for v in row), max(v for row in values for v in row)
    shades = [[(value - low) / (high - low or 1) for value in row] for row in values]
    return MapFigure(kind, title, note, shaded(marks, shades), (f"{low:.2g}", f"{high:.2g}"))


def shaded(marks: Mapping[str, str], shades: Sequence[Sequence[float]]) -> list[list[UnitCell]]:
    """Return the cells of a map from a number in [0, 1] per unit; a module without numbers has empty ones."""
    return [
        [UnitCell(row[unit] if unit < len(row) else 0.0, mark == CUT) for unit, mark in enumerate(line)]
        for line, row in zip(marks.values(), shades, strict=True)
    ]


def neuron_bars(counts: Mapping[str, NeuronCount], *, beside: Iterable[str] = ()) -> BarFigure | None:
    """Return the bars of the neurons, each at the height of its layer in the map `beside` them; None without neurons.

    If layers do not match, the bars are placed one below the other.
    """
    if not counts:
        return None
    totals = {count.total for count in counts.values()}
    drawn = []
    for module, count in counts.items():
        share, text = count.kept / count.total, f"{count.kept:,} of {count.total:,}"
        note = f"{module}: {text} neurons kept ({share:.0%})"
        drawn.append(Bar(share, f"{count.kept:,}" if len(totals) == 1 else text, note))
    others = list(beside)
    rows: list[Bar | None] = list(drawn)
    if places := _places(list(counts), others):
        at = dict(zip(places, drawn, strict=True))
        rows = [at.get(place) for place in range(len(others))]
    every = f" of {totals.pop():,} in every layer" if len(totals) == 1 else ""
    return BarFigure("Neurons", f"kept{every}; grey: cut", rows, 8 + 7 * max(len(bar.text) for bar in drawn))


def _places(modules: Sequence[str], beside: Sequence[str]) -> list[int]:
    """Return for each module the row of its layer: the one whose name shares the longest beginning.

    Nothing if two modules share a row or their order differs.
    """
    if not beside:
        return []
    places = []
    for module in modules:
        alike = [_parts_alike(module, other) for other in beside]
        places.append(alike.index(max(alike)))
    ascending = all(first < second for first, second in itertools.pairwise(places))
    return places if ascending else []


def _parts_alike(first: str, second: str) -> int:
    """Return how many parts two dotted names have in common at their beginnings."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def latency_scale(rows: Sequence[LatencyRow]) -> Scale:
    """Return the scale that all rows share."""
    ends = [end for row in rows if not row.noisy for end in (row.ratio_high, row.control_high)]
    # One noisy row must not squeeze all the others.
    ends += [min(end, 1.5) for row in rows if row.noisy for end in (row.ratio_high, row.control_high)]
    return Scale(max(1.05, *ends) + 0.01 if ends else 1.06)
