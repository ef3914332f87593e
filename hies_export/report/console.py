"""The report, and any table or map, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from .lead import lead_text
from .maps import CUT, KEPT, UnitMap, unit_maps
from .report import Report
from .tables import Table, report_parts

# Spaces between two columns.
GAP = 2


def print_report(report: Report, console: Console) -> None:
    """Print the first sentence, the maps of what was cut, and the tables."""
    console.print(f"\n{lead_text(report)}", markup=False, style="bold", soft_wrap=True)
    for units in unit_maps(report.details.head_map, report.details.neurons):
        console.print()
        console.print(map_text(units, console.width))
    parts = report_parts(report)
    for name in ("changed", "family", "chosen", "latency", "served"):
        if part := parts.get(name):
            print_table(console, part.heading if name == "chosen" else "", part.table, *part.notes)


def print_table(console: Console, title: str, table: Table | None, *notes: str) -> None:
    """Print a table between its title and notes, after an empty line."""
    console.print(f"\n{title}" if title else "", markup=False)
    if table is not None:
        console.print(PlainTable(*table))
    for note in filter(None, notes):
        console.print(note, markup=False, style="dim")


def map_text(units: UnitMap, width: int) -> Text:
    """Return a map for a terminal: a line of marks per layer, how many units the layer keeps, and its name.

    A name that does not fit into the width loses its beginning.
    """
    text = Text()
    text.append(f"{units.unit}s  ", style="bold")
    text.append(f"{KEPT} kept  ", style="green")
    text.append(f"{CUT} cut", style="red")
    digits = max(2, *(len(f"{line.kept:,}") for line in units.lines))
    for index, line in enumerate(units.lines):
        text.append(f"\n  {index:>3}  ", style="dim")
        for mark in line.marks:
            text.append(mark, style={KEPT: "green", CUT: "red"}.get(mark, ""))
        counts = f"  {line.kept:>{digits},} of {line.total:,}  "
        room = max(width - 7 - len(line.marks) - len(counts), 8)
        name = line.module if len(line.module) <= room else f"…{line.module[1 - room :]}"
        text.append(f"{counts}{name}", style="dim")
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


def _table(names: Sequence[Text], width: int, columns: Sequence[Sequence[Text]]) -> RichTable:
    """Return one table: `names` folded to `width` characters, then the columns, each headed by its first text."""
    table = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column(names[0], width=width)
    for header, *_ in columns:
        table.add_column(header, justify="right")
    for row in zip(names[1:], *(column[1:] for column in columns), strict=True):
        table.add_row(*row)
    return table
