"""Comparisons of models in time: read from JSON, shown on a terminal or as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass
from rich.console import Console

from ..files import Rule, check, read_json
from ..forms.measured import LatencyRow
from .html import render
from .report import REPORT, Report
from .tables import latency_table, print_table
from .words import environment_text, latency_text


@dataclass(frozen=True, eq=False, kw_only=True)
class BenchRow(LatencyRow):
    """A row of latency, with the name of the model in a table of several."""

    model: str


_BENCH = Rule("a comparison must be JSON that hies_export wrote", "measure again", shown=True)


@dataclass(frozen=True)
class BenchTable:
    """Comparisons of one kind."""

    title: str
    names: tuple[str, str]  # of the two models of each row
    # A row with a model is a BenchRow: pydantic keeps the member of a union that takes most of the given fields.
    rows: Sequence[BenchRow | LatencyRow]


@dataclass(frozen=True)
class Bench:
    """Comparisons of models in time."""

    title: str
    tables: Sequence[BenchTable]
    missing: Sequence[str]  # a sentence for each comparison that was asked for and not measured
    environment: Mapping[str, Any]

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str | Path = "it") -> Bench:
        """Return the content of the JSON of tables, or of one comparison of `a` and `b`, after a check.

        A RequestError, in which `where` names the file, refuses other JSON.
        """
        if "tables" not in values:
            table = {"title": "Latency", "names": ("A", "B"), "rows": values.get("latency")}
            title, environment = f"A {values['a']}, B {values['b']}", values.get("environment")
            values = {"title": title, "tables": [table], "missing": (), "environment": environment}
        bench: Bench = check(values, cls, _BENCH, where=str(where))
        return bench


def read_report(path: str | Path) -> Report | Bench:
    """Return a run's report, given its folder or report.json, or a comparison, given its JSON.

    A RequestError refuses other files.
    """
    path = Path(path)
    if path.is_dir():
        return Report.from_file(path)
    values = read_json(path, dict[str, Any], REPORT)
    if "tables" in values or {"a", "b"} <= set(values):
        return Bench.from_values(values, where=path)
    return Report.from_values(values, where=path)


def print_bench(bench: Bench, console: Console) -> None:
    """Print the comparisons on a terminal."""
    console.print(bench.title, markup=False, style="bold", soft_wrap=True)
    for part in bench.tables:
        if part.rows:
            compared = part.rows, part.names
            print_table(console, part.title, latency_table(*compared), latency_text(*compared))
    for sentence in bench.missing:
        console.print(f"not measured: {sentence}", markup=False, soft_wrap=True)
    console.print(environment_text(bench.environment), markup=False, style="dim")


def render_bench(bench: Bench) -> str:
    """Return the comparisons as one self-contained HTML page."""
    return render("bench.html.j2", bench=bench, title=bench.title, subtitle=environment_text(bench.environment))
