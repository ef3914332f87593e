"""What `bench` found, read from its JSON: tables of comparisons, for the terminal and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .latency import latency_figure, latency_note, latency_table
from .page import folded, page, table
from .report import Report, environment_text, plain_table


@dataclass(frozen=True)
class BenchTable:
    """Comparisons of one kind.

    Attributes:
        title: What is compared.
        names: What the two are called.
        rows: As in report.json's `latency`; with `model` where there are several.
    """

    title: str
    names: tuple[str, str]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Bench:
    """Comparisons, what was not measured and why, and where.

    Attributes:
        title: What was measured.
        tables: The comparisons.
        missing: A sentence for each thing that was to be measured and was not.
        environment: Hardware and library versions.
    """

    title: str
    tables: Sequence[BenchTable]
    missing: Sequence[str]
    environment: Mapping[str, Any]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Bench:
        """From what `hies-export bench --json` prints, or what bench/gpu.py writes."""
        if "tables" in values:
            tables = [BenchTable(t["title"], tuple(t["names"]), t["rows"]) for t in values["tables"]]
            return cls(values["title"], tables, values["missing"], values["environment"])
        title = f"A {values['a']}, B {values['b']}"
        return cls(title, [BenchTable("Latency", ("A", "B"), values["latency"])], (), values["environment"])


def read_report(path: str | Path) -> Report | Bench:
    """A run's report, or what a bench wrote.

    Args:
        path: A run's folder, its report.json, or the JSON of `hies-export bench --json`.

    Raises:
        RequestError: It is none of these.
    """
    path = Path(path)
    try:
        return Bench.from_values(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return Report.from_file(path)


def print_bench(bench: Bench, console: Console) -> None:
    """Print the tables on a terminal."""
    console.print(bench.title, markup=False, style="bold", soft_wrap=True)
    for part in bench.tables:
        if part.rows:
            console.print(f"\n{part.title}", markup=False)
            console.print(plain_table(*latency_table(part.rows, part.names)))
            console.print(latency_note(part.rows, part.names), style="dim")
    for sentence in bench.missing:
        console.print(f"not measured: {sentence}", markup=False, soft_wrap=True)
    console.print(environment_text(bench.environment), style="dim")


def render_bench(bench: Bench) -> str:
    """The same as one self-contained HTML page."""
    sections = [
        (
            part.title,
            f"{latency_figure(part.rows, part.names)}<p class=muted>{latency_note(part.rows, part.names)}</p>"
            + folded("All numbers", table(*latency_table(part.rows, part.names))),
        )
        for part in bench.tables
        if part.rows
    ]
    if bench.missing:
        sections.append(("Not measured", table(["", ""], [[sentence] for sentence in bench.missing])))
    environment = [[name, str(value)] for name, value in bench.environment.items() if value is not None]
    sections.append(("Where", folded("Environment", table(["", ""], environment), wrap=True)))
    return page(bench.title, environment_text(bench.environment), sections)
