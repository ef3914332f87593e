"""report.html: the report as one page that needs nothing but a browser, at a desk or on a phone, in light or dark.

The page is rendered from the `Report` alone. Style, figures (inline SVG) and the script that shows a head's numbers are
in the file itself, and nothing is loaded from anywhere.
"""

from __future__ import annotations

import json

from .drawing import (
    BarFigure,
    Curve,
    Dot,
    MapFigure,
    bar_figure,
    curve_places,
    latency_scale,
    number_figure,
    plan_figure,
)
from .jinja import render_report
from .maps import CUT, UnitBars, UnitMap, unit_maps
from .report import Report
from .rows import check_table, environment_table, percentile_table, quality_table, row_name, size_rows
from .text import agreement, criterion_text, model_name, named_units

# Numbers of a head that have a map: title, and how to read it.
MAPS = {
    "score": ("Score", "the lowest are cut first"),
    "his": ("Importance (HIS)", "how strongly the loss changes with the head"),
    "entropy": ("Attention entropy", "0: attends to one token, 1: to all alike"),
}


def render_html(report: Report, *, location: str = "slim") -> str:
    """Return the report as one self-contained HTML page.

    Args:
        report: What to show.
        location: The folder or Hub id that the slim checkpoint is loaded from.
    """
    heads = next((units for units in unit_maps(report) if isinstance(units, UnitMap)), None)
    return render_report(
        "report.html.j2",
        report,
        subtitle=f"{model_name(report)} · {report.task} · {criterion_text(report)} · seed {report.seed}",
        location=location,
        tiles=_tiles(report),
        heads=heads,
        figures=_figures(heads) if heads else [],
        numbers=_numbers(heads) if heads else None,
        bars=_bars(report, heads),
        quality=quality_table(report),
        stability_of=report.details.get("stability_of", "prediction"),
        uncompensated=report.details.get("uncompensated"),
        alpha_curve=_alpha_curve(report),
        sizes=size_rows(report),
        place=latency_scale(report.latency),
        percentiles=percentile_table(report.latency),
        checks=check_table(report).rows,
        environment=environment_table(report.environment),
    )


def is_page(text: str) -> bool:
    """Return whether a text is a page that this package rendered, of a report or of a bench."""
    return '<meta name="generator" content="hies-export">' in text[:2000]


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page: name, number, remark."""
    quality = report.quality
    tiles = [
        *((name, f"{units.kept:,}", f"of {units.total:,}") for name, units in named_units(report)),
        (quality.metric, f"{quality.slim:.4g}", f"dense {quality.dense:.4g}"),
        (agreement(report), f"{report.stability:.1%}", "of the dense model's"),
    ]
    quiet = [row for row in report.latency if not row.noisy]
    if quiet:
        best = min(quiet, key=lambda row: row.ratio)
        tiles.append(("time, at best", f"{best.ratio:.1%}", f"of dense · {row_name(best).replace(' x ', ' × ')}"))
    tiles.append(("parameters", f"{report.parameters.ratio:.1%}", "of dense"))
    return tiles


def _figures(units: UnitMap) -> list[MapFigure]:
    """Return the plan, and a map of every number that is known of the units."""
    figures = [number_figure(units, kind, title=name, note=note) for kind, (name, note) in MAPS.items()]
    return [plan_figure(units), *(figure for figure in figures if figure is not None)]


def _bars(report: Report, heads: UnitMap | None) -> BarFigure | None:
    """Return the bars of the neurons, at the height of their layers in the map of the heads; None without neurons."""
    found = next((units for units in unit_maps(report) if isinstance(units, UnitBars)), None)
    return bar_figure(found, beside=list(heads.marks) if heads else []) if found else None


def _numbers(units: UnitMap) -> str:
    """Return, as JSON for the script of the page, whether each unit was cut, and its numbers."""
    modules = [
        {
            "name": module,
            "cut": [int(mark == CUT) for mark in line],
            **{kind: [float(f"{v:.4g}") for v in row] for kind, row in units.numbers.get(module, {}).items()},
        }
        for module, line in units.marks.items()
    ]
    # "</script" would end the element that holds it.
    return json.dumps(modules, separators=(",", ":")).replace("<", "\\u003c")


def _alpha_curve(report: Report) -> Curve | None:
    """Return quality by alpha, where alpha was chosen on data."""
    points = [point for point in report.details.get("alpha_curve", ()) if point["quality"] is not None]
    if len(points) < 2:
        return None
    left, height = 40, 100
    place, ends = curve_places([point["quality"] for point in points], left=left, height=height)
    places = [place(point["alpha"], point["quality"]) for point in points]
    notes = [f"alpha {p['alpha']:g}: {p['quality']:.4f}, stability {p['stability']:.1%}" for p in points]
    return Curve(
        label="quality by alpha",
        left=left,
        line=places,
        dots=[
            Dot(x, y, point["alpha"] == report.alpha, note)
            for (x, y), point, note in zip(places, points, notes, strict=True)
        ],
        ends=ends,
        axis=("0: entropy", "importance: 1"),
        bottom=150,
    )
