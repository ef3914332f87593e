"""Comparisons of models in time: read from JSON, shown on a terminal or as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass
from rich.console import Console

from ..files import Rule, check, read_json
from ..forms.measured import LatencyRow
from .drawing import Scale
from .html import render
from .report import REPORT, Report
from .tables import environment_table, latency_table, print_table
from .words import environment_text, latency_text


@dataclass(frozen=True, eq=False, kw_only=True)
class BenchRow(LatencyRow):
    """A row of latency, with the name of the model in a table of several."""

    model: str


_BENCH = Rule("a comparison must be JSON that hies_export wrote", "measure again", shown=True)


@dataclass(frozen=True)
class BenchTable:
    """Comparisons of one kind, of the models `names`."""

    title: str
    names: tuple[str, str]
    # A row with a model is a BenchRow: pydantic keeps the member of a union that takes most of the given fields.
    rows: Sequence[BenchRow | LatencyRow]


@dataclass(frozen=True)
class Bench:
    """Comparisons, a sentence for each requested one that was not measured, and the environment."""

    title: str
    tables: Sequence[BenchTable]
    missing: Sequence[str]
    environment: Mapping[str, Any]

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str | Path = "it") -> Bench:
        """Read tables, or one comparison of `a` and `b`; `where` names the file in refusals."""
        if "tables" not in values:
            table = {"title": "Latency", "names": ("A", "B"), "rows": values.get("latency")}
            title, environment = f"A {values['a']}, B {values['b']}", values.get("environment")
            values = {"title": title, "tables": [table], "missing": (), "environment": environment}
        bench: Bench = check(values, cls, _BENCH, where=str(where))
        return bench


def read_report(path: str | Path) -> Report | Bench:
    """Read a run's report, from its folder or report.json, or the JSON of a comparison."""
    path = Path(path)
    if path.is_dir():
        return Report.from_file(path)
    values = read_json(path, dict[str, Any], REPORT)
    if "tables" in values or {"a", "b"} <= set(values):
        return Bench.from_values(values, where=path)
    return Report.from_values(values, where=path)


def print_bench(bench: Bench, console: Console) -> None:
    """Print the tables on a terminal."""
    console.print(bench.title, markup=False, style="bold", soft_wrap=True)
    for part in bench.tables:
        if part.rows:
            table, note = latency_table(part.rows, part.names), latency_text(part.rows, part.names)
            print_table(console, part.title, table, note)
    for sentence in bench.missing:
        console.print(f"not measured: {sentence}", markup=False, soft_wrap=True)
    console.print(environment_text(bench.environment), markup=False, style="dim")


def render_bench(bench: Bench) -> str:
    """Return the same as one self-contained HTML page."""
    return render(
        "bench.html.j2",
        title=bench.title,
        subtitle=environment_text(bench.environment),
        parts=[part for part in bench.tables if part.rows],
        place=Scale.of,
        note=latency_text,
        numbers=latency_table,
        missing=bench.missing,
        environment=environment_table(bench.environment),
    )
