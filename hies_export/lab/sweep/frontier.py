"""The picture of agreement against measured time: a point for every method at every budget, and the frontier."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ...report.frontier import FrontierFigure, Measured, Shape, frontier
from .charts import Style, method_note
from .tables import COMPENSATIONS, Row, budget_of, deviation, line_name, share_text


def sweep_frontier(rows: Sequence[Row], styles: Mapping[str, Style], *, legend: bool = False) -> FrontierFigure | None:
    """Return means over seeds; those on the frontier have names and intervals. None if nothing was timed.

    Intervals are one standard deviation of the agreement, and the hull of the times' 95 % intervals. Rows that are too
    noisy to compare are left out. A `legend` names each method once, whatever it removes: marks do not show that.
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
    methods = {line_name(row, rows): line_name(row, [row]) for row in rows}
    shapes = dict.fromkeys(Shape(style.kind, style.colour or 0, methods[line]) for line, style in styles.items())
    return FrontierFigure(
        [dense, *(one if number in best else one._replace(name=()) for number, one in enumerate(found, 1))],
        across="measured time, share of the dense model's",
        upwards="same predictions as the dense model",
        shapes=list(shapes) if legend else (),
        interval="deviation over seeds; of times 95 %" if any(len(group) > 1 for group in alike.values()) else "95 %",
    )


def _measured(rows: Sequence[Row], style: Style, series: tuple[str, str], *, several: bool) -> Measured:
    """Return the mean of rows that differ only in the seed."""
    same, times = [row["stability"] for row in rows], [row["latency_ratio"] for row in rows]
    mean, time = statistics.fmean(same), statistics.fmean(times)
    spread = deviation(same) or 0.0
    line, compensation = series[0], COMPENSATIONS[series[1]]
    return Measured(
        name=(line, share_text(budget_of(rows[0])) + (f", {compensation}" if several else "")),
        time=time,
        same=mean,
        time_ends=(min(row["latency_low"] for row in rows), max(row["latency_high"] for row in rows)),
        same_ends=(max(mean - spread, 0.0), min(mean + spread, 1.0)),
        kind=style.kind,
        shape=style.colour or 0,
        note=f"{method_note(rows[0])}, {compensation}: {mean:.1%} same, {time:.2f} of the time",
        series=series,
    )
