"""Lay out the picture of agreement against time: a point for every measured form, and the frontier."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .details import Form, deciding_step, relative_times
from .labels import LINE, TEXT, Area, Label, Place, Segment, place_labels, text_width
from .report import Report
from .rows import form_name, form_step
from .text import runtime_name

Ends = tuple[float, float]

WIDTH = 600
# The axes, in units of the SVG. Above them is the name of the upright one and room for names of points at 100 %.
AXES = Area(84, 78, 586, 390)
# If something is promised, the vertical axis ends where five times as many answers differ; the rest lies below.
_WORST = 5


class Measured(NamedTuple):
    """A model on some runtime: its time and agreement, as shares of the dense model's, with their intervals.

    Attributes:
        name: Lines of text beside its point; without them the point has no intervals either.
        kind: CSS class: this package's or another tool's.
        shape: Number of its mark.
        note: Tooltip of the point.
        series: A thin line joins the points of a series; its first name is that of the line.
    """

    name: tuple[str, ...]
    time: float
    same: float
    time_ends: Ends
    same_ends: Ends
    kind: str
    shape: int
    note: str
    chosen: bool = False
    series: tuple[str, ...] = ()


class Mark(NamedTuple):
    """A point: its place, its CSS class, the number of its shape, its intervals, its note and the name of its line."""

    x: float
    y: float
    kind: str
    shape: int
    whiskers: Sequence[Segment]
    note: str
    chosen: bool
    of: str


class Trail(NamedTuple):
    """A thin line: its CSS class, its name and its places."""

    kind: str
    of: str
    places: Sequence[Place]


class Shape(NamedTuple):
    """What a mark in the legend means: its CSS class and the number of its shape, and the text."""

    kind: str
    shape: int
    text: str


class Key(NamedTuple):
    """An entry of the legend: its place, its text, and what stands before it: a mark, or a sample or number by name."""

    x: float
    y: float
    sample: Shape | str
    text: str


@dataclass(frozen=True)
class FrontierFigure:
    """Agreement upwards, time to the right.

    Attributes:
        line: The frontier, from the fastest on.
        labels: Names of points, or their numbers in the legend.
        promise: Height of the promised agreement.
        across, upwards: Names of the axes.
        text: The frontier in words.
        height: Of the whole, with the legend.
    """

    marks: Sequence[Mark]
    trails: Sequence[Trail]
    line: Sequence[Place]
    labels: Sequence[tuple[Label, str]]
    keys: Sequence[Key]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    promise: float | None
    across: str
    upwards: str
    text: str
    height: float
    axes: ClassVar[Area] = AXES
    width: ClassVar[int] = WIDTH
    spacing: ClassVar[int] = LINE


def frontier_figure(report: Report, others: Sequence[Measured] = ()) -> FrontierFigure | None:
    """Return the picture of a report's forms, and of other tools' models, at the deciding shape.

    None if there are no forms, or all times are noisy.
    """
    forms, found = report.details.forms, report.details.deployment
    step = deciding_step(forms)
    if step is None:
        return None
    word, tolerance = report.details.stability_of, report.details.stability_tolerance
    dense = f"{forms[0].model} {forms[0].bits}"
    chosen = None if found is None else found.form
    runtimes = list(dict.fromkeys(map(_runtime, forms)))
    measured = [
        Measured(
            name=(f"{form.model} {form.bits}", *([f"{time:.2f} of the time"] if number == chosen else ())),
            time=time,
            same=form.stability,
            time_ends=(form.times[step].ratio_low, form.times[step].ratio_high),
            same_ends=_same_ends(form),
            kind="other" if form.model == "dense" else "slim",
            shape=runtimes.index(_runtime(form)),
            note=f"{form_name(form, forms)}: {time:.2f} of the time, {form.stability:.1%} same",
            chosen=number == chosen,
        )
        for number, (form, time) in enumerate(zip(forms, relative_times(forms, step), strict=True))
    ]
    return place_frontier(
        [*measured, *(one._replace(shape=len(runtimes)) for one in others)],
        shapes=[
            *(Shape("other", number, name) for number, name in enumerate(runtimes)),
            *([Shape("peer", len(runtimes), "another tool")] if others else []),
        ],
        promise=None if found is None else found.promise,
        across=f"time, share of {dense}'s at {form_step(forms[0].times[step])}".replace(" x ", " × "),
        upwards=f"same {word}s as {dense}" if tolerance is None else f"{word}s within {tolerance:g} of {dense}'s",
    )


def _runtime(form: Form) -> str:
    return runtime_name(form.runtime.removesuffix("-int8"))


def _same_ends(form: Form) -> Ends:
    """Return the interval of a form's agreement; an unknown end is the agreement itself."""
    low, high = form.stability_low, form.stability_high
    return form.stability if low is None else low, form.stability if high is None else high


