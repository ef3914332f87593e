"""The figures of a run as SVG files, for papers and the card: the drawings of its page, each standing alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from ..checkpoint.folders import refuse_other_file, replace_file
from .drawing import ACCENT, CARD, DARK, INK, LINE, MUTED, SECOND, MapFigure, Scale, neuron_bars
from .frontier import WIDTH, FrontierFigure, frontier_figure
from .frontier import draw_frontier as frontier_svg
from .html import environment, head_figures, render
from .report import Report

CAPTIONS = {
    "frontier.svg": "Agreement with the dense model against time, and the frontier that nothing else beats on both",
    "head-maps.svg": "Statistics of every head, and the plan; crosses mark the heads that were cut",
    "neurons.svg": "Feed-forward neurons that every layer keeps",
    "latency.svg": "Time of the slim model relative to the dense one, beside the dense one against itself",
}
# Width of a panel, the gap between two, and the height of a title, in units of the SVG.
_WIDTH, _GAP, _TITLE = 480, 24, 26
# How the figures of this package begin, after their size.
_BEGINNING = 'font-family="system-ui, Helvetica, Arial, sans-serif">\n<style>\ntext{'


class Panel(NamedTuple):
    """A drawing and the text above it."""

    title: str
    svg: str


def draw_frontier(figure: FrontierFigure) -> str:
    """Return agreement against time, as one SVG that needs nothing else."""
    return _arranged([Panel("", Markup(frontier_svg(figure)))], width=WIDTH)


def draw_report(report: Report) -> dict[str, str]:
    """Return the figures of `CAPTIONS`, file name -> SVG; those that the run has no numbers for are left out."""
    figures = {}
    if picture := frontier_figure(report):
        figures["frontier.svg"] = draw_frontier(picture)
    if maps := head_figures(report):
        figures["head-maps.svg"] = _arranged([_map_panel(figure) for figure in maps])
    if bars := neuron_bars(report.details.neurons):
        figures["neurons.svg"] = _arranged([Panel(f"{bars.title} {bars.note}", _draw("unit_bars", bars, 16))])
    if report.latency:
        plot = _draw("latency_plot", report.latency, Scale.of(report.latency))
        figures["latency.svg"] = _arranged([Panel("", plot)])
    return figures


def _map_panel(figure: MapFigure) -> Panel:
    """Return a map below its title and how to read it."""
    note = f"empty: {figure.ends[0]}, full: {figure.ends[1]}" if figure.ends else figure.note
    return Panel(f"{figure.title} ({note})", _draw("unit_map", figure, figure.widest))


def _arranged(panels: Sequence[Panel], *, width: int = _WIDTH) -> str:
    """Return panels, all `width` wide and at most two in a row, as one SVG that needs nothing else."""
    columns = min(2, len(panels))
    placed, top = [], _GAP
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        heights = [_height(panel.svg, width) for panel in row]
        top += _TITLE if any(panel.title for panel in row) else 0
        for column, (panel, height) in enumerate(zip(row, heights, strict=True)):
            placed.append((panel, _GAP + column * (width + _GAP), top, width, height))
        top += max(heights) + _GAP
    light = (CARD, INK, MUTED, LINE, ACCENT, SECOND)  # in the order of the arguments of `colours` in figure.svg.j2
    colours = {"light": light, "dark": [DARK[colour] for colour in light], "changes": DARK}
    across = columns * (width + _GAP) + _GAP
    return render("figure.svg.j2", placed=placed, width=across, height=top, title=_TITLE, **colours)


def write_figures(figures: Mapping[str, str], folder: Path) -> list[Path]:
    """Write figures, file name -> SVG, each whole or not at all; refuse, by an OutputExistsError, other files."""
    for name in figures:  # before any is written
        refuse_other_file(folder / name, "a figure of hies-export", lambda text: _BEGINNING in text[:300])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in figures.items():
        replace_file(folder / name, text)
    return [folder / name for name in figures]


def _draw(macro: str, *values: Any) -> str:
    """Return the SVG that a macro of macros.html.j2, by its name, draws of values."""
    return getattr(environment().get_template("macros.html.j2").module, macro)(*values)


def _height(svg: str, width: float) -> int:
    """Return the height of an SVG that is scaled to a width, from the width and height of its viewBox."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None
    return round(width * float(box[2]) / float(box[1]))
