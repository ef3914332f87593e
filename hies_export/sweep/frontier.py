"""The picture of agreement against measured time: a point for every method at every budget, and the frontier."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ..report.frontier import FrontierFigure, Measured, Shape, frontier, place_frontier
from .charts import COLOURED, Style, method_note
from .tables import COMPENSATIONS, Row, budget_of, line_name


def sweep_frontier(rows: Sequence[Row], styles: Mapping[str, Style], *, legend: bool = False) -> FrontierFigure | None:
    """Return means over seeds; those on the frontier have names and intervals. None if nothing was timed.

    Intervals are one standard deviation of the agreement, and the hull of the times' 95 % intervals. Rows that are too
    noisy to compare are left out. A `legend` has the names of all methods.
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
    dense = Measured(("dense",), 1.0, 1.0, (1.0, 1.0), (1.0, 1.0), "other", 0, "the dense model")
    best = frontier([dense, *found])
    return place_frontier(
        [dense, *(one if number in best else one._replace(name=()) for number, one in enumerate(found, 1))],
        across="measured time, share of the dense model's",
        upwards="same predictions as the dense model",
        shapes=[Shape(_kind(style), style.colour or 0, name) for name, style in styles.items()] if legend else (),
        interval="deviation over seeds; of times 95 %" if any(len(group) > 1 for group in alike.values()) else "95 %",
    )


def _measured(rows: Sequence[Row], style: Style, series: tuple[str, str], *, several: bool) -> Measured:
    """Return the mean of rows that differ only in the seed."""
    same, times = [row["stability"] for row in rows], [row["latency_ratio"] for row in rows]
    mean, time = statistics.fmean(same), statistics.fmean(times)
    spread = statistics.stdev(same) if len(same) > 1 else 0.0
    line, compensation = series[0], COMPENSATIONS[series[1]]
    return Measured(
        name=(line, f"{budget_of(rows[0]):.0%}" + (f", {compensation}" if several else "")),
        time=time,
        same=mean,
        time_ends=(min(row["latency_low"] for row in rows), max(row["latency_high"] for row in rows)),
        same_ends=(max(mean - spread, 0.0), min(mean + spread, 1.0)),
        kind=_kind(style),
        shape=style.colour or 0,
        note=f"{method_note(rows[0])}, {compensation}: {mean:.1%} same, {time:.2f} of the time",
        series=series,
    )


def _kind(style: Style) -> str:
    return "rest" if style.colour is None else f"c{style.colour % COLOURED}"
