"""Draw the picture of agreement against time: a point for every measured form, and the frontier."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..evaluate.metrics import title_of
from ..forms.judged import Judged, frontier
from ..forms.time import deciding_step, relative_times
from .drawing import CARD, INK, LINE, MARKERS, MUTED, Drawing, canvas, colour_of, for_page, place_names
from .report import Report
from .words import form_kept, form_name, form_runtime, form_step, is_own, keeps_metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ends = tuple[float, float]

# Widths of the picture on a wide and on a narrow screen, in units of the SVG.
WIDTH, NARROW = 600, 340
_PROMISE: dict[str, Any] = {"color": MUTED, "lw": 1, "ls": (0, (3, 4))}
# With a promise, the vertical axis ends where this many times the allowed predictions differ; worse points are below.
_WORST = 5


class Measured(NamedTuple):
    """A model on some runtime: its time and agreement, as shares of the dense model's, with their intervals."""

    name: tuple[str, ...]  # lines of text beside its point; without them, the point has no intervals either
    time: float
    same: float
    time_ends: Ends
    same_ends: Ends
    kind: str  # CSS class
    shape: int  # number of its mark
    note: str  # tooltip
    chosen: bool = False
    series: tuple[str, ...] = ()  # a thin line joins the points of a series; the first name is that of the line


class Shape(NamedTuple):
    """What a mark in the legend means; `kind` and `shape` are as in `Measured`."""

    kind: str
    shape: int
    text: str


@dataclass(frozen=True)
class FrontierFigure:
    """Agreement upwards, time to the right."""

    found: Sequence[Measured]
    across: str  # name of the axis of time
    upwards: str  # name of the axis of agreement
    shapes: Sequence[Shape] = ()  # what marks mean, for the legend
    interval: str = "95 % interval"  # what bars mean, for the legend
    promise: float | None = None  # the promised agreement

    @property
    def text(self) -> str:
        """The frontier in words."""
        notes = "; ".join(self.found[number].note for number in self.best)
        return f"{self.upwards} against {self.across}. The frontier: {notes}"

    @property
    def best(self) -> list[int]:
        """The indices of the points of the frontier in `found`, fastest first."""
        return frontier([point.time for point in self.found], [point.same for point in self.found])

    @property
    def least(self) -> float:
        """The least agreement that the axis must show: that of every point, unless it is far below the promise."""
        promise = 1.0 if self.promise is None else self.promise
        floor = 0.0 if self.promise is None else 1 - _WORST * (1 - promise)
        lows = [point.same_ends[0] if point.name else point.same for point in self.found if point.same >= floor]
        return min(*lows, promise, 0.999)  # below 1, so that the axis has a length


def frontier_figure(report: Report, others: Sequence[Measured] = ()) -> FrontierFigure | None:
    """Return the picture of a report's forms, and of other tools' models; None without forms, or if all are noisy.

    Times are those at the shape that decided what to deploy; without a deployment, at the first that is not noisy.
    """
    forms, deployment = report.details.forms, report.details.deployment
    step = deciding_step(forms[0].times) if forms else None
    if step is None:
        return None
    if deployment is not None:
        step = deployment.step
    word, tolerance = report.details.stability_of, report.details.stability_tolerance
    dense = f"{forms[0].model} {forms[0].bits}"
    chosen = None if deployment is None else deployment.form
    runtimes = list(dict.fromkeys(map(form_runtime, forms)))
    upwards = f"same {word}s as {dense}" if tolerance is None else f"{word}s within {tolerance:g} of {dense}'s"
    if of_metric := keeps_metric(report):
        metric = report.quality.metric
        # Own rankings are a share already.
        upwards = title_of(metric) if is_own(metric) else f"{title_of(metric)}, share of {dense}'s"
    timed = [(number, form) for number, form in enumerate(forms) if step < len(form.times)]
    times = relative_times([form.times for _, form in timed], step)
    kept = [min(1.0, max(0.0, form_kept(report, form))) for _, form in timed]
    measured = [
        Measured(
            name=(f"{form.model} {form.bits}", *([f"{time:.2f} of the time"] if number == chosen else ())),
            time=time,
            same=same,
            time_ends=(form.times[step].ratio_low, form.times[step].ratio_high),
            same_ends=(same, same) if of_metric else _same_ends(form),
            kind="other" if form.model == "dense" else "slim",
            shape=runtimes.index(form_runtime(form)),
            note=f"{form_name(form, forms)}: {time:.2f} of the time, {same:.1%} {'kept' if of_metric else 'same'}",
            chosen=number == chosen,
        )
        for (number, form), time, same in zip(timed, times, kept, strict=True)
    ]
    return FrontierFigure(
        [*measured, *(other._replace(shape=len(runtimes)) for other in others)],
        shapes=[
            *(Shape("other", number, name) for number, name in enumerate(runtimes)),
            *([Shape("peer", len(runtimes), "another tool")] if others else []),
        ],
        promise=None if deployment is None else deployment.promise,
        across=f"time, share of {dense}'s at {form_step(forms[0].times[step])}".replace(" x ", " × "),
        upwards=upwards,
    )


def _same_ends(form: Judged) -> Ends:
    """Return the interval of a form's agreement; an unknown end is the agreement itself."""
    low, high = form.stability_low, form.stability_high
    return form.stability if low is None else low, form.stability if high is None else high


