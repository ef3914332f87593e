"""report.html: the report as one page that needs nothing but a browser, at a desk or on a phone, in light or dark.

The page is rendered from the `Report` alone; style, figures (inline SVG) and the few lines of script that show a head's
numbers are in the file itself, and nothing is loaded from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .latency import latency_figure, latency_note, row_name
from .page import asset, bar, folded, page, table
from .report import (
    CUT,
    Report,
    agreement,
    budget_text,
    comparison_rows,
    criterion_text,
    how_measured,
    layer_lines,
    model_name,
    title,
)

# What is drawn of every head, and how it is called.
MAPS = {
    "score": ("Score", "what decided: the smallest go first"),
    "his": ("Importance (HIS)", "how much the loss moves with the head"),
    "entropy": ("Attention entropy", "0: looks at one token, 1: at all alike"),
}


def render_html(report: Report, *, location: str = "slim") -> str:
    """The report as one self-contained HTML page.

    Args:
        report: What to show.
        location: The folder or Hub id that the slim checkpoint is loaded from.
    """
    sections = [
        ("What was cut", _cut_section(report)),
        ("What it cost", _cost_section(report)),
        ("What it gained", _gain_section(report)),
        ("How it was measured", _method_section(report)),
        ("How to load it", _load_section(report, location)),
    ]
    subtitle = f"{model_name(report)} · {report.task} · {criterion_text(report)} · seed {report.seed}"
    return page(title(report), subtitle, sections, top=_tiles(report), script=asset("report.js"))


def _tiles(report: Report) -> str:
    """The five numbers a reader came for."""
    metric, dense, slim = (report.quality[key] for key in ("metric", "dense", "slim"))
    total, removed = report.heads["total"], report.heads["removed"]
    tiles = [
        ("attention heads", f"{total - removed}", f"of {total}"),
        (metric, f"{slim:.4g}", f"dense {dense:.4g}"),
        (agreement(report), f"{report.stability:.1%}", "of the dense model's"),
    ]
    quiet = [row for row in report.latency if not row.get("noisy")]
    if quiet:
        best = min(quiet, key=lambda row: row["ratio"])
        where = row_name(best).replace(" x ", " × ")
        tiles.append(("time, at best", f"{best['ratio']:.1%}", f"of dense · {where}"))
    parameters = report.parameters
    tiles.append(("parameters", f"{parameters['slim'] / parameters['dense']:.1%}", "of dense"))
    return (
        "<ul class=tiles>"
        + "".join(
            f"<li><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(note)}</span></li>"
            for name, value, note in tiles
        )
        + "</ul>"
    )


def _cut_section(report: Report) -> str:
    """Maps of all heads, layers down and heads across, the same head at the same place in each."""
    lines: Mapping[str, str] = report.details["head_map"]
    numbers: Mapping[str, Mapping[str, Sequence[float]]] = report.details.get("heads", {})
    figures = [_figure("Plan", "filled: kept; crossed: cut", map_svg(lines, None, "plan"))]
    for what, (name, note) in MAPS.items():
        values = [list(numbers.get(module, {}).get(what, ())) for module in lines]
        if any(values):
            low, high = min(v for row in values for v in row), max(v for row in values for v in row)
            scale = f"{_short(low)} <i></i> {_short(high)}"
            svg = map_svg(lines, [[(v - low) / (high - low or 1) for v in row] for row in values], what)
            figures.append(_figure(name, note, svg, scale))
    data = [
        {
            "name": module,
            "cut": [int(mark == CUT) for mark in line],
            **{what: [float(f"{v:.4g}") for v in row] for what, row in numbers.get(module, {}).items()},
        }
        for module, line in lines.items()
    ]
    # "</script" would end the element that holds it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    kept = ", ".join(str(k) for k in report.heads["kept_per_layer"])
    return (
        f"<div class=maps>{''.join(figures)}</div>"
        "<p id=head class=readout aria-live=polite>Point at a head, or tap it, to see its numbers.</p>"
        "<p class=muted>Layers run down, heads across; a cut head is crossed in every map. Heads kept per layer: "
        f'{kept}.</p><script type="application/json" id=heads>{text}</script>'
    )


def _figure(name: str, note: str, svg: str, scale: str = "") -> str:
    legend = f"<span class=scale>{scale}</span>" if scale else ""
    return f"<figure><figcaption><b>{name}</b> <span class=muted>{note}</span></figcaption>{svg}{legend}</figure>"


def map_svg(lines: Mapping[str, str], shades: Sequence[Sequence[float]] | None, what: str) -> str:
    """An SVG with a cell per head.

    Args:
        lines: From `head_map`.
        shades: Per line and head a number in [0, 1]; None fills the heads that stay.
        what: "plan", or a name in `MAPS`.
    """
    widest, cell, left = max(len(line) for line in lines.values()), 20, 24
    parts = []
    for row, line in enumerate(lines.values()):
        if len(lines) <= 16 or row % 4 == 0:
            parts.append(f'<text x="{left - 6}" y="{row * cell + 14}" text-anchor="end">{row}</text>')
        for head, mark in enumerate(line):
            x, y = left + head * cell, row * cell
            known = shades is None or head < len(shades[row])
            shade = (mark != CUT) * 1.0 if shades is None else shades[row][head] if known else 0.0
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="18" height="18" rx="3" fill-opacity="{0.06 + 0.94 * shade:.2f}" '
                f'data-i="{row},{head}"/>'
            )
            if mark == CUT:
                on = ' class="dark"' if shade > 0.5 else ""
                parts.append(f'<path{on} d="M{x + 6} {y + 6}l8 8m0-8l-8 8"/>')
    width, height = left + widest * cell, len(lines) * cell
    label = f"{MAPS[what][0] if what in MAPS else 'Plan'}, {len(lines)} layers by {widest} heads"
    return (
        f'<svg class="map {what}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def _cost_section(report: Report) -> str:
    rows = []
    metrics: Mapping[str, Mapping[str, float]] = report.details.get("metrics") or {
        report.quality["metric"]: report.quality
    }
    before = report.details.get("uncompensated")
    for name, values in {**metrics, **report.details.get("benchmarks", {})}.items():
        cells = [name, f"{values['dense']:.4f}", f"{values['slim']:.4f}", f"{values['slim'] - values['dense']:+.4f}"]
        alone = before and before["metrics"].get(name)
        rows.append([*cells, "" if alone is None else f"{alone:.4f}"] if before else cells)
    same = [agreement(report), "", f"{report.stability:.1%}", ""]
    rows.append([*same, f"{before['stability']:.1%}"] if before else same)
    header = ["", "dense", "slim", "change"] + (["cut alone"] if before else [])
    parts = [table(header, rows), _stability_bar(report, before)]
    if budget_text(report):
        parts.insert(0, f"<p class=callout>{escape(budget_text(report))}</p>")
    parts.append(_alpha_figure(report))
    return "".join(parts)


def _stability_bar(report: Report, before: Mapping[str, Any] | None) -> str:
    bars = [("slim", report.stability)] + ([("before compensation", before["stability"])] if before else [])
    what = report.details.get("stability_of", "prediction")
    return (
        f"<h3>{escape(what.capitalize())}s that stay the same</h3><div class=bars>"
        + "".join(
            bar(name, value, f"{value:.1%}", "slim" if i == 0 else "other") for i, (name, value) in enumerate(bars)
        )
        + "</div>"
    )


def _alpha_figure(report: Report) -> str:
    """Quality of every alpha that was tried, where alpha was chosen on data."""
    points = [p for p in report.details.get("alpha_curve", ()) if p["quality"] is not None]
    if len(points) < 2:
        return ""
    low, high = min(p["quality"] for p in points), max(p["quality"] for p in points)
    placed = [(40 + 540 * p["alpha"], 20 + 100 * (high - p["quality"]) / (high - low or 1), p) for p in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in placed)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{7 if p["alpha"] == report.alpha else 4}" '
        f'class="{"slim" if p["alpha"] == report.alpha else "other"}"><title>alpha {p["alpha"]:g}: '
        f"{p['quality']:.4f}, stability {p['stability']:.1%}</title></circle>"
        for x, y, p in placed
    )
    ends = "".join(f'<text x="34" y="{y}" text-anchor="end">{v:.3g}</text>' for y, v in ((24, high), (124, low)))
    axis = '<text x="40" y="150">0: entropy</text><text x="580" y="150" text-anchor="end">importance: 1</text>'
    return (
        f"<h3>{escape(report.quality['metric'])} on held-out samples by alpha</h3>"
        f'<svg class=plot viewBox="0 0 600 156" role=img aria-label="quality by alpha"><polyline points="{line}"/>'
        f"{dots}{ends}{axis}</svg>"
    )


def _gain_section(report: Report) -> str:
    sizes = []
    names = {"parameters": report.parameters, "checkpoint weights": report.bytes, "FLOPs": report.flops}
    if report.cache_bytes_per_token:
        names["cache per token"] = report.cache_bytes_per_token
    shown = {row[0]: row for row in comparison_rows(report)}
    for name, values in names.items():
        _, dense, slim, change = next(row for key, row in shown.items() if key.startswith(name))
        sizes.append(bar(name, values["slim"] / values["dense"], f"{slim} of {dense} ({change})", "slim"))
    parts = [f"<div class=bars>{''.join(sizes)}</div>"]
    if report.latency:
        parts = ["<h3>Time of the slim model, relative to the dense one</h3>", latency_figure(report.latency)]
        parts += [f"<p class=muted>{escape(latency_note(report.latency))}</p>", "<h3>Size</h3>"]
        parts += [f"<div class=bars>{''.join(sizes)}</div>"]
        rows = [
            [
                row_name(row),
                f"{row['dense_ms']:.2f}",
                f"{row['slim_ms']:.2f}",
                f"{row['dense_p90_ms']:.2f}" if "dense_p90_ms" in row else "",
                f"{row['slim_p90_ms']:.2f}" if "slim_p90_ms" in row else "",
                "noisy" if row.get("noisy") else "" if row["realised"] is None else f"{row['realised']:.0%}",
            ]
            for row in report.latency
        ]
        header = ["milliseconds", "dense p50", "slim p50", "dense p90", "slim p90", "realised"]
        parts.append(folded("All times", table(header, rows)))
    layers = layer_lines(report)
    if layers:
        batch, sequence = report.details["flops_per_layer"]["shape"]
        parts.append(folded(f"FLOPs of every layer, at {batch} × {sequence}", table(*layers)))
    return "".join(parts)


def _method_section(report: Report) -> str:
    checks = [
        ["cut model against masked model", f"{report.cut_max_abs:.2g}"],
        ["reloaded checkpoint against saved model", f"{report.reload_max_abs:.2g}"],
        ["ONNX Runtime against torch", f"{report.onnx_max_abs:.2g}"],
    ]
    seconds = [[name, f"{value:.1f} s"] for name, value in report.seconds.items()]
    environment = [[name, str(value)] for name, value in report.environment.items() if value is not None]
    return (
        f"<p>{escape(how_measured(report))}</p>"
        f"<div class=columns><div><h3>Largest difference of any output</h3>{table(['', ''], checks)}</div>"
        f"<div><h3>Time spent</h3>{table(['', ''], seconds)}</div></div>"
        + folded("Environment", table(["", ""], environment), wrap=True)
    )


def _load_section(report: Report, location: str) -> str:
    auto_class = report.details.get("auto_class", "AutoModel")
    custom = report.details.get("custom_code", False)
    remote = ", trust_remote_code=True" if custom else ""
    code = f'from transformers import {auto_class}\n\nmodel = {auto_class}.from_pretrained("{location}"{remote})'
    note = (
        f"Or <code>hies_export.load('{escape(location)}')</code>, which runs no code from the folder. Layers have "
        "different numbers of heads, which a plain config cannot say: <code>modeling_hies.py</code> in the folder "
        "rebuilds the shapes."
        if custom
        else "A plain checkpoint: stock transformers loads it with no extra code."
    )
    return (
        f"<pre><code>{escape(code)}</code></pre><p>{note}</p>"
        "<p>For ONNX Runtime: <code>onnx/</code>, beside this page. Which heads went, by their original numbers: "
        "<code>hies_plan.json</code>, beside the weights.</p>"
    )


def _short(value: float) -> str:
    return f"{value:.2g}"
