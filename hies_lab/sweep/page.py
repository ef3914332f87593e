"""sweep.html: a sweep as one page that needs nothing but a browser, in the style of a run's report."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from hies_export.checkpoint.folders import replace_file
from hies_export.errors import RequestError
from hies_export.files import read_json
from hies_export.report.drawing import VARIABLES, for_page
from hies_export.report.frontier import draw_frontier
from hies_export.report.html import environment
from hies_export.report.tables import Table, filled
from hies_export.report.words import environment_text

from ..baselines.names import JUDGED_ONLY
from . import results
from .charts import (
    SERIES,
    Axis,
    Chart,
    Style,
    alpha_axis,
    budget_axis,
    chart,
    draw_chart,
    line_styles,
    sweep_frontier,
    time_axis,
)
from .results import COMPENSATIONS, Row, budget_name, budget_of, budgets_of, line_name, share_text
from .schemas import SWEEP, SWEEP_DETAILS, SweepAbout, SweepFile, SweepPage

PAGE = "sweep.html"
QUANTITIES = ("stability", "quality")
# Least number of alphas for a curve.
FEWEST_ALPHAS = 3


class Panel(NamedTuple):
    """Charts beside each other, under one title."""

    title: str
    charts: Sequence[Chart]


def read_sweep(folder: Path) -> tuple[list[Row], SweepAbout]:
    """Return the rows of a finished sweep, and the facts about it.

    Raises:
        RequestError: The sweep is not finished, or its files are damaged.
    """
    if not (folder / "sweep.json").is_file():
        raise RequestError(
            f"a sweep must be finished to be shown, but {folder} has no sweep.json; run the same 'hies-export sweep' "
            "again: it goes on where it stopped"
        )
    rows = read_json(folder / "sweep.json", SweepFile, SWEEP)
    return rows, SweepAbout(**read_json(folder / "details.json", SweepPage, SWEEP_DETAILS).get("about", {}))


def write_page(folder: Path) -> Path:
    """Render the page of a finished sweep into its folder, and return the file."""
    replace_file(folder / PAGE, render_sweep(*read_sweep(folder), name=folder.absolute().name))
    return folder / PAGE


def render_sweep(rows: Sequence[Row], about: SweepAbout, *, name: str) -> str:
    """Return the page; `name` is the sweep's, used if it does not know its model."""
    quality, stability = results.sweep_tables(rows)
    shown = drawn_rows(rows)
    styles = line_styles(shown)
    alphas = alpha_panels(rows)
    return (
        environment("hies_lab.sweep")
        .get_template("sweep.html.j2")
        .render(
            share_text=share_text,
            draw_chart=lambda chart: _on_page(draw_chart(chart)),
            draw_frontier=lambda figure: _on_page(draw_frontier(figure)),
            title=f"{Path(about.model).name or name}: {len(quality.means)} ways to prune, compared",
            lead=lead_text(rows),
            subtitle=_subtitle(rows, about),
            styles=styles,
            seeds=len({row["seed"] for row in rows}),
            panels=budget_panels(shown, styles),
            timed=timed_panels(shown, styles),
            picture=sweep_frontier(shown, styles),
            alphas=alphas,
            alpha_styles={line.name: line.style for panel in alphas for line in panel.charts[0].lines},
            left_out=len(rows) - len(shown),
            tables=(stability, quality),
            removed=_removed_table(rows),
            every=_every_row(rows),
            method=_method_text(rows, about),
            differences=quality.differences,
            environment=environment_text(about.environment),
        )
    )


def _on_page(svg: str) -> Markup:
    """Return a picture for the page: an element of a line has its class, and its name for the script."""
    named = re.sub(r'<g id="([^"|]+)\|([^"]+)">', r'<g class="\1" data-s="\2">', svg)
    return for_page(named, VARIABLES | {colour: f"c{number}" for number, colour in enumerate(SERIES[2:], 2)})


def lead_text(rows: Sequence[Row]) -> str:
    """Return which method keeps most predictions at the middle budget, its quality there, and how often it leads.

    Baselines that are judged but cannot be cut are left out, if there are others.
    """
    rows = [row for row in rows if row["criterion"] not in JUDGED_ONLY] or rows
    quality, stability = results.sweep_tables(rows)
    budgets = stability.budgets
    column = len(budgets) // 2
    there = {name: mean for name, means in stability.means.items() if (mean := means[column]) is not None}
    best = max(there, key=lambda name: there[name])
    share = f"{share_text(budgets[column])} of the {budget_name(rows)}"
    dense = rows[0]["quality_dense"] * results.percent(rows[0]["metric"])
    text = (
        f"With {share}, {best} keeps {there[best]:.1f}% of the predictions; {rows[0]['metric']} is "
        f"{quality.means[best][column]:.2f} (dense {dense:.2f})."
    )
    if len(there) == 1:
        return text
    ahead = sum(cell.rank == 0 for cell in stability.lines[best])
    at = "at every budget" if ahead == len(budgets) else f"at {ahead} of {len(budgets)} budgets"
    return f"{text} Of {len(stability.means)} methods it keeps most {at}."


def _subtitle(rows: Sequence[Row], about: SweepAbout) -> str:
    budgets, seeds = budgets_of(rows), {row["seed"] for row in rows}
    parts = [
        about.task,
        rows[0]["metric"],
        f"{share_text(budgets[0])} to {share_text(budgets[-1])} {budget_name(rows)}" if len(budgets) > 1 else "",
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}",
        f"{len(rows):,} rows",
    ]
    return " · ".join(filter(None, parts))


