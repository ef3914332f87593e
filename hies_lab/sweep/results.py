"""Write the rows of a sweep as JSON and CSV, and as tables of criteria by budget in Markdown."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table as RichTable
from rich.text import Text

from hies_export.checkpoint.folders import replace_file
from hies_export.evaluate.metrics import higher_is_better
from hies_export.report.html import escape_markdown
from hies_export.report.tables import plain_table
from hies_export.select.plan import dump_json

from ..baselines.names import DIFFERENCES, OWN_SAMPLES
from .schemas import REMOVES

Row = Mapping[str, Any]

COMPENSATIONS = {
    "none": "no compensation",
    "bias": "bias",
    "scalars": "scalars",
    "least_squares": "least squares",
    "weighted": "weighted least squares",
    "sequential": "least squares layer by layer",
}


class Number(NamedTuple):
    """The mean or the gain at a budget as text, empty where there is none; its standard deviation over seeds.

    `rank` is 0 for the best mean of a column, 1 for the second, else None; equal means share a rank.
    """

    text: str = ""
    spread: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class SweepTable:
    """A table of one quantity: a row per method, then its gain over HIS for each HIES method, a column per budget.

    `means` has the mean of each method at each budget, None where the sweep has no such row. `differences`: criterion
    -> how it differs from the published one.
    """

    title: str
    budget: str
    budgets: tuple[float, ...]
    means: Mapping[str, Sequence[float | None]]
    lines: Mapping[str, Sequence[Number]]
    differences: Mapping[str, str]


def write_results(folder: Path, rows: Sequence[Row], *, details: Mapping[str, Any]) -> None:
    """Write sweep.json, details.json, sweep.csv and tables.md, each atomically."""
    tables = sweep_tables(rows)
    files = {
        "details.json": dump_json(details),
        "sweep.csv": render_csv(rows),
        "tables.md": render_markdown(tables),
        # Last, so that if it exists, the others do too.
        "sweep.json": dump_json(list(rows)),
    }
    for name, text in files.items():
        replace_file(folder / name, text)


def budget_of(row: Row) -> float:
    """Return the budget of a row: the share of FLOPs left, or of heads removed."""
    flops = row.get("flops_target")
    return float(row["sparsity"] if flops is None else flops)


def share_text(share: float) -> str:
    """Return a budget as text: "30%", "12.5%"."""
    return f"{100 * share:.4g}%"


def budget_name(rows: Sequence[Row]) -> str:
    """Return the quantity that the budgets of a sweep are shares of."""
    return "heads removed" if rows[0].get("flops_target") is None else "FLOPs left"


def budgets_of(rows: Sequence[Row]) -> list[float]:
    """Return the budgets of all rows, the smallest cut first."""
    return sorted({budget_of(row) for row in rows}, reverse=budget_name(rows) == "FLOPs left")


def modules_label(row: Row) -> str:
    """Return the kinds that lose units in a row, in words; older rows have only heads."""
    return REMOVES[row.get("modules") or "attention"]


def method_label(row: Row, rows: Sequence[Row]) -> str:
    """Return the label of a row's method: its criterion, and the options in which rows differ."""
    parts = []
    if len({r.get("modules", "attention") for r in rows}) > 1:
        parts.append(modules_label(row))
    if row.get("alpha_by") == "given":
        parts.append(f"α {row['alpha']:g}")
    elif row.get("alpha_by") is not None:
        parts.append("α auto" if row.get("alpha_by") == "auto" else "one α for all")
    sizes = {r["calibration_samples"] for r in rows if r["criterion"] == row["criterion"]}
    # Criteria with a number of samples of their own take as many as reach their tokens, which differ by seed.
    if len(sizes) > 1 and row["criterion"] not in OWN_SAMPLES:
        parts.append(f"{row['calibration_samples']} samples")
    label = row["criterion"] + (f" ({', '.join(parts)})" if parts else "")
    return label + (f" + {COMPENSATIONS[row['compensation']]}" if row["compensation"] != "none" else "")


def line_name(row: Row, rows: Sequence[Row]) -> str:
    """Return the label of a row's method without compensation and samples; with its modules, if rows differ there."""
    label = method_label({**row, "compensation": "none"}, [row])
    several = len({r.get("modules") for r in rows}) > 1
    return f"{label}, {modules_label(row)}" if several else label


