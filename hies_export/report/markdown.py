"""report.md: the report as a page of Markdown."""

from __future__ import annotations

from .jinja import render
from .report import Report
from .rows import check_table, comparison_table, latency_table, layer_table, unit_maps
from .text import budget_text, criterion_text, latency_text, method_text, title


def render_markdown(report: Report) -> str:
    """Return the report as a page of Markdown."""
    layers = report.details.get("flops_per_layer")
    return render(
        "report.md.j2",
        title=title(report),
        report=report,
        criterion=criterion_text(report),
        comparison=comparison_table(report),
        budget=budget_text(report),
        maps=unit_maps(report),
        latency=latency_table(report.latency) if report.latency else None,
        latency_note=latency_text(report.latency) if report.latency else "",
        layers=layer_table(layers["dense"], layers["slim"]) if layers else None,
        layers_shape=layers["shape"] if layers else None,
        checks=check_table(report),
        method=method_text(report),
    )
