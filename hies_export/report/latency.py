"""Rows of latency as a table for people, and as the figure of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

Row = Mapping[str, Any]


def row_name(row: Row) -> str:
    """Runtime and shape of a row, its phase where a model generates, and its dtype where it is not float32."""
    name = f"{row['runtime']} {row['batch']} x {row['sequence']}"
    name += f" {row['phase']}" if row.get("phase", "forward") != "forward" else ""
    return name + (f" {row['dtype']}" if row.get("dtype", "float32") != "float32" else "")


def latency_table(rows: Sequence[Row], names: tuple[str, str] = ("dense", "slim")) -> tuple[list[str], list[list[str]]]:
    """Header and lines: medians, the paired ratio beside the control's, and what else the rows know.

    Args:
        rows: As in report.json's `latency`; with `model` where there are several.
        names: What the two that are compared are called.
    """
    first, second = names
    columns: dict[str, Callable[[Row], str]] = {
        "": lambda row: row.get("model", ""),
        "median latency": row_name,
        first: lambda row: f"{row['dense_ms']:.2f} ms",
        second: lambda row: f"{row['slim_ms']:.2f} ms",
        f"{second} / {first} [95 %]": ratio_text,
        f"{first} / {first}": lambda row: f"[{row['control_low']:.3f}, {row['control_high']:.3f}]",
        # Of a step there is no realised share, and only a step makes tokens.
        "realised" + ", tokens/s" * any(row.get("tokens_per_second") for row in rows): _gain,
        "device GB": lambda row: _pair(row.get("peak_bytes"), scale=1e-9),
    }
    shown = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    shown = {name: cells for name, cells in shown.items() if any(cells)}
    return list(shown), [list(line) for line in zip(*shown.values(), strict=True)]


def ratio_text(row: Row) -> str:
    """The ratio of a row with its interval; a noisy one has none."""
    return "noisy" if row.get("noisy") else _with_interval(row, "ratio", "ratio_low", "ratio_high")


def latency_note(rows: Sequence[Row], names: tuple[str, str] = ("dense", "slim")) -> str:
    """How latency was measured, and the control's range."""
    first = names[0]
    controls = [row["control_ratio"] for row in rows]
    # Copies of one model differ in time, and the interval is also over those.
    anew = [f"{row['loads']} times on {row['runtime']}" for row in rows if row.get("loads", 1) > 1]
    loaded = f"The models were loaded anew {' and '.join(dict.fromkeys(anew))}. " if anew else ""
    said = [
        f"Timed interleaved in one process with two copies of {first}; the ratio is the median of paired ratios to "
        f"their mean, and its 95 % interval is that of a bootstrap over loads, copies and runs. {loaded}"
        f"The control, {first} against itself, gave {min(controls):.3f} to {max(controls):.3f}."
    ]
    if any(row.get("noisy") for row in rows):
        said.append(
            "Where its interval misses 1 by more than 2 %, or is wider than 10 %, the row is noisy, and its ratio says "
            "nothing: measure again on an idle machine."
        )
    if any(row.get("phase") == "decode" for row in rows):
        said.append("Decode: the step of a row's last token, with the others in the cache.")
    if any(row["realised"] is not None for row in rows):
        said.append("Realised: the share of the FLOPs saving that became time.")
    if any(row.get("cuda_graph") for row in rows):
        graphs = sorted({row["runtime"] for row in rows if row.get("cuda_graph")})
        said.append(f"CUDA graphs were replayed by {', '.join(graphs)}.")
    return " ".join(said)


def latency_figure(rows: Sequence[Row], names: tuple[str, str] = ("dense", "slim")) -> str:
    """Per row the paired ratio with its interval, over the control's interval around 1, as HTML."""
    first, second = names
    ends = [row[key] for row in rows for key in ("ratio_low", "control_low", "ratio_high", "control_high")]
    low, high = min(0.95, *ends), max(1.05, *ends)
    # One noisy row must not squeeze all the others.
    low, high = max(low, 0.3) - 0.02, min(high, 1.5) + 0.02

    def x(ratio: float) -> float:
        return 100 * (min(max(ratio, low), high) - low) / (high - low)

    out = []
    for row in rows:
        what = escape(row_name(row)).replace(" x ", " × ")
        head, rest = (escape(row["model"]), what) if row.get("model") else what.split(" ", 1)
        name = f"<span>{head} <span class=muted>{rest}</span></span>"
        times = f"{row['dense_ms']:.1f} → {row['slim_ms']:.1f} ms"
        if row.get("tokens_per_second"):
            times += f", {_pair(row['tokens_per_second'])} tokens/s"
        noisy = bool(row.get("noisy"))
        control_says = f"{first} / {first} {_with_interval(row, 'control_ratio', 'control_low', 'control_high')}"
        says = f"{control_says}: nothing can be said" if noisy else f"{ratio_text(row)}; {control_says}"
        control = (
            f"<i class=control style='left:{x(row['control_low']):.2f}%;"
            f"width:{max(0.4, x(row['control_high']) - x(row['control_low'])):.2f}%'></i>"
        )
        found = (
            f"<i class=interval style='left:{x(row['ratio_low']):.2f}%;"
            f"width:{max(0.4, x(row['ratio_high']) - x(row['ratio_low'])):.2f}%'></i>"
            f"<i class=dot style='left:{x(row['ratio']):.2f}%'></i>"
        )
        value = "noisy" if noisy else f"{row['ratio']:.3f}"
        out.append(
            f"<div class='lat{' noisy' if noisy else ''}' title='{says}'><div class=name>{name}<b>{value}</b></div>"
            f"<div class=track><i class=one style='left:{x(1):.2f}%'></i>{control}{found}</div>"
            f"<div class='name muted'><span>{says}</span><span>{times}</span></div></div>"
        )
    legend = (
        f"<p class=legend><span><i class=dot></i> {second} / {first}, with its 95 % interval</span>"
        f"<span><i class=control></i> {first} / {first}, the control</span>"
        f"<span><i class=one></i> as fast as {first}</span></p>"
    )
    return f"<div class=latency>{''.join(out)}</div>{legend}"


def _with_interval(row: Row, ratio: str, low: str, high: str) -> str:
    return f"{row[ratio]:.3f} [{row[low]:.3f}, {row[high]:.3f}]"


def _gain(row: Row) -> str:
    if row.get("tokens_per_second"):
        return _pair(row["tokens_per_second"])
    if row["realised"] is None or row.get("noisy"):
        return ""
    saving = row.get("flops_ratio")
    return f"{row['realised']:.0%}" + (f" of {1 - saving:.1%}" if saving else "")


def _pair(values: Mapping[str, float] | None, *, scale: float = 1.0) -> str:
    numbers = [values[key] * scale for key in ("dense", "slim")] if values else []
    return " → ".join(f"{number:.0f}" if number >= 100 else f"{number:.3g}" for number in numbers)
