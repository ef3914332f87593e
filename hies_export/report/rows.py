"""The tables that every rendering shows, and the maps of which units were removed, as text in rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..measure.counts import Both
from ..measure.rows import LatencyRow
from ..values import PruningPlan
from .report import Report
from .text import agreement

KEPT, CUT = "■", "·"
FLOP_PARTS = ("projections", "products", "other")


class Table(NamedTuple):
    """A table as text: the names of its columns, and its rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class UnitMap:
    """Which units of every module stay, and what was computed of each.

    Attributes:
        unit: What a mark stands for.
        marks: Module -> one mark per unit, `KEPT` or `CUT`.
        numbers: Module -> name -> one number per unit; what was not computed is missing.
    """

    unit: str
    marks: Mapping[str, str]
    numbers: Mapping[str, Mapping[str, Sequence[float]]]

    @property
    def kept_per_layer(self) -> list[int]:
        """Units that each module keeps."""
        return [line.count(KEPT) for line in self.marks.values()]


class SizeRow(NamedTuple):
    """A size of both models with its unit, the change in percent, and the slim model's share of the dense one's."""

    name: str
    dense: str
    slim: str
    change: str
    ratio: float


def head_map(plan: PruningPlan) -> dict[str, str]:
    """Return one mark per head of every attention module: ■ kept, · cut."""
    return {
        name: "".join(KEPT if head in kept.query else CUT for head in range(kept.heads))
        for name, kept in plan.kept.items()
    }


def unit_maps(report: Report) -> tuple[UnitMap, ...]:
    """Return a map for every kind of unit that the run could remove. Every rendering draws all of them."""
    return (UnitMap("head", report.details["head_map"], report.details.get("heads", {})),)


def size_rows(report: Report) -> list[SizeRow]:
    """Return the sizes of both models, from parameters to the cache."""
    batch, sequence = report.flops.shape
    sizes: list[tuple[str, Both[Any] | None, str]] = [
        ("parameters", report.parameters, ""),
        ("checkpoint weights", report.bytes, "B"),
        (f"FLOPs at {batch} x {sequence}", report.flops, ""),
        ("cache per token", report.cache_bytes_per_token, "B"),
    ]
    return [
        SizeRow(name, si(size.dense) + unit, si(size.slim) + unit, _change(size.dense, size.slim), size.ratio)
        for name, size, unit in sizes
        if size is not None
    ]


def comparison_table(report: Report) -> Table:
    """Return everything that both models have a value of: heads, sizes, the first metric, stability, benchmarks."""
    heads, quality = report.heads, report.quality
    before = report.details.get("uncompensated")
    rows = [
        ("attention heads", f"{heads.total}", f"{heads.kept}", _change(heads.total, heads.kept)),
        *(size[:4] for size in size_rows(report)),
        _quality_row(quality.metric, quality),
        (agreement(report), "", f"{report.stability:.1%}", ""),
        *(_quality_row(name, values) for name, values in report.details.get("benchmarks", {}).items()),
    ]
    if before:
        metric = quality.metric
        rows.append((f"{metric} before compensation", "", f"{before['metrics'][metric]:.4f}", ""))
        rows.append((f"{agreement(report)} before compensation", "", f"{before['stability']:.1%}", ""))
    return Table(("", "dense", "slim", "change"), rows)


def quality_table(report: Report) -> Table:
    """Return all metrics, benchmarks and the stability; where heads were compensated, also those of the cut alone."""
    metrics = report.details.get("metrics") or {report.quality.metric: report.quality}
    before = report.details.get("uncompensated")
    alone = before["metrics"] if before else {}
    rows = [
        [*_quality_row(name, values), f"{alone[name]:.4f}" if alone.get(name) is not None else ""]
        for name, values in {**metrics, **report.details.get("benchmarks", {})}.items()
    ]
    rows.append([agreement(report), "", f"{report.stability:.1%}", "", f"{before['stability']:.1%}" if before else ""])
    columns = 5 if before else 4
    return Table(("", "dense", "slim", "change", "cut alone")[:columns], [row[:columns] for row in rows])


def check_table(report: Report) -> Table:
    """Return the largest differences that the checks of a run found."""
    rows = [
        ("cut model against masked model", f"{report.cut_max_abs:.2g}"),
        ("reloaded checkpoint against saved model", f"{report.reload_max_abs:.2g}"),
        ("ONNX Runtime against torch", f"{report.onnx_max_abs:.2g}"),
    ]
    return Table(("largest difference of any output", ""), rows)


def environment_table(environment: Mapping[str, Any]) -> Table:
    """Return what is known of the hardware and the libraries."""
    return Table(("", ""), [(name, str(value)) for name, value in environment.items() if value is not None])


