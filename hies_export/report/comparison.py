"""A comparison of two models in time: read from JSON, shown on a terminal or as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass
from rich.console import Console

from ..files import Rule, check, read_json
from ..forms.time import TimedRow
from .html import render
from .report import REPORT, Report
from .tables import Part, latency_table, print_part
from .words import environment_text, latency_text

# What the two models are called in tables.
NAMES = ("A", "B")
_BENCH = Rule("a comparison must be JSON that hies_export wrote", "measure again", shown=True)


@dataclass(frozen=True)
class Bench:
    """Times of two models, `a` and `b`; the environment is what they were measured with."""

    a: str
    b: str
    latency: Sequence[TimedRow]
    environment: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The names of the two models, A and B."""
        return f"A {self.a}, B {self.b}"

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str | Path = "it") -> Bench:
        """Return the comparison with the fields of its JSON; a RequestError, which names `where`, refuses others."""
        return check(values, cls, _BENCH, where=str(where))


def read_report(path: str | Path) -> Report | Bench:
    """Return a run's report, of its folder or report.json, or a comparison, of its JSON; or raise RequestError."""
    path = Path(path)
    if path.is_dir():
        return Report.from_file(path)
    values = read_json(path, dict[str, Any], REPORT)
    if {"a", "b"} <= set(values):
        return Bench.from_values(values, where=path)
    return Report.from_values(values, where=path)


def print_bench(bench: Bench, console: Console) -> None:
    """Print the comparison on a terminal."""
    console.print(bench.title, markup=False, style="bold", soft_wrap=True)
    if rows := bench.latency:
        print_part(Part("Latency", latency_table(rows, NAMES), (latency_text(rows, NAMES),)), console)
    console.print(environment_text(bench.environment), markup=False, style="dim")


def render_bench(bench: Bench) -> str:
    """Return the comparison as one self-contained HTML page."""
    subtitle = environment_text(bench.environment)
    return render("bench.html.j2", bench=bench, names=NAMES, title=bench.title, subtitle=subtitle)
