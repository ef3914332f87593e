"""A page in the browser over `explore`: sliders redraw head map, predicted quality and FLOPs. Needs Gradio."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..checkpoint.folders import replace_file
from ..errors import PlanError, require_package
from ..evaluate.metrics import higher_is_better
from ..report.html import map_svg
from ..report.page import table
from ..report.report import head_map
from ..studies.explore import Exploration, Measured, fit, lost_share, predict, read_exploration

CSS = """
.hies{font-variant-numeric:tabular-nums;--accent:#2468c8;--muted:#85847e;--line:#b9b8b2;--dot:#d55e00}
.hies .columns{display:grid;gap:8px 40px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
.hies svg{display:block;width:100%;height:auto}.hies svg text{fill:var(--muted);font-size:11px}
.hies .map rect{fill:var(--accent);stroke:var(--line)}
.hies .map path{stroke:currentColor;stroke-width:1.6;stroke-linecap:round}.hies .map path.dark{stroke:#fff}
.hies .plot{max-width:600px}.hies polyline{fill:none;stroke:var(--accent);stroke-width:2}
.hies circle{fill:var(--muted)}.hies circle.here{fill:var(--dot)}
.hies .scroll{overflow-x:auto}.hies table{border-collapse:collapse;width:100%}
.hies table,.hies tr,.hies tbody,.hies thead{border:0!important}
.hies td,.hies th{text-align:right;padding:4px 8px;border:0!important;border-bottom:1px solid var(--line)!important}
.hies td:first-child,.hies th:first-child{text-align:left;padding-left:0}
.hies .muted{color:var(--muted);font-size:.875rem}.hies p{margin:8px 0}.hies h4{margin:12px 0 4px}
@media(max-width:480px){.hies .plot text{font-size:18px}}
"""


def require_gradio() -> None:
    """Check that the page can be shown.

    Raises:
        MissingRuntimeError: Gradio is not installed.
    """
    require_package("gradio", who="the page needs", package="Gradio", extra="ui")


def show(folder: str | Path, *, port: int | None = None, open_browser: bool = False) -> Any:
    """Serve the page of a run's or a sweep's folder to this machine's browsers.

    Args:
        folder: What `hies-export run` or `sweep` wrote; saved plans go there too.
        port: Where to listen; a free one from 7860 by default.
        open_browser: Open the page at once.

    Returns:
        The Gradio page; it is served by a thread of its own until the process ends.

    Raises:
        RequestError: The folder is neither.
        MissingRuntimeError: Gradio is not installed.
    """
    exploration = read_exploration(folder)
    require_gradio()
    # Nothing is told to anybody: no telemetry, no fonts from elsewhere.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    import gradio

    page = _page(exploration, Path(folder))
    page.launch(
        server_name="127.0.0.1",
        server_port=port,
        inbrowser=open_browser,
        prevent_thread_lock=True,
        share=False,
        ssr_mode=False,
        quiet=True,
        footer_links=[],
        css=CSS,
        theme=gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
    )
    return page


def _page(exploration: Exploration, folder: Path) -> Any:
    import gradio

    plan = exploration.plan
    start = round(min(0.95, max(0.05, plan.removed / plan.heads)), 2)
    with gradio.Blocks(title=f"hies-export: {folder.name}", analytics_enabled=False) as page:
        gradio.Markdown(f"## {folder.name}\nOther plans: what they keep and cost, and their predicted quality.")
        with gradio.Row():
            controls = [
                gradio.Slider(0, 0.99, plan.alpha or 0.5, step=0.01, label="alpha (0: entropy, 1: importance)"),
                gradio.Slider(0.01, 0.99, start, step=0.01, label="sparsity (share of heads to remove)"),
                gradio.Radio(["global", "uniform"], value=exploration.allocation, label="allocation"),
            ]
        drawn = gradio.HTML(draw(exploration, *(control.value for control in controls)))
        button, saved = gradio.Button("Save this plan", variant="primary"), gradio.HTML()
        gradio.on(
            [control.change for control in controls],
            lambda *values: (draw(exploration, *values), ""),
            controls,
            [drawn, saved],
            show_progress="hidden",
            trigger_mode="always_last",
        )
        button.click(lambda *values: save(exploration, folder, *values), controls, saved, show_progress="hidden")
    return page


def draw(exploration: Exploration, alpha: float, sparsity: float, allocation: str) -> str:
    """What the page says of a plan, as HTML: its cost, predicted quality, and heads; or why there is none."""
    try:
        plan = exploration.plan_at(alpha, sparsity, allocation)
    except PlanError as error:
        return f"<div class=hies><p>{escape(str(error))}</p></div>"
    lost = lost_share(exploration.statistics.his, plan)
    at = f" at {exploration.shape}" if exploration.shape else ""
    rows = [
        ["heads kept", f"{plan.heads - plan.removed} of {plan.heads}"],
        [f"FLOPs{at}, of dense", f"{exploration.flops_ratio(plan):.3f}"],
        ["importance (HIS) that goes", f"{lost:.1%}"],
    ]
    lines = {name: line for name, line in head_map(plan).items() if name in exploration.statistics.his}
    scores = exploration.scores(alpha).scores
    heads = map_svg(lines, [scores[name].tolist() for name in lines], "score")
    widest = 24 + 30 * max(map(len, lines.values()))
    predicted = "".join(_predicted(exploration, measured, lost) for measured in exploration.measured)
    return (
        f"<div class=hies><div class=columns><div>{table(['', ''], rows)}"
        f"<div style='max-width:{widest}px;margin:16px 0'>{heads}</div><p class=muted>Layers run down, heads across; "
        "the fuller a cell, the higher its HIES; crossed heads go. FLOPs follow from what the heads of the measured "
        "plan cost, as if all cost the same.</p></div>"
        f"<div>{predicted or '<p>No quality is predicted: this folder measured no plan by HIES or HIS.</p>'}</div>"
        "</div></div>"
    )


def save(exploration: Exploration, folder: Path, alpha: float, sparsity: float, allocation: str) -> str:
    """Write a plan into the folder, and say, as HTML, where it is and what to do with it."""
    try:
        plan = exploration.plan_at(alpha, sparsity, allocation)
    except PlanError as error:
        return f"<div class=hies><p>{escape(str(error))}</p></div>"
    file = folder / f"plan-alpha{alpha:g}-{allocation}-{sparsity:g}.json"
    replace_file(file, plan.to_json())
    model = exploration.model or "MODEL"
    commands = f"hies-export apply {file} {model} -o SLIM\nhies-export prune RECIPE.yaml --plan {file} -o SLIM"
    return f"<div class=hies><p>Saved. To cut by it:</p><pre>{escape(commands)}</pre></div>"


def _predicted(exploration: Exploration, measured: Measured, lost: float) -> str:
    """What one kind of measurement predicts: numbers, and the curve they are read off."""
    kinds = (
        (exploration.metric, measured.quality, higher_is_better(exploration.metric), ".4f"),
        ("same predictions", measured.stability, True, ".1%"),
    )
    rows, curves = [], []
    for name, values, better, form in kinds:
        if not values:
            continue
        found = predict(measured.lost, values, lost, higher_is_better=better)
        error = "" if found.error is None else f"± {found.error:{form}}"
        rows.append([name, f"{found.bound} {found.value:{form}}".strip(), error])
        curves.append(f"<p class=muted>{escape(name)}</p>{_curve(name, measured.lost, values, lost, better)}")
    return (
        f"<h4>Predicted from {len(measured.lost)} models: {escape(measured.how)}</h4>"
        + table(["", "predicted", "mean error" if any(row[2] for row in rows) else ""], rows)
        + "".join(curves)
    )


def _curve(name: str, lost: Sequence[float], values: Sequence[float], at: float, higher_is_better: bool) -> str:
    """What was measured against the importance that went, the line that predictions are read off, and this plan."""
    line = fit(lost, values, higher_is_better=higher_is_better)
    low, high, most = min(values), max(values), max(*lost, at) or 1.0

    def place(share: float, value: float) -> tuple[float, float]:
        return 60 + 520 * share / most, 16 + 84 * (high - value) / (high - low or 1)

    points = " ".join("{:.1f},{:.1f}".format(*place(share, line(share))) for share in sorted(lost))
    dots = "".join(
        '<circle cx="{:.1f}" cy="{:.1f}" r="4"/>'.format(*place(*pair)) for pair in zip(lost, values, strict=True)
    )
    here = '<circle class="here" cx="{:.1f}" cy="{:.1f}" r="7"/>'.format(*place(at, line(at)))
    marks = {high: 20, low: 104} if high > low else {high: 20}
    ends = "".join(f'<text x="54" y="{y}" text-anchor="end">{v:.3g}</text>' for v, y in marks.items())
    axis = (
        f'<text x="60" y="124">no importance lost</text><text x="580" y="124" text-anchor="end">{most:.0%} lost</text>'
    )
    return (
        f'<svg class=plot viewBox="0 0 600 132" role=img aria-label="{escape(name)} by importance lost">'
        f'<polyline points="{points}"/>{dots}{here}{ends}{axis}</svg>'
    )
