"""Draw the figures of a finished run as files, for papers and the card. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..measure.rows import LatencyRow
from .maps import CUT, KEPT, UnitBars, UnitMap, unit_maps
from .report import Report
from .rows import row_name
from .style import COLOURS, MARKERS, head_map, new_figure, require_matplotlib, write_figures
from .text import held_out_rows

# Numbers of a head that have a panel, and their titles.
MAPS = {"score": "score", "his": "importance (HIS)", "entropy": "attention entropy"}
CAPTIONS = {
    "head-maps": "Numbers of every head, and the plan; crosses mark the heads that were cut",
    "neurons": "Feed-forward neurons that every layer keeps",
    "latency": "Time of the slim model relative to the dense one, beside the dense one against itself",
    "alpha": "Quality and stability by alpha, on rows apart from those scored on",
}


def draw_report(report: Report, folder: Path) -> list[Path]:
    """Draw what `CAPTIONS` lists.

    Args:
        report: Of a finished run; a figure that it has no numbers for is left out.
        folder: Where to write PNG and SVG; made if need be.

    Returns:
        The files that were written.

    Raises:
        MissingRuntimeError: matplotlib is not installed.
    """
    require_matplotlib()
    drawings = {
        "head-maps": lambda: head_maps(report),
        "neurons": lambda: neuron_bars(report),
        "latency": lambda: latency(report.latency),
        "alpha": lambda: alpha_curve(report),
    }
    return write_figures(drawings, folder)


def head_maps(report: Report) -> Any:
    """Draw plan, score, HIS and entropy of all heads, a panel each, with crosses on the heads that were cut.

    Returns:
        The figure, or None where the run left heads alone.
    """
    heads = next((units for units in unit_maps(report) if isinstance(units, UnitMap)), None)
    if heads is None:
        return None
    marks, numbers = heads.marks, heads.numbers
    cut = {module: [head for head, mark in enumerate(line) if mark == CUT] for module, line in marks.items()}
    known = {kind: {m: numbers[m][kind] for m in marks if numbers.get(m, {}).get(kind)} for kind in MAPS}
    # A model of which only one tower lost heads has numbers for that one.
    shown = {kind: values for kind, values in known.items() if values}
    shape = (max(len(line) for line in marks.values()), len(marks))
    width, height = max(2.9, 0.22 * shape[0] + 1.3), max(2.1, 0.22 * shape[1] + 0.9)
    columns = min(2, len(shown) + 1)
    lines_of_panels = -(-(len(shown) + 1) // columns)
    figure = new_figure(columns * width, lines_of_panels * height)
    axes = figure.subplots(lines_of_panels, columns, squeeze=False).flatten()[: len(shown) + 1]
    kept = {module: [float(mark == KEPT) for mark in line] for module, line in marks.items()}
    head_map(axes[0], kept, cut, title=f"plan: {report.heads.removed} of {report.heads.total} removed")
    for axis, (kind, values) in zip(axes[1:], shown.items(), strict=True):
        limits = (min(v for line in values.values() for v in line), max(v for line in values.values() for v in line))
        name = f"{report.criterion} {MAPS[kind]}" if kind == "score" else MAPS[kind]
        image = head_map(axis, values, {m: cut[m] for m in values}, title=name, limits=limits)
        figure.colorbar(image, ax=axis, fraction=0.05)
    for axis in axes:
        axis.set(xlabel="head", ylabel="layer")
    return figure


def neuron_bars(report: Report) -> Any:
    """Draw how many neurons every layer keeps, over how many it had; return None where the run left neurons alone."""
    neurons = next((units for units in unit_maps(report) if isinstance(units, UnitBars)), None)
    if neurons is None or report.neurons is None:
        return None
    lines = neurons.lines
    figure = new_figure(5.0, 1.1 + 0.26 * len(lines))
    axis = figure.subplots()
    places = range(len(lines))
    axis.barh(places, [line.total for line in lines], height=0.6, color=COLOURS[-1], alpha=0.35, label="cut")
    axis.barh(places, [line.kept for line in lines], height=0.6, color=COLOURS[0], label="kept")
    for place, line in enumerate(lines):
        axis.annotate(
            f"{line.kept:,}", (line.total, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.invert_yaxis()  # layers go down, as in the maps of the heads
    axis.set_yticks(range(0, len(lines), max(1, len(lines) // 6)))
    axis.set(xlabel="neurons", ylabel="layer")
    axis.margins(x=0.12)
    axis.set_axisbelow(True)
    axis.grid(False, axis="y")
    axis.set_title(f"{report.neurons.removed:,} of {report.neurons.total:,} neurons removed", fontsize=9)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def latency(rows: Sequence[LatencyRow]) -> Any:
    """Draw slim / dense time with its 95 % interval for every row, above dense / dense; None without rows."""
    if not rows:
        return None
    figure = new_figure(7.0, 1.3 + 0.42 * len(rows))
    axis = figure.subplots()
    places = range(len(rows) - 1, -1, -1)
    for place, row in zip(places, rows, strict=True):
        first = place == places[0]
        axis.barh(
            place,
            row.control_high - row.control_low,
            left=row.control_low,
            height=0.5,
            color=COLOURS[-1],
            alpha=0.45,
            label="dense / dense (control)" if first else None,
        )
        if not row.noisy:
            ends = [[max(0.0, row.ratio - row.ratio_low)], [max(0.0, row.ratio_high - row.ratio)]]
            label = "slim / dense" if first else None
            axis.errorbar(row.ratio, place, xerr=ends, fmt="o", color=COLOURS[0], capsize=4, label=label)
    axis.axvline(1.0, color="#000000", linewidth=1)
    axis.set_yticks(list(places), [row_name(row) + " (noisy)" * row.noisy for row in rows])
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set_xlabel("time relative to the dense model, 95 % interval")
    axis.grid(False, axis="y")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def alpha_curve(report: Report) -> Any:
    """Draw stability, and with labels quality, of every alpha that was tried; return None where alpha was given."""
    points = report.details.get("alpha_curve", ())
    if len(points) < 2 or report.alpha is None:
        return None
    names = {"quality": report.quality.metric, "stability": "stability"}
    shown = {kind: name for kind, name in names.items() if points[0][kind] is not None}
    figure = new_figure(6.0, 0.6 + 2.2 * len(shown))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for index, (axis, (kind, name)) in enumerate(zip(axes, shown.items(), strict=True)):
        style = {"color": COLOURS[index], "marker": MARKERS[index]}
        axis.plot([point["alpha"] for point in points], [point[kind] for point in points], **style)
        axis.axvline(report.alpha, color="#555555", linestyle=":")
        axis.set_ylabel(name)
    axes[0].set_title(f"on {held_out_rows(report)}; alpha {report.alpha:g} was chosen", fontsize=9)
    axes[-1].set_xlabel("alpha (0: entropy alone, 1: importance alone)")
    return figure
