"""report.html: the report as one page that needs nothing but a browser, at a desk or on a phone, in light or dark.

The page is rendered from the `Report` alone. Style, figures (inline SVG) and the script that shows a head's numbers are
in the file itself, and nothing is loaded from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..evaluate.metrics import higher_is_better
from .drawing import Curve, Dot, MapFigure, Scale, latency_scale, neuron_bars, number_figure, plan_figure
from .jinja import render_report
from .maps import CUT
from .report import Report
from .tables import size_rows
from .text import agreement, criterion_text

# Numbers of a head that have a map: title, and how to read it.
MAPS = {
    "score": ("Score", "the lowest are cut first"),
    "his": ("Importance (HIS)", "how strongly the loss changes with the head"),
    "entropy": ("Attention entropy", "0: attends to one token, 1: to all alike"),
}


def render_html(report: Report, *, location: str = "slim") -> str:
    """Return the report as one self-contained HTML page; `location` is the folder or Hub id to load the model from."""
    details = report.details
    return render_report(
        "report.html.j2",
        report,
        subtitle=f"{report.task} · {criterion_text(report)} · seed {report.seed}",
        location=location,
        figures=head_figures(report),
        numbers=_numbers(report),
        bars=neuron_bars(details.neurons, beside=details.head_map),
        alpha_curves=alpha_curves(report),
        place=_common_scale(report),
        whole=Scale(1.0),
        served=_served_scale(report),
    )


def _common_scale(report: Report) -> Scale:
    """Return the common scale of all bars of times and sizes, including a slim model larger than its source."""
    return Scale(max(latency_scale(report.latency).high, *(row.ratio + 0.01 for row in size_rows(report))))


def _served_scale(report: Report) -> Scale:
    """Return the scale of the times of all forms, of which a slower one than the dense model fits too."""
    times = [time for form in report.details.forms for time in form.times]
    # As in `latency_scale`, a noisy one must not squeeze the others.
    return Scale(max([1.0, *(min(time.ratio, 1.5) if time.noisy else time.ratio for time in times)]))


def is_page(text: str) -> bool:
    """Return whether a text is a page that this package rendered, of a report or of a bench."""
    return '<meta name="generator" content="hies-export">' in text[:2000]


def head_figures(report: Report) -> list[MapFigure]:
    """Return the plan, and a map of every known statistic of the heads; nothing if the run left them alone."""
    marks, heads = report.details.head_map, report.details.heads
    if not marks:
        return []
    figures = [plan_figure(marks)]
    for kind, (name, note) in MAPS.items():
        numbers = {module: of[kind] for module, of in heads.items() if kind in of}
        if found := number_figure(marks, numbers, kind, title=name, note=note):
            figures.append(found)
    return figures


def _numbers(report: Report) -> str:
    """Return, as JSON for the script of the page, whether each head was cut, and its numbers."""
    modules = [
        {
            "name": module,
            "cut": [int(mark == CUT) for mark in line],
            **{kind: [float(f"{v:.4g}") for v in row] for kind, row in report.details.heads.get(module, {}).items()},
        }
        for module, line in report.details.head_map.items()
    ]
    # "</script" would end the element that holds it.
    return json.dumps(modules, separators=(",", ":")).replace("<", "\\u003c")


def alpha_curves(report: Report) -> list[Curve]:
    """Return the metric and the stability by alpha, if alpha was chosen on data; no metric without labels."""
    points, metric = report.details.alpha_curve, report.quality.metric
    if len(points) < 2 or report.alpha is None:
        return []
    curves = [_alpha_curve(report, "stability", [p.stability for p in points], f"{agreement(report)}, share")]
    judged = [(p.quality, p.standard_error) for p in points if p.quality is not None]
    if len(judged) == len(points):
        sign = 1 if higher_is_better(metric) else -1
        best, error = max(judged, key=lambda pair: sign * pair[0])
        as_good = (best, best - sign * error)
        curves.insert(0, _alpha_curve(report, "quality", [quality for quality, _ in judged], metric, as_good=as_good))
    return curves


def _alpha_curve(
    report: Report, kind: str, values: Sequence[float], label: str, *, as_good: tuple[float, ...] = ()
) -> Curve:
    """Return one number of every alpha; `as_good` are the ends of a band of values as good as the best."""
    dots = [
        Dot(point.alpha, value, point.alpha == report.alpha, f"alpha {point.alpha:g}: {value:.4f}")
        for point, value in zip(report.details.alpha_curve, values, strict=True)
    ]
    return Curve(
        label=label,
        line=[(dot.x, dot.y) for dot in dots],
        dots=dots,
        axis=("entropy alone", "importance alone"),
        kind=kind,
        ticks=[alpha / 5 for alpha in range(6)],
        chosen=report.alpha,
        band=as_good if len(set(as_good)) == 2 else (),
    )
