"""Every sentence about a report, once for all its renderings; `lead_text` is the one that they begin with.

A form is the dense or slim model, or a cascade of both, in one runtime and precision, judged and timed (`Judged`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..evaluate.metrics import METRICS, counted_by, quality_loss, title_of
from ..evaluate.promise import asked_words, found_words
from ..forms.judged import Judged
from ..forms.measured import budget_rows
from ..forms.time import TimedRow, deciding_step
from ..kinds import KINDS
from ..recipe.budget import Budget, KeepBudget, Outcome
from ..tasks import TASKS
from ..vocabulary.trim import VocabularyFacts
from .report import Report, UnitCounts

# The word for a prediction of an embedding model or a reranker.
FIRST_HIT = "first hit"


def _number(value: float) -> str:
    """Return a number with three significant digits; with three decimals below 1, and none from 100 on."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"


def _percent(share: float) -> str:
    """Return a share as "97.6 %"; one below 1 is never rounded up to "100.0 %"."""
    return f"{100 * share:.1f} %" if share >= 1 else f"{min(100 * share, 99.9):.1f} %"


def model_name(report: Report) -> str:
    """Return the dense model's Hub id, or the name of its folder."""
    path = Path(report.model)
    return path.name if path.is_absolute() or os.path.exists(path) else report.model


def removed_text(counts: Mapping[str, UnitCounts | VocabularyFacts | None]) -> str:
    """Return "20 of 72 heads and 4,300 of 9,216 neurons removed", of the kinds that the model has and could lose."""
    shown = [f"{count.removed:,} of {count.total:,} {name}" for name, count in counts.items() if count and count.total]
    *others, last = shown or ["nothing"]
    return f"{', '.join(others)} and {last} removed" if others else f"{last} removed"


def named_units(counts: Mapping[str, UnitCounts | None]) -> list[tuple[str, UnitCounts]]:
    """Return the full name, "attention heads" or "feed-forward neurons", and counts of each kind that could be cut."""
    named = [(f"{kind.module.split()[0]} {kind.units}", counts.get(kind.units)) for kind in KINDS.values()]
    return [(name, count) for name, count in named if count and count.total]


def kinds_text(report: Report, *, joined: str = "and") -> str:
    """Return the units that the run could remove: "heads", "neurons", or both, joined by a word."""
    return f" {joined} ".join(units for units, count in report.units.items() if count and count.total)


def vocabulary_words(facts: VocabularyFacts) -> str:
    """Return a note on the texts that the vocabulary was trimmed to, and on others."""
    judged, extra = facts.judged, facts.judged.tokens_ratio - 1
    return (
        f"The vocabulary has the {facts.kept:,} of {facts.total:,} tokens that {facts.texts:,} texts of {facts.source} "
        f"need. Of the {judged.texts:,} evaluated rows, {_percent(judged.share_otherwise)} are read otherwise, "
        f"which makes {100 * extra:.1f} % more tokens in all. A text in another language, or of another kind, is cut "
        "into many more tokens, which the model was not trained on: do not use it for these."
    )


def title(report: Report) -> str:
    """Return the headline: the model's name and how much was removed."""
    return f"{model_name(report)}, {removed_text({**report.units, 'tokens': report.vocabulary})}"


def criterion_text(report: Report) -> str:
    """Return the criterion, with its alpha and the refit where there are some: "hies, alpha 0.9"."""
    refitted = ", output projections refitted in closed form" if report.details.compensation else ""
    return report.criterion + ("" if report.alpha is None else f", alpha {report.alpha:g}") + refitted


def runtime_name(name: str) -> str:
    """Return the name of a runtime in a sentence: "ONNX Runtime", "ONNX Runtime (cuda)", "OpenVINO", "torch"."""
    library, _, kind = name.replace("-cpu", "", 1).partition("-")
    known = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "llamacpp": "llama.cpp"}.get(library)
    if known is None:
        return name
    return f"{known} ({kind})" if kind else known


def form_runtime(form: Judged) -> str:
    """Return the name of a form's runtime, without its bits."""
    return runtime_name(form.runtime.removesuffix("-int8"))


def form_name(form: Judged, forms: Sequence[Judged]) -> str:
    """Return a form's model and bits, such as "slim int8", and its runtime if the forms have several."""
    several = len(set(map(form_runtime, forms))) > 1
    return f"{form.model} {form.bits}" + (f", {form_runtime(form)}" if several else "")


