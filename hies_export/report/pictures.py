"""The pictures of a report as PNG, for the card on the Hub. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from ..sweep.figures import COLOURS, MARKERS, STYLE, draw_heads, new_figure, require_matplotlib, spread
from .html import MAPS
from .report import KEPT, Report


@dataclass(frozen=True)
class Picture:
    """One PNG.

    Attributes:
        name: File name.
        shows: What it shows, in a few words.
        png: Its bytes, the same for the same report.
    """

    name: str
    shows: str
    png: bytes


def draw_pictures(report: Report) -> list[Picture]:
    """The head map, the latency ratios, and quality by alpha where alpha was chosen on data.

    Raises:
        MissingRuntimeError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl

    drawings = {
        "head-map.png": ("Numbers of every head, with crosses on those removed", _head_map),
        "latency.png": ("Time of the slim model relative to the dense one", _latency),
        "alpha.png": ("Quality and stability on held-out samples by alpha", _alpha_curve),
    }
    pictures = []
    with mpl.rc_context(STYLE):
        for name, (shows, draw) in drawings.items():
            figure = draw(report)
            if figure is not None:
                file = io.BytesIO()
                figure.savefig(file, format="png", dpi=150)
                pictures.append(Picture(name, shows, file.getvalue()))
    return pictures


def _head_map(report: Report) -> Any:
    """A panel for each number that is known of every head."""
    numbers = report.details.get("heads", {})
    marks = {name: line for name, line in report.details["head_map"].items() if name in numbers}
    known = [what for what in MAPS if marks and all(numbers[name].get(what) for name in marks)]
    if not known:
        return None
    kept = {name: [head for head, mark in enumerate(line) if mark == KEPT] for name, line in marks.items()}
    heads = max(len(line) for line in marks.values())
    width, height = max(2.3, 0.2 * heads + 0.7), max(1.9, 0.2 * len(marks) + 0.8)
    figure = new_figure(len(known) * width + 1.2, height + 0.6)
    axes = figure.subplots(1, len(known), squeeze=False)[0]
    for axis, what in zip(axes, known, strict=True):
        image = draw_heads(axis, spread({name: numbers[name][what] for name in marks}), kept, MAPS[what][0])
        axis.set_xlabel("head")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="0 to 1; x: removed", fraction=0.03)
    return figure


def _latency(report: Report) -> Any:
    """Per runtime and shape the paired ratio with its interval, over that of the dense model against itself."""
    rows = [row for row in report.latency if not row.get("noisy")]
    if not rows:
        return None
    figure = new_figure(7.5, 1.5 + 0.36 * len(rows))
    axis = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        low, high = row["control_low"], row["control_high"]
        axis.plot(
            [low, high], [place + 0.2] * 2, color=COLOURS[7], linewidth=4, label="dense / dense" if not place else ""
        )
        error = [[max(0.0, row["ratio"] - row["ratio_low"])], [max(0.0, row["ratio_high"] - row["ratio"])]]
        label = "slim / dense" if not place else ""
        axis.errorbar(row["ratio"], place, xerr=error, fmt="o", color=COLOURS[0], capsize=4, label=label)
    axis.axvline(1, color="#555555", linewidth=1)
    flops = report.flops["slim"] / report.flops["dense"]
    axis.axvline(flops, color="#555555", linestyle=":", label=f"FLOPs, {flops:.2f}")
    axis.set_yticks(range(len(rows)), [f"{r['runtime']} {r['batch']} x {r['sequence']}" for r in reversed(rows)])
    axis.set_xlabel("median latency relative to the dense model, 95 % interval")
    axis.set_ylim(-0.7, len(rows) - 0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _alpha_curve(report: Report) -> Any:
    points = [p for p in report.details.get("alpha_curve", ()) if p["quality"] is not None]
    if len(points) < 2:
        return None
    figure = new_figure(6.0, 5.0)
    axes = figure.subplots(2, 1, sharex=True)
    shown = {"quality": report.quality["metric"], "stability": "stability"}
    for index, (axis, (what, label)) in enumerate(zip(axes, shown.items(), strict=True)):
        values = [point[what] for point in points]
        axis.plot([p["alpha"] for p in points], values, color=COLOURS[index], marker=MARKERS[index])
        axis.axvline(report.alpha, color="#555555", linestyle=":")
        axis.set_ylabel(label)
    axes[0].set_title(f"held-out samples; alpha {report.alpha:g} was chosen", fontsize=9)
    axes[1].set_xlabel("alpha (0: entropy alone, 1: importance alone)")
    return figure
