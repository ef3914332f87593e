"""The picture of agreement against time: a numbered point for every measured form, and the frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..evaluate.metrics import title_of
from ..forms.judged import frontier
from ..forms.time import deciding_step, relative_times
from .drawing import ACCENT, CARD, INK, LINE, MUTED, canvas, svg_of
from .report import Report
from .words import agreement, form_kept, form_name, form_step, keeps_metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ends = tuple[float, float]

_PROMISE: dict[str, Any] = {"color": MUTED, "lw": 1, "ls": (0, (3, 4))}
# With a promise, the vertical axis ends where this many times the allowed predictions differ; worse points are below.
_WORST = 5


class Measured(NamedTuple):
    """A model on some runtime: its time and agreement, as shares of the dense model's, with their intervals."""

    name: str  # without a name, the point has neither a number nor intervals
    time: float
    same: float
    time_ends: Ends
    same_ends: Ends
    colour: str
    chosen: bool = False
    series: tuple[str, ...] = ()  # a thin line joins the points of a series; the first name is that of the line

    @property
    def text(self) -> str:
        """What the legend says of it."""
        return f"{self.name}: {self.time:.2f} of the time, {100 * self.same:.1f} %"


@dataclass(frozen=True)
class FrontierFigure:
    """Agreement upwards, time to the right."""

    found: Sequence[Measured]
    across: str  # name of the axis of time
    upwards: str  # name of the axis of agreement
    interval: str = "95 % interval"  # what bars mean, for the legend
    promise: float | None = None  # the promised agreement

    @property
    def best(self) -> list[Measured]:
        """The points of the frontier, fastest first."""
        numbers = frontier([point.time for point in self.found], [point.same for point in self.found])
        return [self.found[number] for number in numbers]

    @property
    def named(self) -> list[Measured]:
        """The points with a name, fastest first, in the order of their numbers."""
        return sorted((point for point in self.found if point.name), key=lambda point: point.time)

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
    dense, of_metric = f"{forms[0].model} {forms[0].bits}", keeps_metric(report)
    chosen = None if deployment is None else deployment.form
    timed = [(number, form) for number, form in enumerate(forms) if step < len(form.times)]
    times = relative_times([form.times for _, form in timed], step)
    kept = [min(1.0, max(0.0, form_kept(report, form))) for _, form in timed]
    measured = [
        Measured(
            name=form_name(form, forms),
            time=time,
            same=same,
            time_ends=(form.times[step].ratio_low, form.times[step].ratio_high),
            same_ends=(same, same) if of_metric else (form.stability_low, form.stability_high),
            colour=MUTED if form.model == "dense" else ACCENT,
            chosen=number == chosen,
        )
        for (number, form), time, same in zip(timed, times, kept, strict=True)
    ]
    return FrontierFigure(
        [*measured, *others],
        promise=None if deployment is None else deployment.promise,
        across=f"time, share of {dense}'s at {form_step(forms[0].times[step])}",
        upwards=f"{title_of(report.quality.metric)}, share of {dense}'s" if of_metric else agreement(report),
    )


def draw_frontier(figure: FrontierFigure) -> str:
    """Return agreement against time as an SVG file; the legend has the name and the numbers of every point."""
    with canvas(330, 210) as axes:
        lowest = _draw_axes(axes, figure)

        def place(point: Measured) -> tuple[float, float]:
            """Return where a point is drawn: one below the axis at its lower end."""
            return point.time, max(point.same, lowest)

        for series in dict.fromkeys(point.series for point in figure.found if point.series):
            members = sorted((point for point in figure.found if point.series == series), key=place)
            joined = {"color": members[0].colour, "lw": 1, "alpha": 0.5, "gid": f"trail|{series[0]}"}
            axes.plot(*zip(*map(place, members), strict=True), **joined)
        axes.plot(*zip(*map(place, figure.best), strict=True), color=INK, lw=1.5, alpha=0.8, clip_on=False, gid="best")
        for point in figure.named:
            time, same = place(point)
            low, high = (max(end, lowest) for end in point.same_ends)
            axes.hlines(same, *point.time_ends, color=MUTED, lw=1, alpha=0.7, gid="whisker")
            axes.vlines(time, low, high, color=MUTED, lw=1, alpha=0.7, gid="whisker")
        for point in figure.found:
            style = {"color": point.colour, "mec": CARD, "mew": 0.7, "ms": 9 if point.chosen else 6.5}
            gid = f"mark|{''.join(point.series[:1])}"
            axes.plot(*place(point), "o", clip_on=False, zorder=4, gid=gid, **style)
        _write_numbers(axes, [place(point) for point in figure.named])
        _draw_legend(axes, figure)
        notes = "; ".join(point.text for point in figure.best)
        return svg_of(axes, f"{figure.upwards} against {figure.across}. The frontier: {notes}")


def _draw_axes(axes: Axes, figure: FrontierFigure) -> float:
    """Draw the axes and the promise; return the least agreement shown."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    round_numbers = [1, 2, 5, 10]
    axes.grid(axis="y", color=LINE, lw=1)
    shares = MaxNLocator(4, steps=round_numbers).tick_values(figure.least, 1.0)
    axes.set_yticks([share for share in shares if -1e-9 <= share <= 1 + 1e-9])
    lowest: float = axes.get_yticks()[0]
    times = [point.time for point in figure.found]
    first = max(0.0, math.floor(10 * (min(0.9, *times) - 0.05)) / 10)
    last = max(1.0, *times, *(point.time_ends[1] for point in figure.named))
    axes.set(xlim=(first, last), ylim=(lowest, 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=round_numbers))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g} %"))
    axes.set_xlabel(figure.across, loc="right")
    axes.set_title(figure.upwards, loc="left", size="medium", color=MUTED, pad=22)
    if figure.promise is not None:
        axes.axhline(figure.promise, **_PROMISE)
    return lowest


def _write_numbers(axes: Axes, places: Sequence[tuple[float, float]]) -> None:
    """Write numbers from 1 beside points, given from left to right; where two would overlap, one text has both."""
    written: list[Any] = []
    for number, place in enumerate(places, 1):
        text = axes.annotate(f"{number}", place, (6, 4), textcoords="offset points", color=INK, zorder=5, gid="number")
        box = text.get_window_extent()
        if near := next((other for other in written if box.overlaps(other.get_window_extent())), None):
            near.set_text(f"{near.get_text()}, {number}")
            text.remove()
        else:
            written.append(text)


def _draw_legend(axes: Axes, figure: FrontierFigure) -> None:
    """Draw the legend below the axes: every numbered point, bold the chosen one, and what the lines mean."""
    from matplotlib.lines import Line2D

    entries = [
        (Line2D([], [], color=point.colour, marker="o", ls=""), f"{number}  {point.text}")
        for number, point in enumerate(figure.named, 1)
    ]
    entries.append((Line2D([], [], color=INK, lw=1.5, alpha=0.8), "frontier"))
    entries.append((Line2D([], [], color=MUTED, marker="+", ms=10, ls=""), figure.interval))
    if figure.promise is not None:
        entries.append((Line2D([], [], **_PROMISE), f"{100 * figure.promise:g} % promised, on held-out rows"))
    handles, words = zip(*entries, strict=True)
    below = {"loc": "upper left", "bbox_to_anchor": (0, -0.2), "frameon": False, "borderpad": 0, "handlelength": 1.6}
    legend = axes.legend(handles, words, **below)
    for text, point in zip(legend.get_texts(), figure.named, strict=False):
        text.set(weight="bold" if point.chosen else "normal", color=INK)
