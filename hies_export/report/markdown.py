"""report.md: the report as a page of Markdown."""

from __future__ import annotations

from .jinja import render_report
from .report import Report
from .rows import check_table, comparison_table


def render_markdown(report: Report) -> str:
    """Return the report as a page of Markdown."""
    return render_report("report.md.j2", report, comparison=comparison_table(report), checks=check_table(report))