def form_step(time: TimedRow) -> str:
    """Return the timed shape, and the phase for a model that generates: "8 x 128", "1 x 128 decode", "8 rows"."""
    if time.phase == "rows":
        return f"{time.batch} {'row' if time.batch == 1 else 'rows'}"
    return f"{time.batch} x {time.sequence}" + ("" if time.phase == "forward" else f" {time.phase}")


def agreement(report: Report) -> str:
    """Return the name of the stability in tables: "same prediction", or "same within 0.1" for a regression."""
    word, tolerance = report.details.stability_of, report.details.stability_tolerance
    return f"same {word}" if tolerance is None else f"same within {tolerance:g}"


def keeps_metric(report: Report) -> bool:
    """Return whether what a model keeps is a share of the first metric, as in `Judge.kept`, not of the predictions."""
    metric = METRICS.get(report.quality.metric)
    has_shares = report.ranking is not None or (metric is not None and metric.terms is not None)
    return has_shares and report.quality.dense > 0  # there is no share of 0


def form_kept(report: Report, form: Judged) -> float:
    """Return the share that a form keeps of the dense model's predictions or, if `keeps_metric`, first metric."""
    return form.quality / report.quality.dense if keeps_metric(report) else form.stability


def is_own(metric: str) -> bool:
    """Return whether a metric is known to compare with the dense model's own predictions."""
    return metric in METRICS and METRICS[metric].own


def sentence_class(report: Report) -> str | None:
    """Return the class of sentence-transformers that loads the slim model; None if none is known to."""
    task = TASKS.get(report.task)  # one that a user registered may be unknown in another process
    if task is not None and task.embeds:
        return "SentenceTransformer"
    is_reranker = "candidates" in (report.ranking or {})  # see `Report.ranking`
    return "CrossEncoder" if is_reranker else None


class _Subject(NamedTuple):
    """The model that the first sentence is about: what it keeps, what was promised of it, how fast and large it is."""

    name: str
    stability: float
    interval: str  # 95 % interval of the stability, or of the share of a ranking metric that stays; empty if unknown
    quality: float  # the first metric
    promise: Outcome | None
    kept: float | None  # share of what was promised that the evaluated rows keep; None if the evaluation does not know
    time: str
    size: float  # relative to the dense model's


def lead_text(report: Report) -> str:
    """Return the result of the run in one sentence: what is kept, on which rows, then time and size.

    An example is "97.0 % of the predictions stay (95.1 to 98.2 %, 436 rows); Pearson 0.903 → 0.901; 0.82 of the time on
    ONNX Runtime at 8 x 128; 0.76 of the size; budget kept." A value that was not measured is left out.
    """
    subject = _subject(report)
    promise = _promise_text(report, subject)
    if report.ranking is not None:
        kept = [_ranking_text(report, subject), promise]
    elif subject.promise is not None and subject.promise.budget.metric is None:
        kept = [promise, _quality_text(report, subject)]
    else:
        share = "all" if subject.stability == 1 else f"{_percent(subject.stability)} of the"
        same = f"{share} {report.details.stability_of}s stay{_within(report)} ({_interval_and_rows(report, subject)})"
        kept = [same, _quality_text(report, subject), promise]
    size = f"{subject.size:.2f} of the size"
    clauses = filter(None, [*kept, subject.time, size, _budget_result(report)])
    return f"{subject.name}{': ' if subject.name else ''}{'; '.join(clauses)}."


def _subject(report: Report) -> _Subject:
    """Return the form to deploy; else the cascade, if one was asked for; else the slim model."""
    forms, deployment, outcome = report.details.forms, report.details.deployment, report.details.outcome
    if deployment is not None and deployment.form is not None:
        form = forms[deployment.form]
        model = f"{form.model} model" if form.model in ("dense", "slim") else form.model
        name = f"Deploy the {model} in {form.bits} on {form_runtime(form)}"
        return _form_subject(report, name, deployment.form, deployment.promise)
    if report.cascade is not None:
        # A cascade is the last form.
        name, promised = "Cascade of both models", 1 - report.cascade.disagreement
        return _form_subject(report, name, len(forms) - 1, promised)
    met = outcome if outcome is not None and outcome.budget.searched and outcome.met else None
    of_entities = keeps_metric(report) and report.ranking is None  # then the interval is not that of the stability
    return _Subject(
        name="",
        stability=report.stability,
        interval="" if of_entities else _interval(report.details.kept_low, report.details.kept_high),
        quality=report.quality.slim,
        promise=met,
        kept=None if met is None else _slim_kept(report, met),
        time=_slim_time(report),
        size=report.bytes.ratio,
    )


