"""Serve a page on which sliders redraw a plan's heads and neurons, its FLOPs and predicted quality. Needs Gradio."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.folders import replace_file
from ..checkpoint.refits import REFIT
from ..errors import PlanError, require_package
from ..evaluate.metrics import higher_is_better
from ..report.drawing import BarFigure, Curve, Dot, MapFigure, bar_figure, curve_places, shaded
from ..report.jinja import environment, escape_markdown
from ..report.maps import UnitBars, UnitMap, plan_maps
from ..report.report import plan_counts
from ..report.rows import Table
from ..report.text import removed_text
from ..studies.explore import Exploration, Measured, fit, lost_share, predict, read_exploration
from ..values import PruningPlan
from .guard import THIS_MACHINE, Guard


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
        The Gradio page, which a thread of its own serves until the process ends.

    Raises:
        RequestError: The folder is neither a run's nor a sweep's.
        MissingRuntimeError: Gradio is not installed.
    """
    exploration = read_exploration(folder)
    require_gradio()
    # No telemetry, and no fonts from elsewhere.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    page = _page(exploration, Path(folder))
    serve(page, port=port, open_browser=open_browser)
    return page


def serve(page: Any, *, port: int | None = None, open_browser: bool = False) -> None:
    """Serve a Gradio page to the browsers of this machine, and answer no other site; see `Guard`.

    Args:
        page: The page.
        port: Where to listen; a free one from 7860 by default.
        open_browser: Open the page at once.
    """
    import gradio
    from starlette.middleware import Middleware

    page.launch(
        server_name=THIS_MACHINE[0],
        server_port=port,
        inbrowser=open_browser,
        prevent_thread_lock=True,
        share=False,
        ssr_mode=False,
        quiet=True,
        app_kwargs={"middleware": [Middleware(Guard)]},
        footer_links=[],
        css=_render("page.css"),
        theme=gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
    )


