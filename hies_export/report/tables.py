"""The tables that every rendering shows, as text in rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..evaluate.judge import Tried
from ..evaluate.metrics import METRICS, title_of
from ..forms.judge import FormTime, Judged
from ..forms.measure.counts import Both, LayerFlops
from ..forms.measured import LatencyRow
from . import text
from .report import FirstMetric, Report
from .text import FIRST_HIT, agreement, named_units, runtime_name, si

# Parts of a layer's FLOPs, and what the table calls them.
FLOP_PARTS = {
    "projections": "projections",
    "products": "attention products",
    "feed_forward": "feed-forward",
    "other": "other",
}


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
    """Return by name what terminal, Markdown and card show of a report, without what it does not have."""
    rows, layers = report.latency, report.details.flops_per_layer
    served = "As served" if report.cascade else "In fewer bits"
    at = " x ".join(map(str, layers.shape)) if layers else ""
    parts = {
        "changed": Part("What changed", comparison_table(report), (text.budget_text(report), text.length_text(report))),
        "family": Part("", None, (text.family_text(report),)),
        "latency": Part("Latency", *((latency_table(rows), (text.latency_text(rows),)) if rows else ())),
        "served": Part(served, forms_table(report), (text.forms_text(report), text.cascade_text(report))),
        "chosen": Part(
            f"How it was chosen, on {text.held_out_rows(report)}",
            tried_table(report),
            (text.tried_text(report), text.alpha_text(report)),
        ),
        "layers": Part(f"FLOPs of every layer, at {at}", layer_table(layers.dense, layers.slim) if layers else None),
        "checks": Part("Checks", check_table(report)),
        "method": Part(
            "How it was measured", None, (f"{text.method_text(report)} {text.environment_text(report.environment)}",)
        ),
    }
    return {name: part for name, part in parts.items() if part.table or any(part.notes)}


class SizeRow(NamedTuple):
    """A size of both models with its unit, the change in percent, and the slim model's share of the dense one's."""

    name: str
    dense: str
    slim: str
    change: str
    ratio: float


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
        SizeRow(name, si(size.dense) + unit, si(size.slim) + unit, change(size.dense, size.slim), size.ratio)
        for name, size, unit in sizes
        if size is not None
    ]


def comparison_table(report: Report) -> Table:
    """Return everything that both models have: units, sizes, the first metric, stability, benchmarks.

    Without labels there is no metric: it would compare with the dense model's own predictions, as stability does.
    """
    quality, ranking = report.quality, report.ranking
    labelled = report.details.data.evaluation_labelled
    before, shown = report.details.uncompensated, shown_metrics(ranking)
    first = next((name for name in report.metrics if not text.is_own(name)), None)
    rows = [
        *(
            (name, f"{units.total:,}", f"{units.kept:,}", change(units.total, units.kept))
            for name, units in named_units(report)
        ),
        *(size[:4] for size in size_rows(report)),
        *([("GGUF file", "", si(report.bytes.gguf) + "B", "")] if report.bytes.gguf else []),
        *([quality_row(title_of(first), report.metrics[first])] if labelled and first and first not in shown else []),
        *([] if ranking else [(agreement(report), "", f"{report.stability:.1%}", ""), *own_rows(report.metrics)]),
        *ranking_rows(ranking, report.metrics),
        *(quality_row(name, values) for name, values in report.details.benchmarks.items()),
    ]
    if before is not None:
        metric = quality.metric
        if labelled:
            rows.append((f"{title_of(metric)} before compensation", "", f"{before.metrics[metric]:.4f}", ""))
        rows.append((f"{agreement(report)} before compensation", "", f"{before.stability:.1%}", ""))
    return Table(("", "dense", "slim", "change"), rows)


# What reports show of rankings: number in report.json -> name, and the metric that it is for both models.
_RANKING = {
    "ndcg": (title_of("ndcg@10"), "ndcg@10"),
    "spearman": (title_of("spearman"), "spearman"),
    "own_ndcg": (title_of("own_ndcg@10"), "own_ndcg@10"),
    "top1": (f"same {FIRST_HIT}", None),
    "cosine": ("cosine to the dense embedding", None),
}
_INDEX = {"dense_index": ", your index as it is", "slim_index": ", everything re-embedded", "candidates": ""}
# What has that cosine.
_EMBEDDED = {"dense_index": ", queries", "slim_index": ", documents"}


def ranking_rows(
    ranking: Mapping[Any, Mapping[str, float]] | None, metrics: Mapping[str, Both[float] | FirstMetric]
) -> list[tuple[str, str, str, str]]:
    """Return how a slim model ranks on each index, beside the dense model's metrics; nothing for other models."""
    rows = []
    for key, (name, metric) in _RANKING.items():
        for index, words in _INDEX.items():
            value, known = (ranking or {}).get(index, {}).get(key), metrics.get(metric or "")
            words = _EMBEDDED[index] if key == "cosine" and index in _EMBEDDED else words
            if value is not None and known is not None:
                rows.append(quality_row(f"{name}{words}", Both(known.dense, value)))
            elif value is not None:
                rows.append((f"{name}{words}", "", f"{value:.1%}" if key == "top1" else f"{value:.4f}", ""))
    return rows


