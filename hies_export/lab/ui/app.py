"""Serve a page on which sliders redraw a plan's heads and neurons, its FLOPs and predicted quality. Needs Gradio."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoint.folders import replace_file
from ...checkpoint.save import REFIT
from ...errors import PlanError, require_package
from ...evaluate.metrics import higher_is_better
from ...report.drawing import BarFigure, Curve, Dot, MapFigure, neuron_bars, plan_figure, shaded
from ...report.html import environment, escape_markdown
from ...report.report import head_map, neuron_counts, plan_counts
from ...report.tables import Table, filled
from ...report.words import removed_text
from ...select.plan import PruningPlan
from ..studies import explore
from ..studies.explore import FAMILY, Exploration, Measured, Trial
from .guard import THIS_MACHINE, Guard

# What the list of measured plans begins with.
BY_SLIDERS = "by the sliders (HIES)"
# Title of the results of a plan that was itself evaluated.
MEASURED = "Measured for exactly this plan"
_NOT_COMPENSATED = (
    "apply does NOT compensate this plan: it cuts only, and quality is lower. prune refits the layers, as its recipe "
    "says."
)


class Settings(NamedTuple):
    """The settings of the page's controls, in their order; see `Exploration.plan_at`."""

    alpha: float
    sparsity: float
    allocation: str
    neurons: float | None = None
    chosen: str = BY_SLIDERS

    @property
    def by_sliders(self) -> bool:
        """Whether the sliders make the plan; otherwise the `chosen` measured plan is shown."""
        return self.chosen == BY_SLIDERS

    def plan(self, exploration: Exploration) -> PruningPlan:
        """Return the requested plan."""
        if self.by_sliders:
            return exploration.plan_at(self.alpha, self.sparsity, self.allocation, neurons=self.neurons)
        return next(trial.plan for trial in exploration.trials if trial.label == self.chosen)


def show(folder: str | Path, *, port: int | None = None, open_browser: bool = False) -> Any:
    """Serve the page of a run's or a sweep's folder, where saved plans go, to this machine's browsers.

    The port is a free one from 7860 by default. Returns the Gradio page, which a thread of its own serves until the
    process ends.
    """
    require_package("gradio", who="the page needs", package="Gradio", extra="ui")
    exploration = explore.read_exploration(folder)
    # No telemetry, and no fonts from elsewhere.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    page = _page(exploration, Path(folder))
    serve(page, port=port, open_browser=open_browser)
    return page


def serve(page: Any, *, port: int | None = None, open_browser: bool = False) -> None:
    """Serve a Gradio page to the browsers of this machine, and answer no other site; see `Guard`."""
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

    # Of ".", a path has no name.
    name = folder.absolute().name
    with gradio.Blocks(title=f"hies-export: {name}", analytics_enabled=False) as page:
        gradio.Markdown(
            f"## {escape_markdown(name)}\nOther plans: what they keep and cost, and their predicted quality."
        )
        controls = _controls(exploration)
        *sliders, chosen = controls
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
        chosen.change(
            lambda plan: [gradio.update(interactive=plan == BY_SLIDERS)] * len(sliders),
            *(chosen, sliders),
            show_progress="hidden",
        )
        if len(exploration.trials) > 1:
            gradio.HTML(_render("trials.html.j2", table=_trial_table(exploration)))
        button.click(lambda *values: save(exploration, folder, *values), controls, saved, show_progress="hidden")
    return page


