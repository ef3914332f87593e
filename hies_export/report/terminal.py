"""The report, and any table or map, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .lead import lead_text
from .maps import CUT, KEPT, UnitMap, unit_maps
from .report import Report
from .rows import comparison_table, forms_table, latency_table, tried_table
from .text import (
    alpha_text,
    budget_text,
    cascade_text,
    family_text,
    forms_text,
    held_out_rows,
    latency_text,
    tried_text,
)


def print_report(report: Report, console: Console) -> None:
    """Print the sentence that leads, the maps of what was cut, and the tables."""
    console.print(f"\n{lead_text(report)}", markup=False, style="bold", soft_wrap=True)
    for units in unit_maps(report):
        console.print()
        console.print(map_text(units))
    console.print()
    console.print(plain_table(*comparison_table(report)))
    tried = tried_table(report)
    if tried:
        console.print(f"\nwhat was tried, on {held_out_rows(report)}", markup=False)
        console.print(plain_table(*tried))
        console.print(tried_text(report), markup=False, style="dim", soft_wrap=True)
    if alpha_text(report):
        console.print(f"\non {held_out_rows(report)}: {alpha_text(report)}", markup=False, soft_wrap=True)
    if budget_text(report):
        console.print(f"\n{budget_text(report)}", markup=False)
    if family_text(report):
        console.print(f"\n{family_text(report)}", markup=False)
    if report.latency:
        console.print()
        console.print(plain_table(*latency_table(report.latency)))
        console.print(latency_text(report.latency), markup=False, style="dim")
    forms = forms_table(report)
    if forms:
        console.print()
        console.print(plain_table(*forms))
        console.print(forms_text(report), markup=False, style="dim")
    if report.cascade:
        console.print(f"\n{cascade_text(report)}", markup=False)


def map_text(units: UnitMap) -> Text:
    """Return a map for the terminal: a line of marks per layer, and how many units the layer keeps."""
    text = Text()
    text.append(f"{units.unit}s  ", style="bold")
    text.append(f"{KEPT} kept  ", style="green")
    text.append(f"{CUT} cut", style="red")
    width = max(2, *(len(f"{line.kept:,}") for line in units.lines))
    for index, line in enumerate(units.lines):
        text.append(f"\n  {index:>3}  ", style="dim")
        for mark in line.marks:
            text.append(mark, style={KEPT: "green", CUT: "red"}.get(mark, ""))
        text.append(f"  {line.kept:>{width},} of {line.total:,}  {line.module}", style="dim")
    return text


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Return a table for the terminal, without a frame; a string is shown as it is, brackets included."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(header):
        table.add_column(Text(name), justify="right" if index else "left", no_wrap=bool(index))
    for row in rows:
        # A table would take "[bold]" in a string for markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