def own_rows(
    metrics: Mapping[str, Both[float] | FirstMetric],
) -> list[tuple[str, str, str, str]]:
    """Return the metrics that compare with the dense model's own predictions, as shares."""
    return [(title_of(name), "", f"{of.slim:.1%}", "") for name, of in metrics.items() if text.is_own(name)]


def metric_name(metric: str, ranking: Mapping[Any, Any] | None) -> str:
    """Return the name of a metric, and the index that it is on: "MRR@10, your index as it is"."""
    ranks = metric in METRICS and METRICS[metric].ranks
    return title_of(metric) + (_INDEX["dense_index"] if ranks and "dense_index" in (ranking or {}) else "")


class Kept(NamedTuple):
    """A bar of what stays: its name, the share, the share in words, and the CSS class."""

    name: str
    share: float
    text: str
    kind: str = "slim"


def kept_bars(report: Report) -> tuple[list[Kept], str]:
    """Return what stays of the dense model's predictions or, of rankings, of the first metric, and what it is of."""
    before, ranking, quality = report.details.uncompensated, report.ranking, report.quality
    if not text.keeps_metric(report):
        bars = [Kept(agreement(report), report.stability, f"{100 * report.stability:.1f}%")]
        if before:
            share = before.stability
            bars.append(Kept("cut alone, not refitted", share, f"{100 * share:.1f}%", "other"))
        return bars, "share of the predictions"
    if quality.dense <= 0:
        return [], ""
    key = next((key for key, (_, metric) in _RANKING.items() if metric == quality.metric), "")
    found = [
        (words.removeprefix(", ") or "refitted", (ranking or {}).get(index, {}).get(key))
        for index, words in _INDEX.items()
    ]
    named = [(name, value, "slim") for name, value in found if value is not None]
    named = named or [("refitted" if before else "slim", quality.slim, "slim")]
    if before:
        named.append(("cut alone, not refitted", before.metrics[quality.metric], "other"))
    bars = [
        Kept(name, min(1.0, max(0.0, value / quality.dense)), f"{100 * value / quality.dense:.1f}%", kind)
        for name, value, kind in named
    ]
    return bars, text.share_of(quality.metric, "the dense model")


def form_note(form: Judged, report: Report) -> str:
    """Return what a form keeps, beside its time: "97.1 % same" or, of the first metric, "99.4 % kept"."""
    dense = report.quality.dense
    if not text.keeps_metric(report) or dense <= 0:
        return f"{100 * form.stability:.1f} % same"
    return f"{100 * form.quality / dense:.1f} % kept"


def shown_metrics(ranking: Mapping[Any, Any] | None) -> set[str]:
    """Return the metrics that `ranking_rows` has."""
    return {metric for _, metric in _RANKING.values() if ranking and metric}


def quality_table(report: Report) -> Table:
    """Return all metrics and benchmarks; with compensation, also the metrics of the cut alone."""
    before, ranking = report.details.uncompensated, report.ranking
    alone = before.metrics if before else {}
    shown = {metric_name(name, ranking): name for name in report.metrics}
    rows = [
        [*row, f"{alone[shown[row[0]]]:.4f}" if shown.get(row[0]) in alone else ""]
        for row in [
            *ranking_rows(ranking, report.metrics),
            *(
                quality_row(title, report.metrics[name])
                for title, name in shown.items()
                if name not in shown_metrics(ranking)
            ),
            *(quality_row(name, values) for name, values in report.details.benchmarks.items()),
        ]
    ]
    columns = 5 if before else 4
    return Table(("", "dense", "slim", "change", "cut alone")[:columns], [row[:columns] for row in rows])


