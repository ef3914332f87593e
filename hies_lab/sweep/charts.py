"""Draw the curves of a sweep, and its picture of agreement against measured time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hies_export.evaluate.metrics import higher_is_better
from hies_export.forms.judged import frontier
from hies_export.kinds import ATTENTION
from hies_export.report.drawing import ACCENT, CARD, GREY, INK, LINE, MUTED, SECOND, canvas, svg_of
from hies_export.report.frontier import FrontierFigure, Measured

from .results import COMPENSATIONS, Row, budget_name, budget_of, budgets_of, deviation, line_name, percent, share_text

# The size of a chart's axes, in points.
WIDTH, HEIGHT = 260, 150
# Colours of lines, by number, and their marks.
SERIES = (ACCENT, SECOND, "#009e73", "#b8578f", "#b87a00", "#3f9bd1", INK, "#7a7972")
MARKERS = ("o", "s", "D", "^")
# Most lines with their own colour; more cannot be told apart.
COLOURED = 8
# Dashes of the SVG.
DASHES = {"attention": "2 4", "mlp": "7 4", "attention+mlp": ""}
# Beyond this ratio of the largest to the smallest, perplexities are drawn by their logarithm.
_LOGARITHMIC = 4.0


class Style(NamedTuple):
    """How a line is drawn: the number of its colour, from 0, or None for grey; and the dashes of SVG."""

    colour: int | None
    dash: str

    @property
    def kind(self) -> str:
        """CSS class of the colour."""
        return "rest" if self.colour is None else f"c{self.colour % COLOURED}"

    @property
    def hue(self) -> str:
        """The colour itself."""
        return GREY if self.colour is None else SERIES[self.colour % COLOURED]


class Point(NamedTuple):
    """A mean over seeds: its place on the axis, and one standard deviation up and down."""

    x: float
    y: float
    high: float
    low: float


class Line(NamedTuple):
    """One method: its name, how it is drawn, and its points from left to right."""

    name: str
    style: Style
    points: Sequence[Point]


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a chart: the place of a row, the numbers on it, and its name."""

    at: Callable[[Row], float]
    ticks: Sequence[tuple[float, str]]
    title: str


@dataclass(frozen=True)
class Chart:
    """Lines over an axis, grey ones first, so that the others lie above them.

    `dense` is the number of the dense model, if it has a line. No number exceeds `most`. Numbers that are far apart are
    drawn by their logarithm.
    """

    title: str
    axis: Axis
    lines: Sequence[Line]
    dense: float | None
    most: float
    logarithmic: bool


def line_styles(rows: Sequence[Row], *, most: int = COLOURED) -> dict[str, Style]:
    """Return how every line is drawn, the coloured ones first.

    A method has a colour. If rows differ in the kinds of modules, each kind has a dash. If there are too many methods,
    only HIES, HIS and those that keep most predictions have a colour. Beyond `COLOURED`, colours repeat with a dash.
    """
    lines = {line_name(row, rows): (line_name(row, [row]), row.get("modules") or ATTENTION) for row in rows}
    methods = list(dict.fromkeys(method for method, _ in lines.values()))
    several = len({modules for _, modules in lines.values()}) > 1
    most = COLOURED if several else most
    if len(methods) > most:
        kept = {m: _best_mean([r for r in rows if line_name(r, [r]) == m]) for m in methods}
        best = sorted(methods, key=lambda m: -kept[m])
        own = [next((m for m in best if m.partition(" ")[0] == name), "") for name in ("hies", "his")]
        own = [m for m in own if m and m not in best[: most - 2]]
        methods = [m for m in best if m in (*best[: most - len(own)], *own)]
    styles = {}
    for name, (method, modules) in lines.items():
        colour = methods.index(method) if method in methods else None
        again = "6 3" if colour is not None and colour >= COLOURED else ""
        styles[name] = Style(colour, DASHES.get(str(modules), "") if several else again)
    order = sorted(styles, key=lambda name: most if (colour := styles[name].colour) is None else colour)
    return {name: styles[name] for name in order}