def drawn_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the curves: of the first calibration size, and of automatic alphas if there are any."""
    shown = results.of_first_size(rows)
    chosen = [row for row in shown if row.get("alpha_by") != "given"]
    given = {row["alpha"] for row in shown if row.get("alpha_by") == "given"}
    return chosen if chosen and len(given) >= FEWEST_ALPHAS else shown


def budget_panels(rows: Sequence[Row], styles: Mapping[str, Style]) -> list[Panel]:
    """Return stability and quality by the budget, a panel per compensation."""
    return panels(rows, budget_axis(rows), styles, QUANTITIES)


def timed_panels(rows: Sequence[Row], styles: Mapping[str, Style]) -> list[Panel]:
    """Return quality by the measured time; nothing if nothing was timed. `sweep_frontier` shows stability."""
    timed = [row for row in rows if row.get("latency_ratio") is not None]
    return panels(timed, time_axis(timed), styles, QUANTITIES[1:])


def alpha_panels(rows: Sequence[Row]) -> list[Panel]:
    """Return quality and stability of HIES by the alphas that were given, a line per budget; nothing for a few."""
    given = [r for r in results.of_first_size(rows) if r["criterion"] == "hies" and r.get("alpha_by") == "given"]
    if len({row["alpha"] for row in given}) < FEWEST_ALPHAS:
        return []

    def name(row: Row) -> str:
        return f"{share_text(budget_of(row))} {budget_name(rows)}"

    of_budget = {budget_of(row): name(row) for row in given}
    styles = {of_budget[budget]: Style(place, "") for place, budget in enumerate(budgets_of(given))}
    drawn = []
    for modules in dict.fromkeys(row.get("modules") for row in given):
        alike = [row for row in given if row.get("modules") == modules]
        title = f"{{}}, {results.modules_label(alike[0])}" if modules else "{}"
        drawn += panels(alike, alpha_axis(given), styles, QUANTITIES, name=name, title=title)
    return drawn


def panels(
    rows: Sequence[Row],
    axis: Axis,
    styles: Mapping[str, Style],
    quantities: Sequence[str],
    *,
    name: Callable[[Row], str] | None = None,
    title: str = "{}",
) -> list[Panel]:
    """Return a panel for each compensation, whose name stands in its title, with a chart for each quantity.

    `name` is that of a row's line, by default its method's.
    """
    found = []
    for compensation in dict.fromkeys(row["compensation"] for row in rows):
        alike = [row for row in rows if row["compensation"] == compensation]
        of_line = name or partial(line_name, rows=rows)
        charts = [chart(alike, quantity, axis, styles, name=of_line) for quantity in quantities]
        found.append(Panel(title.format(COMPENSATIONS[compensation]), charts))
    return found


def _removed_table(rows: Sequence[Row]) -> Table | None:
    """Return how many heads and neurons each method removes, on average over seeds; None without neurons."""
    if not any(row.get("neurons_removed") for row in rows):
        return None
    budgets = budgets_of(rows)
    cut = {results.method_label(row, rows) for row in rows if row["heads_removed"] is not None}

    def cell(alike: Sequence[Row]) -> str:
        if not alike:
            return "–"
        heads, neurons = (statistics.fmean(r.get(k) or 0 for r in alike) for k in ("heads_removed", "neurons_removed"))
        return f"{heads:.0f} + {neurons:,.0f}"

    header = (budget_name(rows), *map(share_text, budgets))
    found = [(name, by) for name, by in results.grouped(rows).items() if name in cut]
    return Table(header, [(name, *(cell(by.get(b, ())) for b in budgets)) for name, by in found])


def _every_row(rows: Sequence[Row]) -> Table:
    """Return all rows, with the columns that differ."""

    def number(key: str, form: str) -> Any:
        return lambda row: "" if row.get(key) is None else f"{row[key]:{form}}"

    columns: dict[str, Any] = {
        "criterion": lambda row: row["criterion"],
        "alpha": number("alpha", "g"),
        "alpha by": lambda row: row.get("alpha_by") or "",
        "removes": results.modules_label if any(row.get("modules") for row in rows) else lambda row: "",
        budget_name(rows): lambda row: share_text(budget_of(row)),
        "seed": lambda row: str(row["seed"]),
        "samples": lambda row: f"{row['calibration_samples']:,}",
        "compensation": lambda row: COMPENSATIONS[row["compensation"]],
        rows[0]["metric"]: number("quality", ".4f"),
        "stability": number("stability", ".1%"),
        "FLOPs": number("flops_ratio", ".3f"),
        "heads removed ": number("heads_removed", ",d"),
        "neurons removed": number("neurons_removed", ",d"),
        "time": number("latency_ratio", ".3f"),
    }
    return filled(columns, rows)


def _method_text(rows: Sequence[Row], about: SweepAbout) -> str:
    """Return how the sweep was made, and on which rows."""
    sizes = sorted({row["calibration_samples"] for row in rows})
    sizes_text = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    where = f" of {about.calibration_split}" if about.calibration_split else ""
    sentences = [
        f"Units were scored on {sizes_text} samples{where}; every seed draws its own.",
        "Without compensation, units are masked; with it, the model is cut and refitted in closed form.",
        "Stability is the share of predictions that equal the dense model's. Bands and ± are one standard deviation "
        "over seeds.",
    ]
    if about.evaluation_samples:
        rest = f" of {about.evaluation_of:,}" if about.evaluation_of > about.evaluation_samples else ""
        drawn = ", drawn" if rest else ""
        sentences.append(
            f"All models were judged on the same {about.evaluation_samples:,}{rest} samples of "
            f"{about.evaluation_split}{drawn}."
        )
    if about.shape:
        sentences.append(f"FLOPs are counted at {' x '.join(map(str, about.shape))}.")
    return " ".join(sentences)
