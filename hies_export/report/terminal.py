"""The report, and any table or map, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
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

# Spaces between two columns.
GAP = 2


def print_report(report: Report, console: Console) -> None:
    """Print the first sentence, the maps of what was cut, and the tables."""
    console.print(f"\n{lead_text(report)}", markup=False, style="bold", soft_wrap=True)
    for units in unit_maps(report):
        console.print()
        console.print(map_text(units))
    console.print()
    console.print(PlainTable(*comparison_table(report)))
    tried = tried_table(report)
    if tried:
        console.print(f"\nwhat was tried, on {held_out_rows(report)}", markup=False)
        console.print(PlainTable(*tried))
        console.print(tried_text(report), markup=False, style="dim", soft_wrap=True)
    if alpha_text(report):
        console.print(f"\non {held_out_rows(report)}: {alpha_text(report)}", markup=False, soft_wrap=True)
    if budget_text(report):
        console.print(f"\n{budget_text(report)}", markup=False)
    if family_text(report):
        console.print(f"\n{family_text(report)}", markup=False)
    if report.latency:
        console.print()
        console.print(PlainTable(*latency_table(report.latency)))
        console.print(latency_text(report.latency), markup=False, style="dim")
    forms = forms_table(report)
    if forms:
        console.print()
        console.print(PlainTable(*forms))
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


class PlainTable:
    """A table without a frame; a string is shown as it is, brackets included.

    Columns that do not fit side by side follow below, with the first column repeated.
    """

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
        # A table would read "[bold]" in a string as markup.
        lines = [[Text(cell) if isinstance(cell, str) else cell for cell in line] for line in (header, *rows)]
        self._columns = list(zip(*lines, strict=True))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, *columns = self._columns
        widths = [GAP + max(cell.cell_len for cell in column) for column in columns]
        longest_name = max(cell.cell_len for cell in names)
        longest_word = max((len(word) for cell in names for word in cell.plain.split()), default=0)
        # Names are folded if all columns then fit side by side.
        room = options.max_width - sum(widths)
        left = min(longest_name, room if room >= longest_word else max(longest_word, options.max_width // 2))
        parts: list[list[Sequence[Text]]] = [[]]
        used = left
        for column, width in zip(columns, widths, strict=True):
            if parts[-1] and used + width > options.max_width:
                parts.append([])
                used = left
            parts[-1].append(column)
            used += width
        for index, part in enumerate(parts):
            if index:
                yield Text()
            yield _table(names, left, part)


def _table(names: Sequence[Text], width: int, columns: Sequence[Sequence[Text]]) -> Table:
    """Return one table: `names` folded to `width` characters, then the columns, each headed by its first text."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column(names[0], width=width)
    for header, *_ in columns:
        table.add_column(header, justify="right")
    for row in zip(names[1:], *(column[1:] for column in columns), strict=True):
        table.add_row(*row)
    return table