def _best_mean(rows: Sequence[Row]) -> float:
    """Return the mean stability over budgets and seeds of the compensation that keeps most predictions."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["compensation"], []).append(row["stability"])
    return max(statistics.fmean(values) for values in found.values())


def budget_axis(rows: Sequence[Row]) -> Axis:
    """Return the axis of the budgets, deeper cuts on the right; below shares of heads, the FLOPs that are left."""
    name = budget_name(rows)
    ticks = []
    for budget in budgets_of(rows):
        flops = [r["flops_ratio"] for r in rows if budget_of(r) == budget and r["flops_ratio"] is not None]
        below = f"\n{100 * statistics.fmean(flops):.0f}" if flops and name == "heads removed" else ""
        ticks.append((_removed(budget, name), f"{100 * budget:g}{below}"))
    title = f"{name}, %" + ("; below: FLOPs left, %" if any("\n" in text for _, text in ticks) else "")
    return Axis(lambda row: _removed(budget_of(row), name), ticks, title)


def _removed(budget: float, name: str) -> float:
    return budget if name == "heads removed" else 1 - budget


def alpha_axis(rows: Sequence[Row]) -> Axis:
    """Return the axis of alpha."""
    alphas = sorted({row["alpha"] for row in rows})
    # At most seven numbers, evenly spread.
    shown = alphas[:: -(-len(alphas) // 7)]
    return Axis(lambda row: row["alpha"], [(a, f"{a:g}") for a in shown], "alpha (0: entropy alone)")


def time_axis(rows: Sequence[Row]) -> Axis:
    """Return the axis of the measured time, faster models on the left; a budget is at the mean of its times.

    It is in percent of the dense model's, and has round numbers.
    """
    times: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        times.setdefault(_timed_with(row), []).append(100 * row["latency_ratio"])
    means = {key: statistics.fmean(values) for key, values in times.items()}
    return Axis(lambda row: means[_timed_with(row)], (), "measured time, % of the dense model's")


def _timed_with(row: Row) -> tuple[str, str, float]:
    return line_name({**row, "modules": None}, [row]), f"{row.get('modules')} {row['compensation']}", budget_of(row)


def chart(
    rows: Sequence[Row],
    quantity: str,
    axis: Axis,
    styles: Mapping[str, Style],
    *,
    name: Callable[[Row], str],
) -> Chart:
    """Return the chart of "quality" or "stability"; rows whose line, by `name`, has no style are left out."""
    metric, dense = rows[0]["metric"], rows[0]["quality_dense"]
    scale = 100.0 if quantity == "stability" else percent(metric)
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if name(row) in styles:
            found.setdefault((name(row), axis.at(row)), []).append(row)
    lines = []
    for line, style in styles.items():
        points = [_point(alike, quantity, scale, at) for (of, at), alike in found.items() if of == line]
        if points:
            lines.append(Line(line, style, sorted(points, key=lambda point: point.x)))
    known = [value for line in lines for point in line.points if math.isfinite(value := point.y)]
    known += [dense * scale] * (quantity == "quality")
    far = min(known, default=0.0) > 0 and max(known) / min(known) > _LOGARITHMIC
    title = "predictions kept, %" if quantity == "stability" else metric + (", x 100" if scale > 1 else "")
    return Chart(
        title=title,
        axis=axis,
        lines=sorted(lines, key=lambda line: line.style.colour is not None),
        dense=dense * scale if quantity == "quality" else None,
        most=100.0 if quantity == "stability" else math.inf,
        logarithmic=far and quantity == "quality" and not higher_is_better(metric),
    )


def draw_chart(chart: Chart) -> str:
    """Return a chart as SVG, in which the id of what belongs to a line is a class, "|", and the line's name."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

    with canvas(WIDTH, HEIGHT) as axes:
        axes.grid(axis="y", color=LINE, lw=1)
        axes.set_xlabel(chart.axis.title, loc="left")
        low, high = _ends(chart)
        if chart.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set(major_formatter=StrMethodFormatter("{x:g}"), minor_formatter=NullFormatter())
        axes.xaxis.set(major_locator=MaxNLocator(6, steps=[1, 2, 5, 10]), major_formatter=StrMethodFormatter("{x:g}"))
        if chart.axis.ticks:
            axes.set_xticks(*zip(*chart.axis.ticks, strict=True))
        if chart.dense is not None:
            axes.axhline(chart.dense, color=INK, lw=2, ls=(0, (0.5, 2)), clip_on=False)
        for line in chart.lines:
            grey = line.style.colour is None
            colour = line.style.hue
            rest = {"alpha": 0.6 if grey else 1.0, "clip_on": False}
            # What is infinite, or no number, is drawn at an end.
            heights = np.nan_to_num([[p.y, p.high, p.low] for p in line.points], nan=low, posinf=high, neginf=low)
            x, (y, top, bottom) = [point.x for point in line.points], np.clip(heights, low, high).T
            if not grey and any(point.high != point.low for point in line.points):
                band = {"alpha": 0.12, "lw": 0, "gid": f"band|{line.name}", "clip_on": False}
                axes.fill_between(x, bottom, top, color=colour, **band)
            dash = (0, [float(n) / 2 for n in line.style.dash.split()]) if line.style.dash else "-"
            axes.plot(x, y, color=colour, lw=1 if grey else 2, ls=dash, gid=f"line|{line.name}", **rest)
            marker = "o" if grey else MARKERS[(line.style.colour or 0) % len(MARKERS)]
            size = {"ms": 4 if grey else 7, "mec": CARD, "mew": 0.7, "zorder": 3}
            axes.plot(x, y, marker, color=colour, gid=f"point|{line.name}", **size, **rest)
        axes.set_ylim(low, high)
        axes.margins(x=0.04)
        return svg_of(axes, f"{chart.title} by {chart.axis.title}")


