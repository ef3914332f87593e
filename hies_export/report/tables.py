"""The tables and maps that every rendering shows, as text, and the report on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..evaluate.judge import Tried
from ..evaluate.metrics import METRICS, counted_by, title_of
from ..forms.judged import Judged
from ..forms.time import TimedRow
from ..select.plan import PruningPlan
from ..tasks import TASKS
from ..units.counts import Both, Counted, si
from . import words
from .report import CUT, KEPT, FirstMetric, NeuronCount, Report, head_map, neuron_counts
from .words import FIRST_HIT, agreement, form_name, form_step, is_own, named_units

BAR_WIDTH = 24

Row = tuple[str, str, str, str]  # of both models: a name, the dense and the slim value, and the change
Metrics = Mapping[str, Both[float] | FirstMetric]
Ranking = Mapping[Any, Mapping[str, float]]  # as in `Report.ranking`


class Table(NamedTuple):
    """A table as text: the names of its columns, and its rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Part(NamedTuple):
    """What a rendering shows under a heading: a table, and sentences below it; a missing one is empty."""

    heading: str
    table: Table | None = None
    notes: Sequence[str] = ()


def report_parts(report: Report) -> dict[str, Part]:
    """Return the parts that renderings show, by name; those that the report has nothing for are left out."""
    cascade, rows, held_out = report.cascade, report.latency, words.held_out_rows(report)
    latency = Part("Latency", latency_table(rows), (words.latency_text(rows),)) if rows else Part("Latency")
    served = "As served" if cascade else "In fewer bits"
    promised = cascade.text(report.details) if cascade else ""
    vocabulary = words.vocabulary_words(report.vocabulary) if report.vocabulary else ""
    parts = {
        "changed": Part("What changed", comparison_table(report), (words.budget_text(report), vocabulary)),
        "latency": latency,
        "served": Part(served, forms_table(report), (words.forms_text(report), promised)),
        "chosen": Part(f"How it was chosen, on {held_out}", tried_table(report), (words.tried_text(report),)),
        "checks": Part("Checks", check_table(report)),
        "method": Part("How it was measured", None, (words.method_text(report),)),
    }
    return {name: part for name, part in parts.items() if part.table or any(part.notes)}


def size_rows(report: Report) -> list[Row]:
    """Return the sizes of both models, from parameters to the cache."""
    batch, sequence = report.flops.shape
    task = TASKS.get(report.task)  # one that a user registered may be unknown in another process
    generative = task is not None and task.generative
    parameters = with_backbone([("parameters", report.parameters)], generative=generative)
    flops = with_backbone([(f"FLOPs at {batch} x {sequence}", report.flops)], generative=generative)
    sizes: list[tuple[str, Both[Any] | None, str]] = [
        *((name, count, "") for name, count in parameters),
        ("checkpoint weights", report.bytes, "B"),
        *((name, count, "") for name, count in flops),
        ("cache per token", report.cache_bytes_per_token, "B"),
    ]
    return [
        (name, si(size.dense) + unit, si(size.slim) + unit, change(size.dense, size.slim))
        for name, size, unit in sizes
        if size is not None
    ]


def with_backbone(counted: Iterable[tuple[str, Counted]], *, generative: bool) -> list[tuple[str, Both[int]]]:
    """Return the counts of both models; for a generative model, each is followed by the backbone's, as in papers."""
    rows: list[tuple[str, Both[int]]] = []
    for name, count in counted:
        rows.append((name, count))
        if generative and count.backbone is not None:
            rows.append((f"{name.partition(' ')[0]} of the backbone", count.backbone))
    return rows


def comparison_table(report: Report) -> Table:
    """Return units, sizes, metrics and stability of both models."""
    details, ranking, same = report.details, report.ranking, (agreement(report), report.stability)
    tokens = [("tokens of the vocabulary", report.vocabulary)] if report.vocabulary else []
    rows: list[Row] = [*unit_rows([*named_units(report.units), *tokens]), *size_rows(report)]
    if report.bytes.gguf:
        rows.append(("GGUF file", "", si(report.bytes.gguf) + "B", ""))
    rows += quality_rows(report.metrics, ranking, labelled=details.data.evaluation_labelled, same=same)
    return Table(("", "dense", "slim", "change"), rows)


def unit_rows(units: Sequence[tuple[str, Any]]) -> list[Row]:
    """Return how many units of each kind both models have, given the name and `UnitCounts` of each."""
    return [(name, f"{count.total:,}", f"{count.kept:,}", change(count.total, count.kept)) for name, count in units]


def quality_rows(metrics: Metrics, ranking: Ranking | None, *, labelled: bool, same: tuple[str, float]) -> list[Row]:
    """Return the metrics of both models; where nothing is ranked, also the stability, as `same` names and gives it.

    Without labels, only metrics that compare with the dense model's predictions are shown: any other would repeat the
    stability.
    """
    in_ranking = {metric for _, metric in _RANKING.values()} if ranking else set()
    labelled_rows = [
        quality_row(metric_name(name, ranking), values)
        for name, values in metrics.items()
        if labelled and name not in in_ranking and not is_own(name)
    ]
    if ranking:
        return [*ranking_rows(ranking, metrics), *labelled_rows]
    own = [(title_of(name), "", metric_text(name, values.slim), "") for name, values in metrics.items() if is_own(name)]
    name, stability = same
    return [*labelled_rows, (name, "", f"{stability:.1%}", ""), *own]