def draw_frontier(figure: FrontierFigure, *, width: int = WIDTH) -> str:
    """Return agreement against time with its legend, as an SVG element of class "frontier wide", or "narrow"."""
    narrow = width < WIDTH
    with canvas(width, 400, size=13, within=(66, 52, 18, 68)) as drawn:
        axes = drawn.axes
        lowest = _draw_axes(drawn, figure, ticks=4 if narrow else 8)

        def line(name: str, places: Sequence[Ends], *, series: str = "", **style: Any) -> None:
            axes.plot(*zip(*places, strict=True), gid=drawn.gid(name, series=series), clip_on=False, **style)

        # A point below the axis is drawn on its lower end; its text says its own agreement.
        placed = [(point, (point.time, max(point.same, lowest))) for point in figure.found]
        for series in dict.fromkeys(point.series for point in figure.found if point.series):
            members = sorted((place, point.kind) for point, place in placed if point.series == series)
            places, kinds = zip(*members, strict=True)
            line("trail", places, series=series[0], color=colour_of(kinds[0]), lw=1, alpha=0.5)
        best = [placed[number][1] for number in figure.best]
        line("best", best, color=INK, lw=2, alpha=0.8)
        crossed = [best, best]  # twice, so that names avoid the frontier more than other lines
        for point, (time, same) in placed:
            if point.name:
                low, high = (max(end, lowest) for end in point.same_ends)
                for whisker in [(end, same) for end in point.time_ends], [(time, low), (time, high)]:
                    line("whisker", whisker, color=MUTED, lw=1, alpha=0.7)
                    crossed.append(whisker)
        for point, place in placed:
            gid = drawn.gid(f"mark {point.kind}", point.note, point.series[0] if point.series else "")
            style = {"color": colour_of(point.kind), "mec": CARD, "mew": 0.7, "ms": 11 if point.chosen else 8}
            axes.plot(*place, MARKERS[point.shape % len(MARKERS)], gid=gid, clip_on=False, zorder=4, **style)
        names = []
        for point, place in sorted(placed, key=lambda pair: not pair[0].chosen):  # the chosen one is named first
            if point.name:
                gid = drawn.gid("name best" if point.chosen else "name")
                style = {"color": INK, "weight": "bold" if point.chosen else "normal", "zorder": 5}
                names.append(axes.text(*place, _text(point, below=point.same < lowest), gid=gid, **style))
        numbered = place_names(axes, [place for _, place in placed], names, crossed)
        _legend(drawn.figure, figure, numbered, columns=1 if narrow else 3)
        return drawn.svg(f"frontier {'narrow' if narrow else 'wide'}", figure.text, tight=True)


def _draw_axes(drawn: Drawing, figure: FrontierFigure, *, ticks: int) -> float:
    """Draw the axes, that of times with about so many ticks, and the promise; return the least agreement shown."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes, round_numbers = drawn.axes, [1, 2, 5, 10]
    axes.tick_params(pad=7)
    axes.grid(axis="y", color=LINE, lw=1)
    shares = MaxNLocator(4, steps=round_numbers).tick_values(figure.least, 1.0)
    axes.set_yticks([share for share in shares if -1e-9 <= share <= 1 + 1e-9])
    lowest: float = axes.get_yticks()[0]
    times = [point.time for point in figure.found]
    first = max(0.0, math.floor(10 * (min(0.9, *times) - 0.05)) / 10)
    last = max(1.0, *times, *(point.time_ends[1] for point in figure.found if point.name))
    axes.set(xlim=(first, last), ylim=(lowest, 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=round_numbers))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g} %"))
    axes.set_xlabel(figure.across, loc="right")
    drawn.figure.text(0, 1, figure.upwards, va="top")
    if figure.promise is not None:
        axes.axhline(figure.promise, **_PROMISE)
    return lowest


def page_frontier(figure: FrontierFigure) -> str:
    """Return the picture for a page, which shows the first of two on a wide screen and the other on a narrow one."""
    return for_page(draw_frontier(figure) + draw_frontier(figure, width=NARROW))


def _legend(drawn: Figure, figure: FrontierFigure, numbered: Sequence[tuple[int, str]], *, columns: int) -> None:
    """Draw the legend below the axes, and below it a list of the numbered points' names."""
    from matplotlib.lines import Line2D

    entries = [
        (Line2D([], [], color=colour_of(shape.kind), marker=MARKERS[shape.shape % len(MARKERS)], ls=""), shape.text)
        for shape in (figure.shapes if len(figure.shapes) > 1 else ())
    ]
    entries.append((Line2D([], [], color=INK, lw=2, alpha=0.8), "frontier"))
    entries.append((Line2D([], [], color=MUTED, marker="+", ms=13, ls=""), figure.interval))
    if figure.promise is not None:
        entries.append((Line2D([], [], **_PROMISE), f"{100 * figure.promise:g} % promised, on held-out rows"))
    place = {"loc": "upper left", "frameon": False, "borderpad": 0, "borderaxespad": 0, "handlelength": 1.6}
    handles, words = zip(*entries, strict=True)
    first = drawn.legend(handles, words, bbox_to_anchor=(0, -0.02), ncols=columns, columnspacing=1.4, **place)
    if numbered:
        below = (first.get_window_extent().y0 - 8) / drawn.bbox.height
        texts = [textwrap.fill(f"{number}  {', '.join(text.splitlines())}", 46) for number, text in numbered]
        drawn.legend(
            [Line2D([], [], ls="")] * len(texts), texts, bbox_to_anchor=(0, below), **{**place, "handlelength": 0}
        )


def _text(point: Measured, *, below: bool) -> str:
    """Return the text beside a point; if the point is `below` the axis, with its agreement."""
    first = f"{point.name[0]} ↓ {100 * point.same:.0f} %" if below else point.name[0]
    return "\n".join([first, *point.name[1:]])
