"""Sentences about a report that more than one rendering shows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.splits import DataFacts
from ..evaluate.metrics import METRICS, higher_is_better, title_of
from ..forms.measured import LatencyRow
from ..recipe.budget import KeepBudget, Outcome
from ..tasks import TASKS
from .outcomes import asked_words, found_words, stays_words
from .report import Report, UnitCounts

# A metric on the rows that a plan was chosen on is suspicious if it is better by more than this share.
FAR = 0.1
# The word for a prediction of an embedding model or a reranker.
FIRST_HIT = "first hit"


def model_name(report: Report) -> str:
    """Return the dense model's Hub id, or the name of its folder without the local path."""
    path = Path(report.model)
    return path.name if path.is_absolute() or os.path.exists(path) else report.model


def removed_text(heads: UnitCounts, neurons: UnitCounts | None = None) -> str:
    """Return how much was removed: "20 of 72 heads and 4,300 of 9,216 neurons removed"; no kind without units."""
    counts = [(heads, "heads"), (neurons, "neurons")]
    shown = [f"{units.removed:,} of {units.total:,} {name}" for units, name in counts if units and units.total]
    return f"{' and '.join(shown) or 'nothing'} removed"


def named_units(report: Report) -> list[tuple[str, UnitCounts]]:
    """Return full name and counts of every kind of unit that the run could remove."""
    counts = [("attention heads", report.heads), ("feed-forward neurons", report.neurons)]
    return [(name, units) for name, units in counts if units and units.total]


def kinds_text(report: Report, *, joined: str = "and") -> str:
    """Return the units that the run could remove: "heads", "neurons", or both, joined by a word."""
    return f" {joined} ".join(name.split()[-1] for name, _ in named_units(report))


def title(report: Report) -> str:
    """Return the report's headline, with the kinds of units of which some were removed."""
    removed = [(name, units.removed / units.total) for name, units in named_units(report) if units.removed]
    shares = [f"{f'{share:.0%}' if share >= 0.01 else 'under 1%'} of its {name}" for name, share in removed]
    return f"{model_name(report)}, {' and '.join(shares) or 'nothing'} removed"


def counts_text(report: Report) -> str:
    """Return how much was removed, as the beginning of the card says it: "20 of the 72 attention heads"."""
    return " and ".join(f"{units.removed:,} of the {units.total:,} {name}" for name, units in named_units(report))


def criterion_text(report: Report) -> str:
    """Return the criterion, its alpha, and whether the output projections were refitted."""
    refitted = ", output projections refitted in closed form" if report.details.compensation else ""
    return report.criterion + ("" if report.alpha is None else f", alpha {report.alpha:g}") + refitted


def runtime_name(name: str) -> str:
    """Return a runtime as a sentence writes it: "ONNX Runtime", "ONNX Runtime (cuda)", "OpenVINO", "torch"."""
    if not name.startswith("onnxruntime-"):
        return {"openvino": "OpenVINO", "llamacpp": "llama.cpp"}.get(name, name)
    kind = name.removeprefix("onnxruntime-").removeprefix("cpu").removeprefix("-")
    return f"ONNX Runtime ({kind})" if kind else "ONNX Runtime"