def _ends(chart: Chart) -> tuple[float, float]:
    """Return the ends of the vertical axis, a little beyond the means."""
    heights = [point.y for line in chart.lines for point in line.points]
    heights += [] if chart.dense is None else [chart.dense]
    known = [y for y in heights if math.isfinite(y)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if chart.logarithmic:
        return low / 1.05, high * 1.05
    margin = 0.05 * (high - low) or 1.0
    return low - margin, min(high + margin, chart.most + 0.5)


def _point(rows: Sequence[Row], quantity: str, scale: float, x: float) -> Point:
    values = [row[quantity] * scale for row in rows]
    mean, spread = statistics.fmean(values), deviation(values) or 0.0
    high, low = mean + spread, mean - spread
    if quantity == "stability":
        high, low = min(high, 100.0), max(low, 0.0)
    return Point(x, mean, high, low)


def sweep_frontier(rows: Sequence[Row], styles: Mapping[str, Style]) -> FrontierFigure | None:
    """Return means over seeds; those on the frontier have names and intervals. None if nothing was timed.

    Intervals are one standard deviation of the agreement, and the hull of the times' 95 % intervals. Rows that are too
    noisy to compare are left out.
    """
    timed = [row for row in rows if row.get("latency_ratio") is not None and not row.get("latency_noisy")]
    if not timed:
        return None
    alike: dict[tuple[str, str, float], list[Row]] = {}
    for row in timed:
        alike.setdefault((line_name(row, rows), row["compensation"], budget_of(row)), []).append(row)
    several = len({compensation for _, compensation, _ in alike}) > 1
    found = [
        _measured(group, styles[line], (line, compensation), several=several)
        for (line, compensation, _), group in alike.items()
    ]
    dense = Measured("dense", 1.0, 1.0, (1.0, 1.0), (1.0, 1.0), MUTED)
    points = [dense, *found]
    best = frontier([one.time for one in points], [one.same for one in points])
    return FrontierFigure(
        [dense, *(one if number in best else one._replace(name="") for number, one in enumerate(found, 1))],
        across="measured time, share of the dense model's",
        upwards="same predictions as the dense model",
        interval="deviation over seeds; of times 95 %" if any(len(group) > 1 for group in alike.values()) else "95 %",
    )


def _measured(rows: Sequence[Row], style: Style, series: tuple[str, str], *, several: bool) -> Measured:
    """Return the mean of rows that differ only in the seed."""
    same, times = [row["stability"] for row in rows], [row["latency_ratio"] for row in rows]
    mean, time = statistics.fmean(same), statistics.fmean(times)
    spread = deviation(same) or 0.0
    return Measured(
        name=f"{series[0]}, {share_text(budget_of(rows[0]))}" + (f", {COMPENSATIONS[series[1]]}" if several else ""),
        time=time,
        same=mean,
        time_ends=(min(row["latency_low"] for row in rows), max(row["latency_high"] for row in rows)),
        same_ends=(max(mean - spread, 0.0), min(mean + spread, 1.0)),
        colour=style.hue,
        series=series,
    )