def frontier(found: Sequence[Measured]) -> list[int]:
    """Return those that no other beats in time without losing agreement, fastest first."""
    best, line = -1.0, []
    for number in sorted(range(len(found)), key=lambda number: (found[number].time, -found[number].same)):
        if found[number].same > best:
            best = found[number].same
            line.append(number)
    return line


def place_frontier(
    found: Sequence[Measured],
    *,
    across: str,
    upwards: str,
    shapes: Sequence[Shape] = (),
    interval: str = "95 % interval",
    promise: float | None = None,
) -> FrontierFigure:
    """Return the picture of everything that was measured; `shapes` and `interval` explain marks and bars."""
    scales = _Scales.of(found, promise)
    places = [(scales.right(one.time), scales.up(one.same)) for one in found]
    marks = [_mark(one, place, scales) for one, place in zip(found, places, strict=True)]
    best = frontier(found)
    line = [places[number] for number in best]
    segments = [(*start, *end) for start, end in itertools.pairwise(line)]
    labels, numbered = _labels(
        [(one, place, _text(one, below=one.same < scales.lowest)) for one, place in zip(found, places, strict=True)],
        lines=[*segments, *segments, *(part for mark in marks for part in mark.whiskers)],
    )
    samples: list[tuple[Shape | str, str]] = [(one, one.text) for one in shapes] if len(shapes) > 1 else []
    samples += [("frontier", "frontier"), ("interval", interval)]
    if promise is not None:
        samples.append(("promise", f"{100 * promise:g} % promised, on held-out rows"))
    keys, height = _legend(samples, numbered)
    return FrontierFigure(
        marks=marks,
        trails=[_trail(name, found, places) for name in dict.fromkeys(one.series for one in found if one.series)],
        line=line,
        labels=labels,
        keys=keys,
        x_ticks=scales.x_ticks,
        y_ticks=scales.y_ticks,
        promise=None if promise is None else scales.up(promise),
        across=across,
        upwards=upwards,
        text=f"{upwards} against {across}. The frontier: " + "; ".join(found[number].note for number in best),
        height=height,
    )