def forms_table(report: Report) -> Table | None:
    """Return both models in float32 and in fewer bits, with what they keep, metrics and times; None without such forms.

    Without labels, a metric says no more than the agreement, unless it is one beside the dense model's predictions.
    Times are ratios to the first form, whose own time is in the header; its row has the control.
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
    told = [name for name in dict.fromkeys((first, *forms[0].metrics)) if labelled or text.is_own(name)]
    columns |= {title_of(name): partial(_form_metric, name=name, first=first) for name in told}
    if any(form.at_least is not None for form in forms):
        columns["held out ≥"] = lambda form: "" if form.at_least is None else f"{form.at_least:.2%}"
    columns |= {
        f"time {form_step(at)} ({at.ms:.3g} ms)": partial(_form_ratio, step=step)
        for step, at in enumerate(forms[0].times)
    }
    return filled(columns, forms)


def form_name(form: Judged, forms: Sequence[Judged]) -> str:
    """Return model and bits of a form, and its runtime if the forms have several."""
    runtimes = {one.runtime.removesuffix("-int8") for one in forms}
    on = f", {runtime_name(form.runtime.removesuffix('-int8'))}" if len(runtimes) > 1 else ""
    return f"{form.model} {form.bits}{on}"


def form_step(time: FormTime | LatencyRow) -> str:
    """Return the shape of a time, and its phase if a model generates: "8 x 128", "1 x 128 decode", "8 rows"."""
    if time.phase == "rows":
        return f"{time.batch} {'row' if time.batch == 1 else 'rows'}"
    return f"{time.batch} x {time.sequence}" + ("" if time.phase == "forward" else f" {time.phase}")


def _form_metric(form: Judged, name: str, first: str) -> str:
    value = form.quality if name == first else form.metrics[name]
    return f"{value:.1%}" if name in METRICS and METRICS[name].counts else f"{value:.4f}"


def _form_ratio(form: Judged, step: int) -> str:
    return ratio_text(form.times[step]) if step < len(form.times) else ""


def tried_table(report: Report) -> Table | None:
    """Return the candidates of `criterion: auto` and their results on held-out rows; None if there are none.

    Columns without values are left out.
    """
    if not report.details.tried:
        return None
    columns: dict[str, Callable[[Tried], str]] = {
        "candidate": _candidate,
        title_of(report.quality.metric): lambda row: "" if row.quality is None else f"{row.quality:.4f}",
        agreement(report): lambda row: f"{row.stability:.1%}",
        "": lambda row: "chosen" if row.chosen else "",
    }
    return filled(columns, report.details.tried)


def _candidate(row: Tried) -> str:
    """Return a candidate's name: its criterion and options, "hies, alpha 0.3" or "compensated, 2 steps"."""
    parts = [
        "" if row.alpha is None else f"alpha {row.alpha:g}",
        "" if row.steps == 1 else f"{row.steps} steps",
        "" if row.token_weights == 1 else f"token weights {row.token_weights:g}",
    ]
    return ", ".join(filter(None, (row.criterion, *parts)))


def filled(columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]) -> Table:
    """Return the table of every column's text for every row, without empty columns."""
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    cells = {name: column for name, column in cells.items() if any(column)}
    return Table(list(cells), [list(row) for row in zip(*cells.values(), strict=True)])


def check_table(report: Report) -> Table:
    """Return the largest differences that the checks of a run found."""
    rows = [
        ("cut model against masked model", f"{report.cut_max_abs:.2g}"),
        ("reloaded checkpoint against saved model", f"{report.reload_max_abs:.2g}"),
    ]
    if report.onnx_max_abs is not None:
        rows.append(("ONNX Runtime against torch", f"{report.onnx_max_abs:.2g}"))
    if report.bytes.gguf is not None:
        found = "llama.cpp is not installed" if report.gguf_max_abs is None else f"{report.gguf_max_abs:.2g}"
        rows.append(("next-token probabilities in llama.cpp against torch", found))
    return Table(("largest difference of any output", ""), rows)


def environment_table(environment: Mapping[str, Any]) -> Table:
    """Return the known facts about the hardware and the libraries."""
    return Table(("", ""), [(name, str(value)) for name, value in environment.items() if value is not None])