# What reports show of rankings: number in report.json -> name, and the metric that it is for both models.
_RANKING = {
    "ndcg": (title_of("ndcg@10"), "ndcg@10"),
    "spearman": (title_of("spearman"), "spearman"),
    "own_ndcg": (title_of("own_ndcg@10"), "own_ndcg@10"),
    "top1": (f"same {FIRST_HIT}", None),
}
_INDEX = {"dense_index": ", your index as it is", "slim_index": ", everything re-embedded", "candidates": ""}


def ranking_rows(ranking: Ranking, metrics: Metrics) -> list[Row]:
    """Return the numbers of a slim model's rankings on each index, beside the dense model's where it has them."""
    rows = []
    for key, (name, metric) in _RANKING.items():
        for index, where in _INDEX.items():
            value, both = ranking.get(index, {}).get(key), metrics.get(metric or "")
            if value is not None and both is not None:
                rows.append(quality_row(f"{name}{where}", Both(both.dense, value)))
            elif value is not None:
                rows.append((f"{name}{where}", "", f"{value:.1%}" if key == "top1" else f"{value:.4f}", ""))
    return rows


def metric_name(metric: str, ranking: Mapping[Any, Any] | None) -> str:
    """Return the title of a metric and, for a search, the index that it is on: "MRR@10, your index as it is"."""
    ranks = metric in METRICS and METRICS[metric].ranks
    return title_of(metric) + (_INDEX["dense_index"] if ranks and "dense_index" in (ranking or {}) else "")


def metric_text(metric: str, value: float) -> str:
    """Return the value of a metric as a number, or in percent if it is a share of counted things, such as entities."""
    return f"{value:.4f}" if counted_by(metric) is None else f"{value:.1%}"


def quality_row(name: str, values: Both[float] | FirstMetric) -> Row:
    """Return the row of a metric: its name, both models' values and their difference."""
    return name, f"{values.dense:.4f}", f"{values.slim:.4f}", f"{values.slim - values.dense:+.4f}"


def change(dense: float, slim: float) -> str:
    """Return by how much a size changed, such as "-33.3%"."""
    return "0.0%" if slim == dense else f"{(slim - dense) / dense:+.1%}"


def forms_table(report: Report) -> Table | None:
    """Return the table of all forms, with what they keep, their metrics and times; None without forms.

    Without labels, only metrics that compare with the dense model's predictions are shown. Times are relative to the
    first form, whose own time is in the header and whose row has the control.
    """
    forms = report.details.forms
    if not forms:
        return None
    columns: dict[str, Callable[[Judged], str]] = {
        "": partial(form_name, forms=forms),
        "file": lambda form: "" if form.bytes is None else f"{si(form.bytes)}B",
        agreement(report): lambda form: f"{form.stability:.1%}",
    }
    labelled, first = report.details.data.evaluation_labelled, report.quality.metric

    def metric(form: Judged, name: str) -> str:
        return metric_text(name, form.quality if name == first else form.metrics[name])

    def ratio(form: Judged, step: int) -> str:
        return ratio_text(form.times[step]) if step < len(form.times) else ""  # some have only the first time

    for name in dict.fromkeys((first, *forms[0].metrics)):
        if labelled or is_own(name):
            columns[title_of(name)] = partial(metric, name=name)
    columns["held out ≥"] = lambda form: "" if form.at_least is None else f"{form.at_least:.2%}"
    for step, time in enumerate(forms[0].times):
        columns[f"time {form_step(time)} ({time.dense_ms:.3g} ms)"] = partial(ratio, step=step)
    return filled(columns, forms)


def tried_table(report: Report) -> Table | None:
    """Return the candidates of `alpha: auto` or `criterion: auto`, judged on held-out rows; None if there are none."""

    def candidate(row: Tried) -> str:
        alpha = "" if row.alpha is None else f", alpha {row.alpha:g}"
        weights = "" if row.token_weights == 1 else f", token weights {row.token_weights:g}"
        return f"{row.criterion}{alpha}{weights}"

    columns: dict[str, Callable[[Tried], str]] = {
        "candidate": candidate,
        title_of(report.quality.metric): lambda row: "" if row.quality is None else f"{row.quality:.4f}",
        agreement(report): lambda row: f"{row.stability:.1%}",
        "": lambda row: "chosen" if row.chosen else "",
    }
    return filled(columns, report.details.tried) if report.details.tried else None