def _form_subject(report: Report, name: str, number: int, promised: float) -> _Subject:
    """Return the form of a number, with a promised share, and the first of its times that is not noisy."""
    forms = report.details.forms
    form, step = forms[number], deciding_step(forms[0].times)
    time = "time too noisy to tell"
    if step is not None:
        ratio = form.times[step].ratio if number else 1.0  # that of the first form is its control's
        time = f"{ratio:.2f} of the time of dense {forms[0].bits} at {form_step(forms[0].times[step])}"
    metric = report.quality.metric if keeps_metric(report) else None
    index: Any = "dense" if metric and "dense_index" in (report.ranking or {}) else None
    keep = KeepBudget(predictions=promised, metric=metric, index=index)
    return _Subject(
        name=name,
        stability=form.stability,
        interval="" if metric else _interval(form.stability_low, form.stability_high),
        quality=form.quality,
        promise=Outcome(Budget(keep=keep), word=report.details.stability_of),
        kept=form_kept(report, form),
        time=time,
        size=_form_size(report, form),
    )


def _slim_kept(report: Report, promise: Outcome) -> float | None:
    """Return the share of the predictions, or of the promised metric, that the slim model keeps; None if unknown."""
    metric, keep = promise.budget.metric, promise.budget.keep
    if metric is None:
        return report.stability
    values, slim_index = report.metrics.get(metric), (report.ranking or {}).get("slim_index", {})
    if values is None or values.dense <= 0:
        return None
    slim = slim_index.get(metric.removesuffix("@10")) if keep and keep.index == "slim" else values.slim
    return None if slim is None else slim / values.dense


def _form_size(report: Report, form: Judged) -> float:
    """Return the size of a form's file relative to the dense float32 one's; without a file, that of its checkpoint."""
    if form.bytes is not None:
        return form.bytes / (report.details.forms[0].bytes or report.bytes.dense)
    return report.bytes.ratio if form.model == "slim" else 1.0


def _slim_time(report: Report) -> str:
    """Return the slim model's time relative to the dense one's; if none was timed, or all are noisy, its FLOPs.

    It is that of the budget if time was the budget; else that at the recipe's first shape, on ONNX Runtime if that was
    timed. Of several, it is the first that is not noisy, and never picked by its ratio.
    """
    rows = [row for row in report.latency if row.phase != "decode"]
    outcome = report.details.outcome
    budget = None if outcome is None else outcome.budget.latency
    if budget is not None:
        asked = budget_rows(budget, rows)
    else:
        asked = [row for row in rows if (row.batch, row.sequence) == tuple(report.flops.shape)]
        asked.sort(key=lambda row: not row.runtime.startswith("onnxruntime"))
    row = next((row for row in asked if not row.noisy), None)
    if row is None:
        return f"{report.flops.ratio:.2f} of the FLOPs" + (", time too noisy to tell" if rows else "")
    dtype = "" if row.dtype == "float32" else f" in {row.dtype}"
    return f"{row.ratio:.2f} of the time on {runtime_name(row.runtime)} at {form_step(row)}{dtype}"


def _interval_and_rows(report: Report, subject: _Subject) -> str:
    """Return "95.1 to 98.2 %, 436 rows", without the interval if it is unknown."""
    return ", ".join(filter(None, [subject.interval, f"{report.details.data.evaluation_samples:,} rows"]))


def _interval(low: float | None, high: float | None) -> str:
    """Return the interval of a share in percent, rounded outwards; empty if an end is unknown."""
    if low is None or high is None:
        return ""
    low, high = math.floor(1000 * low) / 10, math.ceil(1000 * high) / 10
    return f"at least {low:.1f} %" if high >= 100 else f"{low:.1f} to {high:.1f} %"


def _within(report: Report) -> str:
    """Return " within 0.1" for a regression with that tolerance; else nothing."""
    tolerance = report.details.stability_tolerance
    return "" if tolerance is None else f" within {tolerance:g}"


def _quality_text(report: Report, subject: _Subject) -> str:
    """Return the first metric of both models, or the share of what it counts; empty without labels."""
    metric = report.quality.metric
    if (counted := counted_by(metric)) is not None:
        return f"all {counted}" if subject.quality >= 1 else f"{_percent(subject.quality)} of the {counted}"
    if not report.details.data.evaluation_labelled:
        return ""
    return f"{title_of(metric)} {_number(report.quality.dense)} → {_number(subject.quality)}"


