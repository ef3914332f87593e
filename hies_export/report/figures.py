"""The figures of a run as SVG files, for papers and the card: the drawings of its page, each standing alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from ..checkpoint.folders import refuse_other_file, replace_file
from .drawing import ACCENT, CARD, DARK, INK, LINE, MUTED, SECOND, MapFigure, Scale, draw_curve, neuron_bars
from .frontier import WIDTH, FrontierFigure, frontier_figure
from .frontier import draw_frontier as frontier_svg
from .html import alpha_curves, environment, head_figures, render
from .report import Report
from .words import held_out_rows

CAPTIONS = {
    "frontier.svg": "Agreement with the dense model against time, and the frontier that nothing else beats on both",
    "head-maps.svg": "Statistics of every head, and the plan; crosses mark the heads that were cut",
    "neurons.svg": "Feed-forward neurons that every layer keeps",
    "latency.svg": "Time of the slim model relative to the dense one, beside the dense one against itself",
    "alpha.svg": "Quality and stability by alpha, on rows that were not used for scoring",
}
# Width of a panel, and the room between two and above one, in units of the SVG.
_WIDTH, _GAP, _TITLE = 480, 24, 26
# How the figures of this package begin, after their size.
_BEGINNING = 'font-family="system-ui, Helvetica, Arial, sans-serif">\n<style>\ntext{'


class Panel(NamedTuple):
    """A drawing and the text above it."""

    title: str
    svg: str


def draw_frontier(figure: FrontierFigure) -> str:
    """Return agreement against time, as one SVG that needs nothing else."""
    return arrange([Panel("", Markup(frontier_svg(figure)))], width=WIDTH)


def draw_report(report: Report) -> dict[str, str]:
    """Return the figures of `CAPTIONS`, file name -> SVG; one that the run has no numbers for is left out."""
    bars = neuron_bars(report.details.neurons)
    chosen = f"on {held_out_rows(report)}; alpha {report.alpha:g} was chosen" if report.alpha is not None else ""
    curves = alpha_curves(report)
    picture = frontier_figure(report)
    panels = {
        "head-maps.svg": map_panels(head_figures(report)),
        "neurons.svg": [Panel(f"{bars.title} {bars.note}", _draw("unit_bars", bars, 16))] if bars else [],
        "latency.svg": [Panel("", _draw("latency_plot", report.latency, Scale.of(report.latency)))]
        if report.latency
        else [],
        "alpha.svg": [Panel(f"{curve.label}, {chosen}", Markup(draw_curve(curve))) for curve in curves],
    }
    frontier = {"frontier.svg": draw_frontier(picture)} if picture else {}
    return frontier | {name: arrange(drawn) for name, drawn in panels.items() if drawn}


def map_panels(figures: Sequence[MapFigure]) -> list[Panel]:
    """Return a panel for every map."""
    notes = [f"empty: {figure.ends[0]}, full: {figure.ends[1]}" if figure.ends else figure.note for figure in figures]
    return [
        Panel(f"{figure.title} ({note})", _draw("unit_map", figure, figure.widest))
        for figure, note in zip(figures, notes, strict=True)
    ]


def arrange(panels: Sequence[Panel], *, width: int = _WIDTH) -> str:
    """Return panels, two in a row, as one SVG that needs nothing else."""
    columns = min(2, len(panels))
    inner, placed, top = columns * (width + _GAP) - _GAP, [], _GAP
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        heights = [_height(panel.svg, width) for panel in row]
        top += _TITLE if any(panel.title for panel in row) else 0
        for column, (panel, height) in enumerate(zip(row, heights, strict=True)):
            placed.append((panel, _GAP + column * (width + _GAP), top, width, height))
        top += max(heights) + _GAP
    light = (CARD, INK, MUTED, LINE, ACCENT, SECOND)
    colours = {"light": light, "dark": [DARK[colour] for colour in light], "changes": DARK}
    return render("figure.svg.j2", placed=placed, width=inner + 2 * _GAP, height=top, title=_TITLE, **colours)


def write_figures(figures: Mapping[str, str], folder: Path) -> list[Path]:
    """Write figures, each whole or not at all, and return the files.

    Raises:
        OutputExistsError: A file of that name is no figure of this package; nothing is written.
    """
    for name in figures:
        refuse_other_file(folder / name, "a figure of hies-export", lambda text: _BEGINNING in text[:300])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in figures.items():
        replace_file(folder / name, text)
    return [folder / name for name in figures]


def _draw(macro: str, *values: Any) -> str:
    drawn: str = getattr(environment().get_template("macros.html.j2").module, macro)(*values)
    return drawn


def _height(svg: str, width: float) -> int:
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    return round(width * float(found[2]) / float(found[1]))