def _controls(exploration: Exploration) -> list[Any]:
    """Add the controls to the page, and return them in the order of `Settings`.

    The sliders and the choice of allocation describe a plan; the list selects one of the measured plans instead.
    """
    import gradio

    plan = exploration.plan
    slider = partial(gradio.Slider, maximum=0.99, step=0.01)
    share = round(min(0.95, max(0.05, plan.removed / max(1, plan.heads))), 2)
    alpha = 0.5 if plan.alpha is None else plan.alpha
    with gradio.Row():
        sliders = [
            slider(0, value=alpha, label="alpha (0: entropy, 1: importance)", visible=plan.heads > 0),
            slider(0.01, value=share, label="sparsity (share of heads to remove)", visible=plan.heads > 0),
            gradio.Radio(["global", "uniform"], value=exploration.allocation, label="allocation"),
            slider(
                0,
                value=round(min(0.95, plan.removed_neurons / max(1, plan.neurons)), 2),
                label="share of feed-forward neurons to remove",
                visible=exploration.ranks_neurons,
            ),
        ]
    chosen = gradio.Dropdown(
        list(dict.fromkeys([BY_SLIDERS, *(trial.label for trial in exploration.trials)])),
        value=BY_SLIDERS,
        label="plan",
        visible=len(exploration.trials) > 1,
    )
    return [*sliders, chosen]


def draw(exploration: Exploration, *values: Any) -> str:
    """Return as HTML what a plan keeps, its cost, and its measured or predicted quality; or why there is no such plan.

    `values` are those of the controls, see `Settings`.
    """
    settings = Settings(*values)
    try:
        plan = settings.plan(exploration)
    except PlanError as error:
        return _render("message.html.j2", text=str(error))
    lost = explore.lost_share(exploration.statistics["his"], plan)
    at = f" at {exploration.shape}" if exploration.shape else ""
    counts = [("heads", plan.heads, plan.removed), ("neurons", plan.neurons, plan.removed_neurons)]
    rows = [
        *((f"{name} kept", f"{total - removed:,} of {total:,}") for name, total, removed in counts if total),
        (f"FLOPs{at}, of dense", f"{exploration.flops_ratio(plan):.3f}"),
        ("importance (HIS) removed", f"{lost:.1%}"),
    ]
    figure, bars = _figures(exploration, plan, settings.alpha if settings.by_sliders else None)
    exact = explore.trials_of(exploration.trials, plan)
    by_his = settings.by_sliders or plan.criterion in FAMILY
    measured = {one.how: one for one in exploration.measured if by_his or one.how in exact}
    ways = [*(how for how in exact if how not in measured), *measured]
    predictions = [_prediction(exploration, how, lost, exact.get(how), measured.get(how)) for how in ways]
    return _render(
        "plan.html.j2",
        cost=Table((), rows),
        figure=figure,
        bars=bars,
        ranks_neurons=exploration.ranks_neurons,
        chosen=not settings.by_sliders,
        counted=any(trial.flops_ratio is not None for trial in exact.values()),
        predictions=predictions,
        note=_compensation_note(exploration, plan),
    )


def _figures(
    exploration: Exploration, plan: PruningPlan, alpha: float | None
) -> tuple[MapFigure | None, BarFigure | None]:
    """Return the map of the heads and the bars of the neurons; None for a kind that the folder's plan leaves alone.

    The map is shaded by HIES if an alpha is given.
    """
    known = exploration.statistics["his"]
    marks = head_map(plan)
    ranked = {name: line for name, line in marks.items() if name in known}
    bars = neuron_bars(neuron_counts(plan))
    if not marks:
        return None, bars
    if alpha is None:
        return plan_figure(marks), bars
    scores = exploration.scores(alpha).scores
    return MapFigure("score", "Score", "", shaded(ranked, [scores[name].tolist() for name in ranked])), bars


def save(exploration: Exploration, folder: Path, *values: Any) -> str:
    """Write the plan of the controls into the folder; return HTML with its path and the commands that apply it."""
    settings = Settings(*values)
    try:
        plan = settings.plan(exploration)
    except PlanError as error:
        return _render("message.html.j2", text=str(error))
    if settings.by_sliders:
        share = f"-neurons-{settings.neurons:g}" if settings.neurons is not None and exploration.ranks_neurons else ""
        name = f"alpha{settings.alpha:g}-{settings.allocation}-{settings.sparsity:g}{share}"
    else:
        name = re.sub(r"[^\w.]+", "-", settings.chosen.replace("%", "")).strip("-")
    file = folder / f"plan-{name}.json"
    replace_file(file, plan.to_json())
    name, model = shlex.quote(str(file)), shlex.quote(exploration.model or "MODEL")
    command = f"hies-export apply {name} {model} -o SLIM"
    return _render(
        "message.html.j2",
        text=f"Saved: {removed_text(*plan_counts(plan))}. To apply it:",
        commands=command,
        warning=_compensation_note(exploration, plan),
    )