def latency_table(rows: Sequence[LatencyRow], names: tuple[str, str] = ("dense", "slim")) -> Table:
    """Return medians, the paired ratio beside the control's, and further values of the rows; no empty columns."""
    first, second = names
    columns: dict[str, Callable[[LatencyRow], str]] = {
        "": lambda row: row.get("model", ""),
        "median latency": row_name,
        first: lambda row: f"{row.dense_ms:.2f} ms",
        second: lambda row: f"{row.slim_ms:.2f} ms",
        f"{second} / {first} [95 %]": ratio_text,
        f"{first} / {first}": _control,
        "realised": _realised,
        "tokens/s": lambda row: pair_text(row.tokens_per_second),
        "device GB": lambda row: pair_text(row.peak_bytes, scale=1e-9),
    }
    return filled(columns, rows)


def percentile_table(rows: Sequence[LatencyRow]) -> Table:
    """Return the percentiles of the times in milliseconds, the ratio beside the control's, and the realised share."""

    def both(dense: float | None, slim: float | None) -> str:
        return "" if dense is None or slim is None else f"{dense:.2f} → {slim:.2f}"

    columns: dict[str, Callable[[LatencyRow], str]] = {
        "dense → slim": row_name,
        "p50, ms": lambda row: both(row.dense_ms, row.slim_ms),
        "p90, ms": lambda row: both(row.dense_p90_ms, row.slim_p90_ms),
        "slim / dense [95 %]": ratio_text,
        "dense / dense": _control,
        "realised": _realised,
    }
    return Table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def layer_table(dense: Sequence[LayerFlops], slim: Sequence[LayerFlops] | None = None) -> Table:
    """Return the MFLOPs of every layer of one model, or of both as "dense → slim", and their sums."""
    models = [dense] if slim is None else [dense, slim]
    parts = [part for part in FLOP_PARTS if any(getattr(row, part) for rows in models for row in rows)]

    def line(name: str, layers: Sequence[Sequence[LayerFlops]]) -> list[str]:
        """Return the cells of one layer, or of all, of each model."""
        cells = [[sum(getattr(row, part) for row in rows) for rows in layers] for part in parts]
        cells.append([sum(values) for values in zip(*cells, strict=True)])
        return [name, *(" → ".join(dict.fromkeys(map(_millions, cell))) for cell in cells)]

    lines = [line(rows[0].layer or "outside the layers", [[row] for row in rows]) for rows in zip(*models, strict=True)]
    return Table(("MFLOPs", *(FLOP_PARTS[part] for part in parts), "all"), [*lines, line("all", models)])


def row_name(row: LatencyRow) -> str:
    """Return runtime and shape of a row, its phase if a model generates, its precision if it is not float32."""
    dtype = "" if row.dtype == "float32" else f" {row.dtype}"
    return f"{row.runtime} {form_step(row)}{dtype}"


def ratio_text(row: LatencyRow | FormTime) -> str:
    """Return the ratio of a row with its interval, or "noisy"."""
    return "noisy" if row.noisy else f"{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"


def pair_text(values: Both[Any] | None, *, scale: float = 1.0) -> str:
    """Return "dense → slim" of two numbers, multiplied by `scale`; empty without numbers."""
    numbers = [values.dense * scale, values.slim * scale] if values else []
    return " → ".join(f"{number:.0f}" if number >= 100 else f"{number:.3g}" for number in numbers)


def _control(row: LatencyRow) -> str:
    """Return the interval of the control's ratio."""
    return f"[{row.control_low:.3f}, {row.control_high:.3f}]"


def _realised(row: LatencyRow) -> str:
    """Return the share of the FLOPs saving that became a time saving; empty for a decode step."""
    if row.realised is None or row.noisy:
        return ""
    return f"{row.realised:.0%}" + (f" of {1 - row.flops_ratio:.1%}" if row.flops_ratio else "")


def quality_row(name: str, values: Both[float] | FirstMetric) -> tuple[str, str, str, str]:
    """Return the row of a metric of both models."""
    return name, f"{values.dense:.4f}", f"{values.slim:.4f}", f"{values.slim - values.dense:+.4f}"


def change(dense: float, slim: float) -> str:
    """Return by how much a size changed, such as "-33.3%"."""
    return f"{(slim - dense) / dense:+.1%}"


def _millions(number: float) -> str:
    """Return a number in millions, with four significant digits, or whole if it has more."""
    return f"{number / 1e6:,.0f}" if number >= 1e9 else f"{number / 1e6:.4g}"