def _ranking_text(report: Report, subject: _Subject) -> str:
    """Return the first metric of rankings, the share of it that stays, and on which index, with both models' values."""
    metric, dense, quality = report.quality.metric, report.quality.dense, subject.quality
    kind = METRICS[metric].of if metric in METRICS else ""
    index = " with your index as it is" if "dense_index" in (report.ranking or {}) and "ranking" in kind else ""
    numbers = f"{_number(dense)} → {_number(quality)}"
    if dense <= 0:
        return f"{title_of(metric)} {numbers}{index}"
    interval = _interval_and_rows(report, subject)
    return f"{_percent(quality / dense)} of {title_of(metric)} stays{index} ({interval}; {numbers})"


def _promise_text(report: Report, subject: _Subject) -> str:
    """Return the promise and what was kept: "promised 97 % of the predictions; kept 97.6 % of 436 other rows"."""
    promise, data = subject.promise, report.details.data
    if promise is None:
        return ""
    metric = promise.budget.metric
    promised = f"promised {asked_words(promise)}{'' if metric else _within(report)}"
    result = _result(report, subject.kept, promise.budget)
    if not result:
        return promised
    # What is promised are rows, or else many things per row, such as tokens or entities.
    preposition = "on" if metric or report.details.stability_of == "next token" else "of"
    rows = f"{data.evaluation_samples:,} {'other ' if data.apart else ''}rows"
    interval = f" ({subject.interval})" if subject.interval and metric is None else ""
    return f"{promised}; {result} {preposition} {rows}{interval}"


def _result(report: Report, kept: float | None, budget: Budget) -> str:
    """Return what the evaluated rows keep, or lose, of what was promised; empty if the evaluation does not know."""
    share, metric = budget.share, str(budget.metric)
    if share is None:  # then a largest loss of the metric was promised
        values = report.metrics.get(metric)
        return f"lost {_number(quality_loss(metric, values.dense, values.slim))}" if values else ""
    if kept is None:
        return ""
    if kept >= 1:
        return "kept all" if kept == 1 else f"kept {100 * kept:.1f} %"
    # A share is never rounded up to all, and a broken promise never up to a kept one.
    tenths = math.floor(1000 * kept) if kept < share else round(1000 * kept)
    return f"kept {'only ' if kept < share else ''}{min(tenths, 999) / 10:.1f} %"


def _budget_result(report: Report) -> str:
    """Return "budget kept", or why not; empty for a kept promise, a deployed form, or if the report has no budget."""
    outcome, deployment = report.details.outcome, report.details.deployment
    if outcome is None or (deployment is not None and deployment.form is not None):
        return ""
    if outcome.noisy:
        return "budget too noisy to confirm"
    share, found = outcome.budget.heads, outcome.found
    # A share of the heads is missed if it is off by a whole head.
    if not outcome.met or (share and found and abs(found.value - share) * report.heads.total >= 1):
        return "budget missed"
    return "" if outcome.budget.keep else "budget kept"


def budget_text(report: Report) -> str:
    """Return what the budget allowed, and what was predicted and measured; empty for a share of the heads."""
    outcome, data = report.details.outcome, report.details.data
    if outcome is None or outcome.budget.heads is not None:
        return ""
    budget, timed, judged = outcome.budget, outcome.budget.timed, len(outcome.judged)
    where, predicted, tried = " of the dense model", "", ""
    if budget.searched:
        rows = f"{outcome.samples:,} held-out rows"
        where = f", promised on {held_out_rows(report, otherwise=rows)}"
        tried = f"; {judged} {'cut was' if judged == 1 else 'cuts were'} tried" if judged else ""
    elif budget.latency is not None:
        bits = f" in {budget.latency.dtype}" if budget.latency.dtype else ""
        where += f" on {budget.latency.runtime}{bits} at {budget.latency.batch} x {budget.latency.sequence}"
    if outcome.predicted is not None:
        time = f" of the time on {runtime_name(str(timed.runtime))}" if budget.searched and timed else ""
        predicted = f"; predicted {outcome.predicted:.3f}{time}"
    measured = "Too noisy to measure" if outcome.noisy else f"Found {found_words(outcome)}"
    text = f"Budget: {asked_words(outcome)}{where}. {measured}{tried}{predicted}."
    if budget.searched and data.held_out_further and not data.alike:
        text += f" If the model was trained on {data.held_out_split}, the promise is too optimistic for new rows."
    return text