def of_first_size(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first calibration size, and those of criteria with their own number of samples."""
    size = next((r["calibration_samples"] for r in rows if r["criterion"] not in OWN_SAMPLES), None)
    return [r for r in rows if r["calibration_samples"] == size or r["criterion"] in OWN_SAMPLES]


def grouped(rows: Sequence[Row]) -> dict[str, dict[float, list[Row]]]:
    """Return method -> budget -> the rows of all seeds, in their order."""
    found: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        found.setdefault(method_label(row, rows), {}).setdefault(budget_of(row), []).append(row)
    return found


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds; None for one seed, or if a perplexity is infinite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def percent(metric: str) -> float:
    """Return the factor of a metric in tables and figures: 100, or 1 for perplexity, which is not a share."""
    return 1.0 if metric in ("perplexity", "nats_per_character") else 100.0


def sweep_tables(rows: Sequence[Row]) -> list[SweepTable]:
    """Return the table of quality and the table of stability, laid out as Tables 1 and 2 of the HIES paper."""
    metric = rows[0]["metric"]
    scale = percent(metric)
    unit = ", x 100" if scale > 1 else ""
    dense = rows[0]["quality_dense"] * scale
    return [
        _table(rows, "quality", f"Quality: {metric}{unit}; dense {dense:.2f}", scale, higher_is_better(metric)),
        _table(rows, "stability", "Stability: predictions equal to the dense model's, %", 100.0, True),
    ]


def _table(rows: Sequence[Row], quantity: str, title: str, scale: float, higher_is_better: bool) -> SweepTable:
    """Return the table of a quantity, its values multiplied by `scale`."""
    budgets, by_method = tuple(budgets_of(rows)), grouped(rows)
    values = {
        method: [[scale * row[quantity] for row in by_budget.get(budget, ())] for budget in budgets]
        for method, by_budget in by_method.items()
    }
    means = {method: [statistics.fmean(of) if of else None for of in columns] for method, columns in values.items()}
    lines: dict[str, list[Number]] = {method: [] for method in means}
    for column in range(len(budgets)):
        known = {round(mean, 10) for of in means.values() if (mean := of[column]) is not None}
        best = sorted(known, reverse=higher_is_better)[:2]
        for method, of in means.items():
            if (mean := of[column]) is None:
                lines[method].append(Number())
                continue
            rank = best.index(place) if (place := round(mean, 10)) in best else None
            spread = deviation(values[method][column])
            lines[method].append(Number(f"{mean:.2f}", "" if spread is None else f"{spread:.2f}", rank))
    for method, by_budget in by_method.items():
        row = next(iter(by_budget.values()))[0]
        base = means.get(method_label({**row, "criterion": "his", "alpha": None, "alpha_by": None}, rows))
        if row["criterion"] == "hies" and base is not None:
            pairs = zip(means[method], base, strict=True)
            lines[f"gain of {method}"] = [Number(_gain(hies, his, higher_is_better)) for hies, his in pairs]
    differences = {row["criterion"]: DIFFERENCES[row["criterion"]] for row in rows if row["criterion"] in DIFFERENCES}
    return SweepTable(title, budget_name(rows), budgets, means, lines, differences)


def _gain(hies: float | None, his: float | None, higher_is_better: bool) -> str:
    """Return by how much HIES is better than HIS, in percent of HIS; empty if either is missing or no finite number."""
    if hies is None or his is None or his == 0 or not (math.isfinite(hies) and math.isfinite(his)):
        return ""
    change = 100 * (hies - his) / abs(his)
    return f"{change if higher_is_better else -change:+.1f}%"


def render_csv(rows: Sequence[Row]) -> str:
    """Return all rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def render_markdown(tables: Sequence[SweepTable]) -> str:
    """Return the tables as Markdown; in every column the best value is bold, the second best underlined."""
    parts = []
    for table in tables:
        lines = [
            f"| {table.budget} | " + " | ".join(map(share_text, table.budgets)) + " |",
            "| --- |" + " ---: |" * len(table.budgets),
        ]
        for method, cells in _cells(table, ("**{}**", "<u>{}</u>")):
            lines.append(f"| {escape_markdown(method)} | " + " | ".join(cells) + " |")
        parts.append(f"### {escape_markdown(table.title)}\n\n" + "\n".join(lines) + "\n")
    note = "Mean ± standard deviation over seeds. Best bold, second underlined; gains are relative to HIS.\n"
    differences = [f"- {name} differs from the original: {how}.\n" for name, how in tables[0].differences.items()]
    return "\n".join(parts) + "\n" + note + "".join(["\n", *differences] if differences else [])


def terminal_table(table: SweepTable) -> RichTable:
    """Return a table for the terminal; in every column the best value is bold, the second best underlined."""
    lines = _cells(table, ("[bold]{}[/bold]", "[underline]{}[/underline]"))
    return plain_table(
        (table.budget, *map(share_text, table.budgets)),
        [(method, *map(Text.from_markup, cells)) for method, cells in lines],
    )


def _cells(table: SweepTable, marks: tuple[str, str]) -> list[tuple[str, list[str]]]:
    """Return the lines of a table, each a label and one text per budget, the two best in each column in their marks."""

    def text(number: Number) -> str:
        marked = number.text or "–" if number.rank is None else marks[number.rank].format(number.text)
        return marked + (f" ± {number.spread}" if number.spread else "")

    return [(label, [text(number) for number in numbers]) for label, numbers in table.lines.items()]
