"""The figures of a sweep as SVG files: the charts of its page, and further ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup

from ...calibrate.statistics import Calibration, Statistics
from ...files import read_json
from ...report import figures
from ...report.drawing import number_figure
from ...report.html import environment
from ...report.report import CUT, KEPT
from ...score.criteria import score_units
from ..baselines.names import OWN_SAMPLES
from ..schemas import SWEEP_DETAILS, SweepFigures
from .charts import COLOURED, Axis, Style, draw_chart, line_styles, sweep_frontier
from .page import Panel, alpha_panels, budget_panels, drawn_rows, panels, read_sweep, timed_panels
from .results import Row, budget_name, budget_of, budgets_of, of_first_size, share_text


def draw_sweep(folder: Path) -> dict[str, str]:
    """Return the figures of a finished sweep, file name -> SVG.

    A figure without data is left out: `calibration-size` needs two sizes, `seeds` two seeds, `alpha-sensitivity` three
    given alphas, `head-maps` the criterion his or hies, and `frontier` and `quality-latency` measured times.

    Raises:
        RequestError: As in `read_sweep`.
    """
    rows, _ = read_sweep(folder)
    details = read_json(folder / "details.json", SweepFigures, SWEEP_DETAILS)
    shown = drawn_rows(rows)
    styles = line_styles(shown, most=2 * COLOURED)
    by_budget, by_time, by_alpha = budget_panels(shown, styles), timed_panels(shown, styles), alpha_panels(rows)
    frontier = sweep_frontier(shown, styles, legend=True)
    drawn = {
        "quality": _curves(by_budget, styles, only=1),
        "stability": _curves(by_budget, styles, only=0),
        "frontier": figures.draw_frontier(frontier) if frontier else "",
        "quality-latency": _curves(by_time, styles),
        "head-maps": head_maps(details),
        "alpha-sensitivity": _curves(
            by_alpha, {line.name: line.style for panel in by_alpha for line in panel.charts[0].lines}
        ),
        "calibration-size": calibration_sizes(rows),
        "seeds": seeds(rows),
    }
    return {f"{name}.svg": svg for name, svg in drawn.items() if svg}


def _curves(panels: Sequence[Panel], styles: Mapping[str, Style], *, only: int | None = None) -> str:
    """Return one chart of every panel, or all, over a legend; nothing without panels."""
    macros: Any = environment("hies_export.lab.sweep").get_template("lines.html.j2").module
    shown = [
        figures.Panel(f"{panel.title}: {chart.title}", Markup(draw_chart(chart)))
        for panel in panels
        for chart in (panel.charts if only is None else panel.charts[only : only + 1])
    ]
    return figures.arrange(shown, legend=lambda width: macros.legend(styles, width)) if shown else ""


def head_maps(details: Mapping[str, Any]) -> str:
    """Return HIS, then HIES, of every head, a map per budget with crosses on the removed heads.

    There is none if the model returned no attention maps.
    """
    if not details["entropy"]:
        return ""
    of_heads = {
        what: {name: torch.tensor(details[what][name]) for name in details["entropy"]} for what in ("his", "entropy")
    }
    statistics, maps = Statistics(of_heads, Calibration(0, "", "")), []
    for plan in [plan for criterion in ("his", "hies") for plan in _plans_of(details, criterion)]:
        hies = plan["criterion"] == "hies" and plan["alpha"] is not None
        alpha = {"criterion": "hies", "alpha": plan["alpha"]} if hies else {"criterion": "his"}
        scores = score_units(statistics, normalize=details["normalize"], **alpha).scores
        marks = {
            name: "".join(KEPT if head in plan["kept"].get(name, range(len(row))) else CUT for head in range(len(row)))
            for name, row in scores.items()
        }
        numbers = {name: row.tolist() for name, row in scores.items()}
        title = f"HIES, α {plan['alpha']:g}" if hies else "HIS"
        maps.append(number_figure(marks, numbers, "score", title=f"{title}: {_budget_text(plan)}", note=""))
    return figures.arrange(figures.map_panels([found for found in maps if found])) if maps else ""


def calibration_sizes(rows: Sequence[Row]) -> str:
    """Return stability by the number of calibration samples at the median budget; nothing for a single size."""
    shared = [row for row in rows if row["criterion"] not in OWN_SAMPLES]
    sizes = sorted({row["calibration_samples"] for row in shared})
    ticks = [(math.log2(size), str(size)) for size in sizes]
    axis = Axis(lambda row: math.log2(row["calibration_samples"]), ticks, "calibration samples")
    return _at_the_middle(shared, axis) if len(sizes) > 1 else ""


def seeds(rows: Sequence[Row]) -> str:
    """Return the stability of every seed at the median budget; nothing for one seed."""
    found = sorted({row["seed"] for row in rows})
    axis = Axis(lambda row: row["seed"], [(seed, str(seed)) for seed in found], "seed")
    return _at_the_middle(of_first_size(rows), axis) if len(found) > 1 else ""


def _at_the_middle(rows: Sequence[Row], axis: Axis) -> str:
    """Return stability along an axis at the median budget, or at the deeper cut of the middle two."""
    budgets = budgets_of(rows)
    budget = budgets[len(budgets) // 2]
    at = [row for row in rows if budget_of(row) == budget]
    styles = line_styles(at, most=2 * COLOURED)
    title = f"{share_text(budget)} of the {budget_name(rows)}, {{}}"
    drawn = panels(at, axis, styles, ["stability"], title=title)
    return _curves(drawn, styles)


def _budget_text(plan: Mapping[str, Any]) -> str:
    flops = plan.get("flops_target")
    return f"{share_text(plan['sparsity'])} removed" if flops is None else f"{share_text(flops)} of the FLOPs"


def _plans_of(details: Mapping[str, Any], criterion: str) -> list[Mapping[str, Any]]:
    """Return the plans of a criterion that remove heads, one per budget, the smallest cut first.

    If there are several alphas, or kinds of modules, the first is used.
    """
    found: dict[float, Mapping[str, Any]] = {}
    for plan in details["plans"]:
        if plan["criterion"] == criterion and plan.get("modules") != "mlp":
            flops = plan.get("flops_target")
            found.setdefault(plan["sparsity"] if flops is None else 1 - flops, plan)
    return [found[removed] for removed in sorted(found)]
