"""The figures of a finished run as files, for papers and the card. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .latency import row_name
from .report import CUT, KEPT, Report
from .style import COLOURS, MARKERS, head_map, new_figure, require_matplotlib, write_figures

# What is drawn of every head, and how it is called.
MAPS = {"his": "importance (HIS)", "entropy": "attention entropy", "score": "score"}
CAPTIONS = {
    "head-maps": "What was found out about every head, and the plan; crosses on the heads that went",
    "latency": "Time of the slim model relative to the dense one, beside the dense one against itself",
    "alpha": "Quality and stability on held-out samples by alpha",
}


def draw_report(report: Report, folder: Path) -> list[Path]:
    """Draw what `CAPTIONS` lists.

    Args:
        report: Of a finished run; what it has no numbers for is left out.
        folder: Where to write PNG and SVG; made if need be.

    Returns:
        The files that were written.

    Raises:
        MissingRuntimeError: matplotlib is not installed.
    """
    require_matplotlib()
    drawings = {
        "head-maps": lambda: head_maps(report),
        "latency": lambda: latency(report.latency),
        "alpha": lambda: alpha_curve(report),
    }
    return write_figures(drawings, folder)


def head_maps(report: Report) -> Any:
    """HIS, entropy and score of every head, and the plan: a panel each, with crosses on the heads that go."""
    lines: Mapping[str, str] = report.details["head_map"]
    numbers: Mapping[str, Mapping[str, Sequence[float]]] = report.details.get("heads", {})
    gone = {module: [head for head, mark in enumerate(line) if mark == CUT] for module, line in lines.items()}
    known = {what: {m: numbers[m][what] for m in lines if numbers.get(m, {}).get(what)} for what in MAPS}
    # A model of which only one tower lost heads has numbers for that one.
    shown = {what: values for what, values in known.items() if values}
    shape = (max(len(line) for line in lines.values()), len(lines))
    width, height = max(2.9, 0.22 * shape[0] + 1.3), max(2.1, 0.22 * shape[1] + 0.9)
    columns = min(2, len(shown) + 1)
    lines_of_panels = -(-(len(shown) + 1) // columns)
    figure = new_figure(columns * width, lines_of_panels * height)
    axes = figure.subplots(lines_of_panels, columns, squeeze=False).flatten()[: len(shown) + 1]
    for axis, (what, values) in zip(axes, shown.items(), strict=False):
        limits = (min(v for line in values.values() for v in line), max(v for line in values.values() for v in line))
        name = f"{report.criterion} {MAPS[what]}" if what == "score" else MAPS[what]
        image = head_map(axis, values, {m: gone[m] for m in values}, title=name, limits=limits)
        figure.colorbar(image, ax=axis, fraction=0.05)
    kept = {module: [float(mark == KEPT) for mark in line] for module, line in lines.items()}
    removed = report.heads["removed"]
    head_map(axes[-1], kept, gone, title=f"plan: {removed} of {report.heads['total']} removed", colours="Blues")
    for axis in axes:
        axis.set(xlabel="head", ylabel="layer")
    return figure


def latency(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The paired ratio of every row with its interval, over that of the control; None without rows."""
    if not rows:
        return None
    figure = new_figure(7.0, 1.3 + 0.42 * len(rows))
    axis = figure.subplots()
    places = range(len(rows) - 1, -1, -1)
    for place, row in zip(places, rows, strict=True):
        first = place == places[0]
        axis.barh(
            place,
            row["control_high"] - row["control_low"],
            left=row["control_low"],
            height=0.5,
            color=COLOURS[-1],
            alpha=0.45,
            label="dense / dense (control)" if first else None,
        )
        if not row.get("noisy"):
            ends = [[row["ratio"] - row["ratio_low"]], [row["ratio_high"] - row["ratio"]]]
            label = "slim / dense" if first else None
            axis.errorbar(row["ratio"], place, xerr=ends, fmt="o", color=COLOURS[0], capsize=4, label=label)
    axis.axvline(1.0, color="#000000", linewidth=1)
    axis.set_yticks(list(places), [row_name(row) + " (noisy)" * bool(row.get("noisy")) for row in rows])
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set_xlabel("time relative to the dense model, 95 % interval")
    axis.grid(False, axis="y")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def alpha_curve(report: Report) -> Any:
    """Quality, where there are labels, and stability of every alpha that was tried; None where it was given."""
    points = report.details.get("alpha_curve", ())
    if len(points) < 2:
        return None
    names = {"quality": report.quality["metric"], "stability": "stability"}
    shown = {what: name for what, name in names.items() if points[0][what] is not None}
    figure = new_figure(6.0, 0.6 + 2.2 * len(shown))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for index, (axis, (what, name)) in enumerate(zip(axes, shown.items(), strict=True)):
        style = {"color": COLOURS[index], "marker": MARKERS[index]}
        axis.plot([point["alpha"] for point in points], [point[what] for point in points], **style)
        axis.axvline(report.alpha, color="#555555", linestyle=":")
        axis.set_ylabel(name)
    axes[0].set_title(f"held-out samples; alpha {report.alpha:g} was chosen", fontsize=9)
    axes[-1].set_xlabel("alpha (0: entropy alone, 1: importance alone)")
    return figure