def latency_table(rows: Sequence[LatencyRow], names: tuple[str, str] = ("dense", "slim")) -> Table:
    """Return medians, the paired ratio beside the control's, and what else the rows know; empty columns are left out.

    Args:
        rows: Of a report or a bench.
        names: What the two models are called.
    """
    first, second = names
    columns: dict[str, Callable[[LatencyRow], str]] = {
        "": lambda row: row.get("model", ""),
        "median latency": row_name,
        first: lambda row: f"{row.dense_ms:.2f} ms",
        second: lambda row: f"{row.slim_ms:.2f} ms",
        f"{second} / {first} [95 %]": ratio_text,
        f"{first} / {first}": lambda row: f"[{row.control_low:.3f}, {row.control_high:.3f}]",
        # A decode step has no realised share, and only a decode step has tokens per second.
        "realised" + ", tokens/s" * any(row.tokens_per_second for row in rows): _realised,
        "device GB": lambda row: pair_text(row.peak_bytes, scale=1e-9),
    }
    shown = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    shown = {name: cells for name, cells in shown.items() if any(cells)}
    return Table(list(shown), [list(row) for row in zip(*shown.values(), strict=True)])


def percentile_table(rows: Sequence[LatencyRow]) -> Table:
    """Return the percentiles of the times in milliseconds, and the realised share."""

    def milliseconds(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    header = ("milliseconds", "dense p50", "slim p50", "dense p90", "slim p90", "realised")
    return Table(
        header,
        [
            [
                row_name(row),
                *map(milliseconds, (row.dense_ms, row.slim_ms, row.dense_p90_ms, row.slim_p90_ms)),
                "noisy" if row.noisy else "" if row.realised is None else f"{row.realised:.0%}",
            ]
            for row in rows
        ],
    )


def layer_table(dense: Sequence[Mapping[str, Any]], slim: Sequence[Mapping[str, Any]] | None = None) -> Table:
    """Return the MFLOPs of every layer, and their sums.

    Args:
        dense: From `flops_per_layer`.
        slim: The same of the slim model; a cell then shows both numbers, "dense → slim".
    """
    models = [list(rows) for rows in (dense, slim) if rows is not None]
    sums = [{"layer": "all", **{part: sum(row[part] for row in rows) for part in FLOP_PARTS}} for rows in models]
    lines = []
    for rows in (*zip(*models, strict=True), tuple(sums)):
        cells = [[row[part] for row in rows] for part in FLOP_PARTS]
        cells.append([sum(row[part] for part in FLOP_PARTS) for row in rows])
        shown = [" → ".join(dict.fromkeys(f"{value / 1e6:.4g}" for value in cell)) for cell in cells]
        lines.append([rows[0]["layer"] or "outside the layers", *shown])
    return Table(("MFLOPs", "projections", "attention products", "other", "all"), lines)


def row_name(row: LatencyRow) -> str:
    """Return runtime and shape of a row, its phase where a model generates, its precision if it is not float32."""
    phase = "" if row.phase == "forward" else f" {row.phase}"
    dtype = "" if row.dtype == "float32" else f" {row.dtype}"
    return f"{row.runtime} {row.batch} x {row.sequence}{phase}{dtype}"


def ratio_text(row: LatencyRow) -> str:
    """Return the ratio of a row with its interval, or "noisy"."""
    return "noisy" if row.noisy else f"{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"


def pair_text(values: Both[Any] | None, *, scale: float = 1.0) -> str:
    """Return "dense → slim" of two numbers, multiplied by `scale`; empty without numbers."""
    numbers = [values.dense * scale, values.slim * scale] if values else []
    return " → ".join(f"{number:.0f}" if number >= 100 else f"{number:.3g}" for number in numbers)


def si(number: float) -> str:
    """Return a number with three significant digits and an SI prefix."""
    power = min(max(0, (len(str(int(number))) - 1) // 3), 4)
    scaled = number / 1000**power
    return f"{scaled:.{max(0, 3 - len(str(int(scaled))))}f} {' kMGT'[power]}".rstrip() + " " * (power == 0)


def _realised(row: LatencyRow) -> str:
    """Return tokens per second of a decode step, else the share of the saved FLOPs that was saved in time."""
    if row.tokens_per_second:
        return pair_text(row.tokens_per_second)
    if row.realised is None or row.noisy:
        return ""
    return f"{row.realised:.0%}" + (f" of {1 - row.flops_ratio:.1%}" if row.flops_ratio else "")


def _quality_row(name: str, values: Mapping[str, Any]) -> tuple[str, str, str, str]:
    dense, slim = values["dense"], values["slim"]
    return name, f"{dense:.4f}", f"{slim:.4f}", f"{slim - dense:+.4f}"


def _change(dense: float, slim: float) -> str:
    return f"{(slim - dense) / dense:+.1%}"