class _Scales(NamedTuple):
    """Where a time and an agreement go: the ends of both axes, and how far apart the numbers on the upright one are."""

    fastest: float
    slowest: float
    lowest: float
    step: float

    @classmethod
    def of(cls, found: Sequence[Measured], promise: float | None) -> _Scales:
        """Return axes that show every point, except those that agree far less than promised."""
        fastest = math.floor(10 * (min(0.9, *(one.time for one in found)) - 0.05)) / 10
        slowest = max(1.0, *(one.time for one in found), *(one.time_ends[1] for one in found if one.name))
        floor = 0.0 if promise is None else 1 - _WORST * (1 - promise)
        lows = [one.same_ends[0] if one.name else one.same for one in found if one.same >= floor]
        lost = max(1 - min([*lows, *([] if promise is None else [promise])]), 1e-3)
        steps = (base * 10.0**power for power in range(-4, 1) for base in (1, 2, 5))
        step = next(step for step in steps if lost / step <= 4)
        return cls(max(0.0, fastest), slowest, max(0.0, 1 - step * math.ceil(round(lost / step, 6))), step)

    def right(self, time: float) -> float:
        """Return the place of a time; times below the axis are put at its start."""
        share = (max(time, self.fastest) - self.fastest) / (self.slowest - self.fastest)
        return AXES.left + (AXES.right - AXES.left) * share

    def up(self, same: float) -> float:
        """Return the height of an agreement; those below the axis are put at its start."""
        share = (max(same, self.lowest) - self.lowest) / (1 - self.lowest)
        return AXES.bottom - (AXES.bottom - AXES.top) * share

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Places of at most eleven round times, and the times as text."""
        tenths = range(round(10 * self.fastest), math.floor(10 * self.slowest) + 1)
        apart = next(n for n in (1, 2, 5, 10, 20, 50, 100, 10**6) if self.slowest - self.fastest <= n)
        return [(self.right(tenth / 10), f"{tenth / 10:.1f}") for tenth in tenths if tenth % apart == 0]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Heights of at most five round agreements, and the agreements as text."""
        shares = [1 - number * self.step for number in range(round((1 - self.lowest) / self.step) + 1)]
        return [(self.up(share), f"{100 * share:.4g} %") for share in shares]


def _mark(one: Measured, place: Place, scales: _Scales) -> Mark:
    x, y = place
    (fast, slow), (low, high) = map(scales.right, one.time_ends), map(scales.up, one.same_ends)
    whiskers = [(fast, y, slow, y), (x, low, x, high)] if one.name else []
    return Mark(x, y, one.kind, one.shape, whiskers, one.note, one.chosen, one.series[0] if one.series else "")


def _labels(
    points: Sequence[tuple[Measured, Place, tuple[str, ...]]], *, lines: Sequence[Segment]
) -> tuple[list[tuple[Label, str]], list[tuple[str, str]]]:
    """Return where the texts of points stand, the chosen one's first, and the legend of those that are numbers."""
    points = sorted(points, key=lambda point: not point[0].chosen)
    _, places, texts = zip(*points, strict=True)
    within = Area(AXES.left - 4, LINE + 4, WIDTH - 4, AXES.bottom + LINE / 2)
    placed = place_labels(places, texts, within=within, lines=lines)
    labels = [(one, text, label) for (one, _, text), label in zip(points, placed, strict=True) if label is not None]
    numbered = [(label.lines[0], ", ".join(text)) for _, text, label in labels if label.lines[0] != text[0]]
    return [(label, "best" if one.chosen else "") for one, _, label in labels], numbered


def _trail(series: tuple[str, ...], found: Sequence[Measured], places: Sequence[Place]) -> Trail:
    """Return the line through the points of a series, from the fastest on."""
    members = sorted((place, one.kind) for one, place in zip(found, places, strict=True) if one.series == series)
    return Trail(members[0][1], series[0], [place for place, _ in members])


def _text(one: Measured, *, below: bool) -> tuple[str, ...]:
    """Return the lines of a name, with the agreement of a point below the axis."""
    return (f"{one.name[0]} ↓ {100 * one.same:.0f} %", *one.name[1:]) if one.name and below else one.name


def _legend(*parts: Sequence[tuple[Shape | str, str]]) -> tuple[list[Key], float]:
    """Return the entries of the legend below the axes, each part on lines of its own, and the height of the picture."""
    left, y, keys = 14.0, AXES.bottom + 2 * LINE + 12, []
    for part in filter(None, parts):
        x, y = left, y + LINE + 3
        for sample, text in part:
            width = 26 + text_width(text)
            if x > left and x + width > WIDTH:
                x, y = left, y + LINE + 3
            keys.append(Key(x, y, sample, text))
            x += width + TEXT
    return keys, y + 12