def si(number: float) -> str:
    """Return a number with three significant digits and an SI prefix; whole numbers below 1,000 as they are."""
    # Rounded first: 999,999 is 1.00 M, and no 1000 k.
    rounded = float(f"{number:.3g}") if number >= 1000 else number
    power = min((len(str(int(rounded))) - 1) // 3, 4)
    scaled = rounded / 1000**power
    digits = 0 if power == 0 and number == int(number) else max(0, 3 - len(str(int(scaled))))
    return f"{scaled:.{digits}f} {' kMGT'[power]}".rstrip() + " " * (power == 0)


def agreement(report: Report) -> str:
    """Return the name of the stability: when two predictions count as the same."""
    word, tolerance = report.details.stability_of, report.details.stability_tolerance
    return f"same {word}" if tolerance is None else f"same within {tolerance:g}"


def samples_word(report: Report) -> str:
    """Return what a report's samples are: "queries", "pairs" or "texts" of a model that ranks, and "rows" of others."""
    if report.ranking is None:
        return "rows"
    known = set().union(*report.ranking.values())
    if "spearman" in known:
        return "pairs"
    return "queries" if "ndcg" in known or "candidates" in report.ranking else "texts"


def keeps_metric(report: Report) -> bool:
    """Return whether what is kept is a share of the first metric."""
    metric = METRICS.get(report.quality.metric)
    return report.ranking is not None or (metric is not None and metric.terms is not None)


def is_own(metric: str) -> bool:
    """Return whether a metric compares with the dense model's own predictions."""
    return metric in METRICS and METRICS[metric].own


def share_of(metric: str, model: str) -> str:
    """Return what a share of a model's metric of rankings is called; own rankings are a share already."""
    return title_of(metric) if is_own(metric) else f"{title_of(metric)}, share of {model}'s"


def sentence_class(report: Report) -> str | None:
    """Return the class of sentence-transformers that loads the slim model; None if there is none."""
    task = TASKS.get(report.task)  # one that a user registered may be unknown in another process
    if task is not None and task.embeds:
        return "SentenceTransformer"
    return "CrossEncoder" if "candidates" in (report.ranking or {}) else None


def budget_text(report: Report) -> str:
    """Return what the budget allowed and what was measured, in a sentence; empty for a share of the heads."""
    outcome = report.details.outcome
    if outcome is None or outcome.budget.heads is not None:
        return ""
    budget, found = outcome.budget, outcome.found
    assert found is not None
    if budget.max_drop is not None:
        rows = held_out_rows(report, otherwise=f"{outcome.samples} held-out samples")
        return (
            f"Budget: {budget.metric} may get worse by {budget.by:g} on {rows}. Dense {outcome.dense:.4f}, which the "
            f"slim model loses {found.value:.4f} of; {_tried(len(outcome.judged), 'plan')}."
        )
    if budget.keep is not None:
        return _keep_text(report, outcome, budget.keep)
    of = {"flops": "the FLOPs", "parameters": "the parameters", "latency": "the time"}[budget.kind]
    timed, dense, where, apart = budget.latency, "dense model", "", ""
    if timed is not None:
        dense = "dense model in float32" if timed.of == "float32" else dense
        bits = f" in {timed.dtype}" if timed.dtype else ""
        where = f" on {timed.runtime}{bits} at {timed.batch} x {timed.sequence}"
        assert outcome.predicted is not None
        apart = "" if outcome.noisy else f", {100 * abs(found.value - outcome.predicted):.1f} points apart"
    measured = "too noisy to measure" if outcome.noisy else f"measured {found.value:.3f}"
    return (
        f"Budget: at most {budget.ratio:g} of {of} of the {dense}{where}. "
        f"Predicted {outcome.predicted:.3f}, {measured}{apart}."
    )


def _keep_text(report: Report, outcome: Outcome, keep: KeepBudget) -> str:
    """Return the promise, the result on the held-out rows, and the difference on the evaluated rows."""
    rows = held_out_rows(report, otherwise=f"{outcome.samples:,} held-out {samples_word(report)}")
    tried = _tried(len(outcome.judged), "cut") if outcome.judged else "no cut was found that keeps it"
    text = f"Budget: {asked_words(outcome)}, promised on {rows}: {found_words(outcome)}; {tried}."
    if outcome.predicted is not None:
        text += f" {outcome.predicted:.3f} of the time on {runtime_name(str(keep.runtime))} was predicted."
    if keep.predictions is None:
        return text
    kept = evaluated_share(report, keep.metric, keep.index)
    if kept is None:
        return text
    apart, data = kept - keep.predictions, report.details.data
    side = "above" if apart >= 0 else "below"
    text = (
        f"{text} On the evaluated {samples_word(report)}, {100 * kept:.2f} % {stays_words(outcome)}, "
        f"{100 * abs(apart):.2f} points {side} the promise."
    )
    if data.held_out_further and not data.alike:
        text += f" If the model was trained on {data.held_out_split}, the promise is too optimistic for new rows."
    return text


def evaluated_share(report: Report, metric: str | None = None, index: str | None = None) -> float | None:
    """Return what is kept on the evaluated rows: of the predictions or, relative to the dense model, of a metric.

    Metrics are those on the dense model's index. None if the evaluation does not know the metric.
    """
    if metric is None:
        return report.stability
    found = report.metrics.get(metric)
    if found is None or found.dense <= 0:
        return None
    if index != "slim":
        return found.slim / found.dense
    slim = (report.ranking or {}).get("slim_index", {}).get(metric.removesuffix("@10"))
    return None if slim is None else slim / found.dense


def length_text(report: Report) -> str:
    """Return where the length of the timed rows comes from; empty if the request gave it."""
    found = report.details.row_length
    if found is None:
        return ""
    on_rows = any(time.phase == "rows" for form in report.details.forms for time in form.times)
    median = f"the median of {found.rows:,} rows of the data is {found.median:g}, rounded up"
    if on_rows:
        return f"Forms are timed on rows as they come, and FLOPs are counted at {found.tokens} tokens: {median}."
    return f"Where no length was asked for, rows of {found.tokens} tokens were timed: {median}."


def _tried(count: int, what: str) -> str:
    return f"{count} {what} was tried" if count == 1 else f"{count} {what}s were tried"


def forms_text(report: Report) -> str:
    """Return how the forms of both models were judged and timed; empty if there is only one."""
    forms = report.details.forms
    if not forms:
        return ""
    layers, counts = report.exported.layers if report.exported else None, ""
    if layers:
        bits, count = next(iter(layers.items()))
        rest = layers.get("float32", 0)
        small = f"{rest} small {'one' if rest == 1 else 'ones'}"
        counts = f" Of the slim model, {count} linear layers are in {bits}, {small} in float32."
    on_rows = any(time.phase == "rows" for time in forms[0].times)
    timed = " on these rows as they come" if on_rows else ""
    brief = any(len(form.times) < len(forms[0].times) for form in forms)
    others = " Forms that another one beats were timed briefly, in the first column only." if brief else ""
    return (
        f"Every form ran the evaluation rows itself. All were timed{timed}, interleaved in one process.{others} Time "
        f"is relative to {forms[0].model} {forms[0].bits}; its own row times a second copy, the control.{counts}"
    )


def cascade_text(report: Report) -> str:
    """Return the promise of a cascade, its evidence, and its results; empty without one."""
    found, facts = report.cascade, report.details.cascade
    if found is None or facts is None:
        return ""
    kept = "as promised" if 1 - found.stability <= found.disagreement else "fewer than promised"
    tried = ""
    if facts.tried:
        shares = ", ".join(f"{size.flops:.2f}" for size in facts.tried if size.problem is None)
        tried = f" Cascades with {shares} of the FLOPs were tried, and this one is the fastest of them."
        tried += "".join(
            f" With {size.flops:.2f} there is none: {size.problem}." for size in facts.tried if size.problem
        )
    return (
        f"Cascade: at most {100 * found.disagreement:g} % of the answers differ from the dense model's, with "
        f"{100 * found.confidence:g} % confidence (Clopper-Pearson, {found.rows:,} held-out rows, {facts.differ} of "
        f"which differ). Rows whose two largest logits are at most {found.threshold:.3f} apart go on to the dense "
        f"part: {100 * found.passed_on:.1f} % of the evaluated rows. Of all of these, {100 * found.stability:.2f} % "
        f"keep their answer, {kept}. The file has {si(found.bytes)}B; the dense model alone has "
        f"{si(facts.parts.dense)}B, the slim one {si(facts.parts.slim)}B.{tried}"
    )


def family_text(report: Report) -> str:
    """Return that the slim model is of another stock family, and why; empty if it is not."""
    family = report.details.family
    return family.note if family else ""


def method_text(report: Report) -> str:
    """Return which data the units were scored on, and which data quality was measured on."""
    data = report.details.data
    own = {"answer": "their answers", "next token": "their next tokens", "choice": "their right choices"}
    known = own.get(report.details.stability_of, "their labels")
    labels = f"with {known}" if data.labels == "data" else "with the model's own predictions as labels"
    if report.ranking is not None:
        labels = "without labels"
    asked, used = data.calibration_batch_asked, data.calibration_batch
    halved = f" ({used} at once: {asked} did not fit into memory)" if used < asked else ""
    lines = [
        f"{kinds_text(report).capitalize()} were scored on {data.calibration_samples} samples{halved} {labels}; "
        f"quality is over {_evaluation_rows(data)} of {data.evaluation_split}."
    ]
    if not data.evaluation_labelled:
        what = "predictions" if report.ranking is None else "rankings"
        lines.append(f"These have no labels: metrics compare with the dense model's own {what}.")
    if data.compensation_samples:
        lines.append(f"The output projections were refitted on {data.compensation_samples:,} samples.")
    return " ".join(filter(None, [*lines, _held_out_note(report)]))


def alpha_text(report: Report) -> str:
    """Return why `alpha: auto` chose its alpha, which may not have the best metric; empty if alpha was given."""
    points = report.details.alpha_curve
    chosen = next((point for point in points if point.alpha == report.alpha), None)
    if chosen is None:
        return ""
    said, metric = f"Alpha {chosen.alpha:g} was chosen: ", report.quality.metric
    close, among, better = list(points), f"of the {len(points)} alphas", ""
    judged = [(point.quality, point) for point in points if point.quality is not None]
    if len(judged) == len(points):
        better = f"the better {metric}, then "
        sign = 1 if higher_is_better(metric) else -1
        quality, best = max(judged, key=lambda pair: sign * pair[0])
        error = best.standard_error
        close = [point for value, point in judged if sign * (quality - value) <= error]
        if close == [chosen]:
            return f"{said}no other comes within one standard error ({error:.2g}) of its {metric}, {quality:.4f}."
        among = (
            f"of the {len(close)} alphas within one standard error ({error:.2g}) of the best {metric} "
            f"({quality:.4f}, at alpha {best.alpha:g}), which so few rows cannot tell apart,"
        )
    said += f"{among} it keeps the most {report.details.stability_of}s ({chosen.stability:.1%})"
    as_many = [f"{p.alpha:g}" for p in close if p.stability == chosen.stability and p is not chosen]
    if not as_many:
        return f"{said}."
    return f"{said}, as many as {', '.join(as_many)}; a tie goes to {better}the larger alpha."


def tried_text(report: Report) -> str:
    """Return why `criterion: auto` chose its candidate, which may not have the best numbers; empty if it chose none."""
    chosen = next((row for row in report.details.tried if row.chosen), None)
    if chosen is None:
        return ""
    metric = "" if chosen.quality is None else f" and its {report.quality.metric} is not clearly worse"
    return (
        "Candidates are listed in order of trust. A later one is taken only if it agrees with the dense model more "
        f"often by two standard errors{metric}. No candidate after the chosen one does."
    )


def held_out_rows(report: Report, *, otherwise: str = "held-out rows") -> str:
    """Return which rows choices were judged on: "256 further rows of train"."""
    data = report.details.data
    if not data.held_out_samples:
        return otherwise
    word = samples_word(report)
    further = f"further {word}" if data.held_out_further else word
    return f"{data.held_out_samples:,} {further} of {data.held_out_split}"


def _held_out_note(report: Report) -> str:
    """Return a warning if the chosen plan does far better on the rows it was chosen on; else nothing."""
    found = [point.quality for point in report.details.alpha_curve if point.alpha == report.alpha]
    found += [row.quality for row in report.details.tried if row.chosen]
    slim = report.quality.slim
    better = [known for known in found if known is not None and abs(known - slim) > FAR * max(abs(known), abs(slim))]
    if not better or (better[-1] > slim) != higher_is_better(report.quality.metric):
        return ""
    return (
        f"The plan was chosen at {report.quality.metric} {better[-1]:.4f} on {held_out_rows(report)}, and has "
        f"{slim:.4f} here: the model may have been trained on those rows; name others in the recipe, as held_out."
    )


def _evaluation_rows(data: DataFacts) -> str:
    """Return how many samples quality was measured on, and which: "600 samples, drawn from the 1,500"."""
    used, there = data.evaluation_samples, data.evaluation_of
    if used >= there:
        return f"all {there:,} samples"
    if data.evaluation_rows == "drawn":
        return f"{used:,} samples, drawn from the {there:,}"
    return f"the first {used:,} of the {there:,} samples"


def environment_text(environment: Mapping[str, Any]) -> str:
    """Return the hardware and the libraries that decide about time, in a sentence."""
    names = {
        **{name: name for name in ("cpu", "gpu", "torch", "cuda", "transformers", "onnxruntime", "openvino")},
        **{"onnxruntime_gpu": "onnxruntime-gpu", "node_llama_cpp": "node-llama-cpp", "gpu_driver": "driver"},
    }
    return ", ".join(f"{shown} {environment[name]}" for name, shown in names.items() if environment.get(name)) + "."


def latency_text(rows: Sequence[LatencyRow], names: tuple[str, str] = ("dense", "slim")) -> str:
    """Return how the rows were timed, the range of the controls, and how to read what the rows show."""
    first = names[0]
    controls = [row.control_ratio for row in rows]
    # Loads of one model differ in time, and the interval is over these differences too.
    loads = dict.fromkeys(f"{row.loads} times on {row.runtime}" for row in rows if row.loads > 1)
    loaded = f"The models were loaded anew {' and '.join(loads)}. " if loads else ""
    apart = ", on llamacpp in a process for each," if any(row.runtime == "llamacpp" for row in rows) else ""
    on_rows = all(row.phase == "rows" for row in rows)
    how, runs = ("that of total times", "batches") if on_rows else ("the median of paired ratios", "runs")
    how += f" to their mean, and its 95 % interval is from a bootstrap over loads, copies and {runs}"
    sentences = [
        f"Timed interleaved in one process{apart} with two copies of {first}; the ratio is {how}. {loaded}"
        f"The control, {first} against itself, gave {min(controls):.3f} to {max(controls):.3f}."
    ]
    if any(row.noisy for row in rows):
        sentences.append(
            "A row is noisy if the control's interval misses 1 by more than 2 % or is wider than 10 %, or if it took "
            "longer than a row with more to compute. Its ratio means nothing; measure again on an idle machine."
        )
    if any(row.phase == "decode" for row in rows):
        sentences.append("Decode: the step that computes a row's last token, with the tokens before it in the cache.")
    if any(row.realised is not None and not row.noisy for row in rows):
        sentences.append("Realised: the share of the FLOPs saving that became a time saving.")
    graphs = sorted({row.runtime for row in rows if row.cuda_graph})
    if graphs:
        sentences.append(f"CUDA graphs were replayed by {', '.join(graphs)}.")
    return " ".join(sentences)