def filled(columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]) -> Table:
    """Return a table, given column names and functions from a row to its cell; empty columns are left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    shown = {name: column for name, column in cells.items() if any(column)}
    return Table(list(shown), [list(row) for row in zip(*shown.values(), strict=True)])


def check_table(report: Report) -> Table:
    """Return the largest differences that the checks of a run found."""
    rows = [
        ("cut model against masked model", f"{report.cut_max_abs:.2g}"),
        ("reloaded checkpoint against saved model", f"{report.reload_max_abs:.2g}"),
    ]
    if report.onnx_max_abs is not None:
        rows.append(("ONNX Runtime against torch", f"{report.onnx_max_abs:.2g}"))
    if report.bytes.gguf is not None:
        difference = "llama.cpp is not installed" if report.gguf_max_abs is None else f"{report.gguf_max_abs:.2g}"
        rows.append(("next-token probabilities in llama.cpp against torch", difference))
    return Table(("largest difference of any output", ""), rows)


def latency_table(rows: Sequence[TimedRow], names: tuple[str, str] = ("dense", "slim")) -> Table:
    """Return the table of medians, of the paired ratio beside the control's, and of what else the rows have."""
    first, second = names
    columns: dict[str, Callable[[TimedRow], str]] = {
        "median latency": row_name,
        first: lambda row: f"{row.dense_ms:.2f} ms",
        second: lambda row: f"{row.slim_ms:.2f} ms",
        f"{second} / {first} [95 %]": ratio_text,
        f"{first} / {first}": lambda row: f"[{row.control_low:.3f}, {row.control_high:.3f}]",
        "realised": _realised,
        "p90, ms": lambda row: _pair(row.dense_p90_ms, row.slim_p90_ms),
        "tokens/s": lambda row: _pair(both.dense, both.slim) if (both := row.tokens_per_second) else "",
    }
    return filled(columns, rows)


def row_name(row: TimedRow) -> str:
    """Return a row's runtime and `form_step`, and its dtype if it is not float32."""
    dtype = "" if row.dtype == "float32" else f" {row.dtype}"
    return f"{row.runtime} {form_step(row)}{dtype}"


def ratio_text(row: TimedRow) -> str:
    """Return a time's ratio with its interval, or "noisy"."""
    return "noisy" if row.noisy else f"{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"


def _pair(dense: float | None, slim: float | None) -> str:
    """Return "110 → 91.3", with three significant digits or as whole numbers; empty if one is unknown."""
    if dense is None or slim is None:
        return ""
    return " → ".join(f"{number:.0f}" if number >= 100 else f"{number:.3g}" for number in (dense, slim))


def _realised(row: TimedRow) -> str:
    """Return the share of the FLOPs saving that became a time saving, as "90% of 20.0%"; empty if unknown or noisy."""
    if row.realised is None or row.noisy:
        return ""
    return f"{row.realised:.0%}" + (f" of {1 - row.flops_ratio:.1%}" if row.flops_ratio else "")


def plan_maps(plan: PruningPlan) -> dict[str, str]:
    """Return a map for every kind of unit that a plan covers, as `unit_maps`."""
    return unit_maps(head_map(plan), neuron_counts(plan))


def unit_maps(marks: Mapping[str, str], neurons: Mapping[str, NeuronCount]) -> dict[str, str]:
    """Return which units stay, by "heads" and "neurons", as text with a line per layer; only kinds that could go."""
    heads = [(" ".join(line), line.count(KEPT), len(line)) for line in marks.values()]
    blocks = [(bar(count), count.kept, count.total) for count in neurons.values()]
    return {units: _map_text(lines) for units, lines in (("heads", heads), ("neurons", blocks)) if lines}


def _map_text(lines: Sequence[tuple[str, int, int]]) -> str:
    """Return a map, given for each layer its marks, how many units it keeps, and how many it had."""
    width = max(len(f"{kept:,}") for _, kept, _ in lines)
    layers = [f"{layer:3}  {marks}  {kept:{width},}/{total:,}" for layer, (marks, kept, total) in enumerate(lines)]
    return "\n".join([f"{KEPT} kept  {CUT} cut", *layers])


def bar(count: NeuronCount) -> str:
    """Return a bar of marks; if any unit stays or is cut, at least one mark shows it."""
    full = max(BAR_WIDTH * count.kept // count.total, min(count.kept, 1))
    return KEPT * full + CUT * (BAR_WIDTH - full)


def print_report(report: Report, console: Console) -> None:
    """Print the first sentence, the maps of what was cut, and all tables."""
    console.print(f"\n{words.lead_text(report)}", markup=False, style="bold", soft_wrap=True)
    print_maps(unit_maps(report.details.head_map, report.details.neurons), console)
    for part in report_parts(report).values():
        print_part(part, console)


def print_maps(maps: Mapping[str, str], console: Console) -> None:
    """Print the maps of `unit_maps`, each under its name."""
    for units, text in maps.items():
        console.print(f"\n{units}\n{text}", markup=False, highlight=False, soft_wrap=True)


def print_part(part: Part, console: Console) -> None:
    """Print a heading, its table and its sentences."""
    console.print(f"\n{part.heading}", markup=False, style="bold")
    if part.table is not None:
        console.print(plain_table(*part.table))
    for note in filter(None, part.notes):
        console.print(note, markup=False, style="dim")


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> RichTable:
    """Return a table without a frame; brackets in strings are no markup, and cells that do not fit are folded."""
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(header):
        table.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