def _page(exploration: Exploration, folder: Path) -> Any:
    import gradio

    plan = exploration.plan
    with gradio.Blocks(title=f"hies-export: {folder.name}", analytics_enabled=False) as page:
        gradio.Markdown(
            f"## {escape_markdown(folder.name)}\nOther plans: what they keep and cost, and their predicted quality."
        )
        with gradio.Row():
            controls = [
                gradio.Slider(
                    0,
                    0.99,
                    plan.alpha or 0.5,
                    step=0.01,
                    label="alpha (0: entropy, 1: importance)",
                    visible=plan.heads > 0,
                ),
                gradio.Slider(
                    0.01,
                    0.99,
                    round(min(0.95, max(0.05, plan.removed / max(1, plan.heads))), 2),
                    step=0.01,
                    label="sparsity (share of heads to remove)",
                    visible=plan.heads > 0,
                ),
                gradio.Radio(["global", "uniform"], value=exploration.allocation, label="allocation"),
                gradio.Slider(
                    0,
                    0.99,
                    round(min(0.95, plan.removed_neurons / max(1, plan.neurons)), 2),
                    step=0.01,
                    label="share of feed-forward neurons to remove",
                    visible=exploration.ranks_neurons,
                ),
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


def draw(exploration: Exploration, alpha: float, sparsity: float, allocation: str, neurons: float | None = None) -> str:
    """Return as HTML what a plan keeps, its cost and predicted quality; or why there is no such plan.

    Args:
        exploration: The finished run or sweep.
        alpha, sparsity, allocation, neurons: See `Exploration.plan_at`.
    """
    try:
        plan = exploration.plan_at(alpha, sparsity, allocation, neurons=neurons)
    except PlanError as error:
        return _render("message.html.j2", text=str(error))
    lost = lost_share(exploration.statistics["his"], plan)
    at = f" at {exploration.shape}" if exploration.shape else ""
    counts = [("heads", plan.heads, plan.removed), ("neurons", plan.neurons, plan.removed_neurons)]
    rows = [
        *((f"{name} kept", f"{total - removed:,} of {total:,}") for name, total, removed in counts if total),
        (f"FLOPs{at}, of dense", f"{exploration.flops_ratio(plan):.3f}"),
        ("importance (HIS) removed", f"{lost:.1%}"),
    ]
    figure, bars = _figures(exploration, plan, alpha)
    note = (
        ""
        if not plan.compensation
        else (
            f"Predictions are of models that are compensated after the cut ({plan.compensation['method']}). "
            "hies-export apply does not compensate a plan that is saved here, unless it is the run's own."
        )
    )
    predictions = [_predicted(exploration, measured, lost) for measured in exploration.measured]
    return _render(
        "plan.html.j2",
        cost=Table((), rows),
        figure=figure,
        bars=bars,
        ranks_neurons=exploration.ranks_neurons,
        predictions=predictions,
        note=note,
    )


def _figures(exploration: Exploration, plan: PruningPlan, alpha: float) -> tuple[MapFigure | None, BarFigure | None]:
    """Return the map of the heads and the bars of the neurons; None for what the folder's plan leaves alone."""
    scores, known = exploration.scores(alpha).scores, exploration.statistics["his"]
    figure: MapFigure | None = None
    bars: BarFigure | None = None
    modules: list[str] = []
    for units in plan_maps(plan):
        if isinstance(units, UnitMap):
            marks = {name: line for name, line in units.marks.items() if name in known}
            modules = list(marks)
            figure = MapFigure("score", "Score", "", shaded(marks, [scores[name].tolist() for name in marks]))
        if isinstance(units, UnitBars):
            bars = bar_figure(units, beside=modules)
    return figure, bars


def save(
    exploration: Exploration,
    folder: Path,
    alpha: float,
    sparsity: float,
    allocation: str,
    neurons: float | None = None,
) -> str:
    """Write a plan into the folder; return as HTML where it is and the commands that cut by it."""
    try:
        plan = exploration.plan_at(alpha, sparsity, allocation, neurons=neurons)
    except PlanError as error:
        return _render("message.html.j2", text=str(error))
    share = f"-neurons-{neurons:g}" if neurons is not None and exploration.ranks_neurons else ""
    file = folder / f"plan-alpha{alpha:g}-{allocation}-{sparsity:g}{share}.json"
    replace_file(file, plan.to_json())
    model = exploration.model or "MODEL"
    commands = f"hies-export apply {file} {model} -o SLIM\nhies-export prune RECIPE.yaml --plan {file} -o SLIM"
    return _render(
        "message.html.j2",
        text=f"Saved: {removed_text(*plan_counts(plan))}. To cut by it:",
        commands=commands,
        warning=_compensation_note(plan),
    )


def _compensation_note(plan: PruningPlan) -> str:
    """Return what must be known of a compensated model before a plan is applied; nothing if it is not compensated."""
    if not plan.compensation:
        return ""
    if plan.refit is not None:
        return (
            f"This is the plan of the run, whose model is compensated ({plan.compensation['method']}). apply takes the "
            f"refitted layers from {REFIT} beside it; without that file it cuts only."
        )
    return (
        f"The models that were measured here are compensated ({plan.compensation['method']}), and so is what is "
        "predicted. apply does NOT compensate this plan: it cuts only, and quality is lower. prune refits the layers, "
        "as its recipe says."
    )


@dataclass(frozen=True)
class _Prediction:
    """What one kind of measurement predicts of a plan.

    Attributes:
        models: Number of models that were measured.
        how: How they were measured.
        table: The predictions.
        curves: Name of a number -> what was measured of it, and the line that the prediction lies on.
    """

    models: int
    how: str
    table: Table
    curves: Mapping[str, Curve]


def _predicted(exploration: Exploration, measured: Measured, lost: float) -> _Prediction:
    """Return what one kind of measurement predicts for a plan that removes the share `lost` of the importance."""
    kinds = (
        (exploration.metric, measured.quality, higher_is_better(exploration.metric), ".4f"),
        ("same predictions", measured.stability, True, ".1%"),
    )
    rows, curves = [], {}
    for name, values, more_is_better, form in kinds:
        if not values:
            continue
        found = predict(measured.lost, values, lost, higher_is_better=more_is_better)
        error = "" if found.error is None else f"± {found.error:{form}}"
        rows.append([name, f"{found.bound} {found.value:{form}}".strip(), error])
        curves[name] = _curve(name, measured.lost, values, lost, more_is_better)
    header = ("", "predicted", "mean error" if any(row[2] for row in rows) else "")
    return _Prediction(len(measured.lost), measured.how, Table(header, rows), curves)


def _curve(name: str, lost: Sequence[float], values: Sequence[float], at: float, higher_is_better: bool) -> Curve:
    """Return what was measured by the share of importance removed, the fitted line, and on it the plan, at `at`."""
    line = fit(lost, values, higher_is_better=higher_is_better)
    left, height, most = 60, 84, max(*lost, at) or 1.0
    place, ends = curve_places(values, left=left, height=height, scale=most)
    dots = [Dot(*place(*pair), chosen=False) for pair in zip(lost, values, strict=True)]
    return Curve(
        label=f"{name} by importance removed",
        left=left,
        line=[place(share, line(share)) for share in sorted(lost)],
        dots=[*dots, Dot(*place(at, line(at)), chosen=True)],
        ends=ends,
        axis=("no importance removed", f"{most:.0%} removed"),
        bottom=128,
    )


def _render(template: str, **values: Any) -> str:
    return environment("hies_export.ui").get_template(template).render(values)