def forms_text(report: Report) -> str:
    """Return what the times of the forms of both models are relative to; empty without forms."""
    if not (forms := report.details.forms):
        return ""
    return f"Time is relative to {forms[0].model} {forms[0].bits}; its own row times a second copy, the control."


def tried_text(report: Report) -> str:
    """Return how a candidate was chosen, which may not have the best numbers; empty if there was no choice."""
    chosen = next((row for row in report.details.tried if row.chosen), None)
    if chosen is None:
        return ""
    if len({row.criterion for row in report.details.tried}) == 1:  # then alpha was chosen
        metric, word = title_of(report.quality.metric), report.details.stability_of
        within = "" if chosen.quality is None else f", of those within one standard error of the best {metric}"
        return f"The alpha that keeps most {word}s is taken{within}."
    metric = "" if chosen.quality is None else f" and its {report.quality.metric} is not clearly worse"
    return (
        "Candidates are listed in order of trust. A later one is taken only if it agrees with the dense model more "
        f"often by two standard errors{metric}. No candidate after the chosen one does."
    )


def held_out_rows(report: Report, *, otherwise: str = "held-out rows") -> str:
    """Return which rows choices were judged on, such as "256 further rows of train"; `otherwise` if none is known."""
    data = report.details.data
    if not data.held_out_samples:
        return otherwise
    further = "further " if data.held_out_further else ""
    return f"{data.held_out_samples:,} {further}rows of {data.held_out_split}"


def method_text(report: Report) -> str:
    """Return which data the units were scored on, which data quality was measured on, and on what machine."""
    data, ranks = report.details.data, report.ranking is not None
    words = {"answer": "their answers", "next token": "their next tokens", "choice": "their right choices"}
    labels = f"with {words.get(report.details.stability_of, 'their labels')}"
    if ranks:
        labels = "without labels"
    elif data.labels != "data":
        labels = "with the model's own predictions as labels"
    used, available = data.evaluation_samples, data.evaluation_of
    rows = f"all {available:,} samples" if used >= available else f"{used:,} samples, drawn from the {available:,}"
    scored = f"{kinds_text(report).capitalize()} were scored on {data.calibration_samples} samples {labels}; "
    if report.details.outcome is None and report.vocabulary is not None:  # only tokens went
        scored = ""
    notes = [f"{scored}{'quality' if scored else 'Quality'} is over {rows} of {data.evaluation_split}."]
    if not data.evaluation_labelled:
        own = "rankings" if ranks else "predictions"
        notes.append(f"These have no labels: metrics compare with the dense model's own {own}.")
    if data.compensation_samples:
        scale = report.details.logit_scale
        scaled = "" if scale == 1 else f", and the logits multiplied by {scale:.3f}"
        notes.append(f"The output projections were refitted on {data.compensation_samples:,} samples{scaled}.")
    return " ".join(filter(None, [*notes, environment_text(report.environment)]))


def environment_text(environment: Mapping[str, Any]) -> str:
    """Return the hardware and the libraries that decide about time, in a sentence; empty if none is known."""
    libraries = ("torch", "cuda", "transformers", "onnxruntime", "openvino", "onnxruntime_gpu", "node_llama_cpp")
    keys = [key for key in ("cpu", "gpu", *libraries) if environment.get(key)]
    known = ", ".join(f"{key.replace('_', '-')} {environment[key]}" for key in keys)
    return f"Measured with {known}." if known else ""


def latency_text(rows: Sequence[TimedRow], names: tuple[str, str] = ("dense", "slim")) -> str:
    """Return the range of the controls, and how to read the columns of the rows that are shown."""
    controls, first = [row.control_ratio for row in rows], names[0]
    noisy = (
        "A row is noisy if the control's interval misses 1 by more than 2 % or is wider than 10 %. Its ratio means "
        "nothing; measure again on an idle machine."
    )
    decode = "Decode: the step that computes a row's last token, with the tokens before it in the cache."
    realised = "Realised: the share of the FLOPs saving that became a time saving."
    notes = [
        (True, f"The control, {first} against itself, gave {min(controls):.3f} to {max(controls):.3f}."),
        (any(row.noisy for row in rows), noisy),
        (any(row.phase == "decode" for row in rows), decode),
        (any(row.realised is not None and not row.noisy for row in rows), realised),
    ]
    return " ".join(text for applies, text in notes if applies)
