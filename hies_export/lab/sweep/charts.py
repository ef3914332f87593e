"""Lay out the curves of a sweep's page. The template draws them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ...evaluate.metrics import higher_is_better
from ...kinds import ATTENTION
from .tables import Row, budget_name, budget_of, budgets_of, deviation, line_name, percent, share_text

# The drawing, in units of the SVG: its size, and the room around the curves.
WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 50
# Most lines with their own colour; more cannot be told apart.
COLOURED = 8
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


class Point(NamedTuple):
    """A mean over seeds: its place, the heights of one standard deviation up and down, and its tooltip."""

    x: float
    y: float
    high: float
    low: float
    note: str


@dataclass(frozen=True)
class Line:
    """One method: its name, how it is drawn, and its points from left to right."""

    name: str
    style: Style
    points: Sequence[Point]

    @property
    def band(self) -> Sequence[tuple[float, float]]:
        """Outline of one standard deviation around the line; nothing for a single seed."""
        if all(p.high == p.low for p in self.points):
            return []
        return [*((p.x, p.high) for p in self.points), *((p.x, p.low) for p in reversed(self.points))]


class Tick(NamedTuple):
    """A number on an axis: its place, its text, and a second text below."""

    place: float
    text: str
    below: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over an axis, grey ones first, so that the others lie above them.

    `dense` is the height of the dense model; None if it has no line.
    """

    title: str
    across: str
    lines: Sequence[Line]
    x: Sequence[Tick]
    y: Sequence[Tick]
    dense: float | None
    width: ClassVar[int] = WIDTH
    height: ClassVar[int] = HEIGHT


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a chart: the place of a row, the numbers on it, each with two texts, and its name."""

    at: Callable[[Row], float]
    ticks: Sequence[tuple[float, str, str]]
    title: str


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
        below = f"{100 * statistics.fmean(flops):.0f}" if flops and name == "heads removed" else ""
        ticks.append((_removed(budget, name), f"{100 * budget:g}", below))
    title = f"{name}, %" + ("; below: FLOPs left, %" if any(below for *_, below in ticks) else "")
    return Axis(lambda row: _removed(budget_of(row), name), ticks, title)


def _removed(budget: float, name: str) -> float:
    return budget if name == "heads removed" else 1 - budget


def alpha_axis(rows: Sequence[Row]) -> Axis:
    """Return the axis of alpha."""
    alphas = sorted({row["alpha"] for row in rows})
    # At most seven numbers, evenly spread.
    shown = alphas[:: -(-len(alphas) // 7)]
    return Axis(lambda row: row["alpha"], [(a, f"{a:g}", "") for a in shown], "alpha (0: entropy alone)")


def time_axis(rows: Sequence[Row]) -> Axis:
    """Return the axis of the measured time, faster models on the left; a budget is at the mean of its times."""
    times: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        times.setdefault(_timed_with(row), []).append(row["latency_ratio"])
    means = {key: statistics.fmean(values) for key, values in times.items()}
    low, high = min(means.values()), max(means.values())
    ticks = [(value, f"{100 * value:.3g}", "") for value in _nice(low, high) if low <= value <= high]
    return Axis(lambda row: means[_timed_with(row)], ticks, "measured time, % of the dense model's")


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
    means = [statistics.fmean(row[quantity] * scale for row in alike) for alike in found.values()]
    place, ticks = _heights(
        means + [dense * scale] * (quantity == "quality"),
        share=quantity == "stability",
        may_be_log=quantity == "quality" and not higher_is_better(metric),
    )
    across = _across([at for at, *_ in axis.ticks] + [axis.at(row) for row in rows])
    lines = []
    for line, style in styles.items():
        places = sorted(((at, alike) for (of, at), alike in found.items() if of == line), key=lambda pair: pair[0])
        points = [_point(alike, quantity, scale, across(at), place) for at, alike in places]
        if points:
            lines.append(Line(line, style, points))
    title = "predictions kept, %" if quantity == "stability" else metric + (", x 100" if scale > 1 else "")
    return Chart(
        title=title,
        across=axis.title,
        lines=sorted(lines, key=lambda line: line.style.colour is not None),
        x=[Tick(across(at), *texts) for at, *texts in axis.ticks],
        y=ticks,
        dense=place(dense * scale) if quantity == "quality" else None,
    )


def _point(rows: Sequence[Row], quantity: str, scale: float, x: float, place: Callable[[float], float]) -> Point:
    values = [row[quantity] * scale for row in rows]
    mean, spread = statistics.fmean(values), deviation(values) or 0.0
    seeds = f" ± {spread:.2f} over {len(values)} seeds" if len(values) > 1 else ""
    note = f"{method_note(rows[0])}: {quantity} {mean:.2f}{seeds}"
    high, low = mean + spread, mean - spread
    if quantity == "stability":
        high, low = min(high, 100.0), max(low, 0.0)
    return Point(x, place(mean), place(high), place(low), note)


def method_note(row: Row) -> str:
    """Return method and budget of a row in words."""
    left = " cut" if row.get("flops_target") is None else " of the FLOPs"
    return f"{line_name(row, [row])}, {share_text(budget_of(row))}{left}"


def _across(places: Sequence[float]) -> Callable[[float], float]:
    low, high = min(places), max(places)
    room = WIDTH - LEFT - RIGHT - 24
    return lambda at: round(LEFT + 12 + (room * (at - low) / (high - low) if high > low else room / 2), 1)


def _heights(values: Iterable[float], *, share: bool, may_be_log: bool) -> tuple[Callable[[float], float], list[Tick]]:
    """Return the function of a value's place, and the ticks of the vertical axis.

    A `share` is a percentage, which ends at 100. `may_be_log` allows logarithms for values far apart.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    bottom, top = HEIGHT - BOTTOM, TOP + 6
    if may_be_log and low > 0 and high / low > _LOGARITHMIC:
        shown = [base * 10**power for power in range(-3, 9) for base in (1, 2, 5)]
        ends = (math.log(low) - 0.05, math.log(high) + 0.05)
        numbers = [number for number in shown if ends[0] <= math.log(number) <= ends[1]]
        scaled = lambda value: (math.log(max(value, low / 2)) - ends[0]) / (ends[1] - ends[0])  # noqa: E731
    else:
        margin = 0.04 * (high - low) or 1.0
        ends = (low - margin, min(high + margin, 100.5) if share else high + margin)
        numbers = [number for number in _nice(*ends) if ends[0] <= number <= ends[1]]
        scaled = lambda value: (value - ends[0]) / (ends[1] - ends[0])  # noqa: E731

    def place(value: float) -> float:
        if math.isnan(value):
            return bottom
        return round(bottom - (bottom - top) * min(max(scaled(value), -0.02), 1.03), 1)

    return place, [Tick(place(number), f"{number:g}") for number in numbers]


def _nice(low: float, high: float) -> list[float]:
    """Return round numbers around a span, about six of them in it."""
    rough = (high - low) / 6 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    first = math.floor(low / step)
    return [round(number * step, 10) for number in range(first, math.ceil(high / step) + 1)]
