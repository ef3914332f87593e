"""The report, and any table or head map, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import Report
from .rows import CUT, KEPT, comparison_table, latency_table, unit_maps
from .text import budget_text, latency_text


def print_report(report: Report, console: Console) -> None:
    """Print the maps of what was cut, and the tables."""
    for units in unit_maps(report):
        console.print()
        console.print(head_map_text(units.marks, unit=units.unit))
    console.print()
    console.print(plain_table(*comparison_table(report)))
    if budget_text(report):
        console.print(f"\n{budget_text(report)}", markup=False)
    if report.latency:
        console.print()
        console.print(plain_table(*latency_table(report.latency)))
        console.print(latency_text(report.latency), markup=False, style="dim")


def head_map_text(marks: Mapping[str, str], *, unit: str = "head") -> Text:
    """Return a map for the terminal, layers down and units across.

    Args:
        marks: Module -> one mark per unit, as `head_map` returns them.
        unit: What a mark stands for.
    """
    text = Text()
    text.append(f"{unit}s  ", style="bold")
    text.append(f"{KEPT} kept  ", style="green")
    text.append(f"{CUT} cut", style="red")
    for index, (name, line) in enumerate(marks.items()):
        text.append(f"\n  {index:>3}  ", style="dim")
        for mark in line:
            text.append(mark + " ", style="green" if mark == KEPT else "red")
        text.append(f" {line.count(KEPT):>2} of {len(line)}  {name}", style="dim")
    return text


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for the terminal: no frame, the first column left, the others right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(header):
        table.add_column(Text(name), justify="right" if index else "left", no_wrap=bool(index))
    for row in rows:
        # Not as strings, in which "[bold]" would be markup.
        table.add_row(*map(Text, row))
    return table