def _compensation_note(exploration: Exploration, plan: PruningPlan) -> str:
    """Return the warning about compensated models before a plan is applied; nothing if none was compensated."""
    method = plan.compensation.get("method")
    if plan.refit is not None:
        return (
            f"This is the plan of the run, whose model is compensated ({method}). apply takes the refitted layers from "
            f"{REFIT} beside it; without that file it cuts only."
        )
    if method is not None:
        return (
            f"The measured models are compensated ({method}), and the predictions assume that too. {_NOT_COMPENSATED}"
        )
    if any("compensated" in trial.how for trial in exploration.trials):
        return f"Some of the measured models are compensated. {_NOT_COMPENSATED}"
    return ""


def _prediction(
    exploration: Exploration, how: str, lost: float, exact: Trial | None, measured: Measured | None
) -> dict[str, Any]:
    """Return the numbers of a plan that removes the share `lost` of the importance, and the curves behind them.

    They are those of `exact`, the measurement of the plan itself, or else predicted from what was measured.
    """
    metric = exploration.metric
    others = measured or Measured(how, (), (), ())
    kinds = [
        (metric, others.quality, exact.quality if exact else None, higher_is_better(metric), ".4f"),
        ("same predictions", others.stability, exact.stability if exact else None, True, ".1%"),
    ]
    rows, curves = [], {}
    for name, values, known, more_is_better, form in kinds:
        if known is not None:
            rows.append([name, f"{known:{form}}", ""])
        elif values:
            found = explore.estimate(others.lost, values, lost, higher_is_better=more_is_better)
            error = "" if found.error is None else f"± {found.error:{form}}"
            rows.append([name, f"{found.bound} {found.value:{form}}".strip(), error])
        if values:
            curves[name] = _curve(name, others.lost, values, lost, more_is_better, at=known)
    said, title = ("measured", MEASURED) if exact else ("predicted", f"Predicted from {len(others.lost)} models")
    columns = {header: itemgetter(column) for column, header in enumerate(("", said, "mean error"))}
    return {"title": title, "how": how, "table": filled(columns, rows), "curves": curves}


def _trial_table(exploration: Exploration) -> Table:
    """Return all measured plans with their results."""
    columns: dict[str, Callable[[Trial], str]] = {
        "plan": lambda trial: trial.label,
        "": lambda trial: trial.how.partition(": ")[2].partition(", on ")[0],  # how the model was made
        exploration.metric: lambda trial: "" if trial.quality is None else f"{trial.quality:.4f}",
        "same predictions": lambda trial: f"{trial.stability:.1%}",
        "FLOPs": lambda trial: "" if trial.flops_ratio is None else f"{trial.flops_ratio:.3f}",
        "heads removed": lambda trial: f"{trial.plan.removed:,}" if trial.plan.heads else "",
        "neurons removed": lambda trial: f"{trial.plan.removed_neurons:,}" if trial.plan.neurons else "",
    }
    return filled(columns, exploration.trials)


def _curve(
    name: str, lost: Sequence[float], values: Sequence[float], share: float, higher_is_better: bool, at: float | None
) -> Curve:
    """Return the measurements by the share of importance removed, the fitted line, and the plan.

    The plan is at `share`, at the height `at`; None places it on the line.
    """
    line = explore.fit(lost, values, higher_is_better=higher_is_better)
    return Curve(
        label=f"{name} by importance removed",
        line=[(removed, line(removed)) for removed in sorted(lost)],
        dots=[
            *(Dot(*pair, chosen=False) for pair in zip(lost, values, strict=True)),
            Dot(share, line(share) if at is None else at, chosen=True),
        ],
        axis=("no importance removed", f"{(most := max(*lost, share) or 1.0):.0%} removed"),
        most=most,
    )


def _render(template: str, **values: Any) -> str:
    return environment("hies_export.lab.ui").get_template(template).render(values)
