"""Every sentence about a report, once for all its renderings; `lead_text` is the one that they begin with."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..evaluate.metrics import METRICS, counted_by, quality_loss, title_of
from ..evaluate.promise import asked_words, found_words
from ..forms.judged import Judged
from ..forms.measured import LatencyRow, budget_rows
from ..forms.time import Timed
from ..kinds import KINDS
from ..recipe.budget import Budget, KeepBudget, Outcome
from ..tasks import TASKS
from ..vocabulary.trim import VocabularyFacts
from .report import Report, UnitCounts

# The word for a prediction of an embedding model or a reranker.
FIRST_HIT = "first hit"


# Names and numbers


def _number(value: float) -> str:
    """Return a number with three significant digits; with three decimals below 1, and none from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"


def _percent(share: float) -> str:
    """Return a share as "97.6 %"; one below 1 is never rounded up to "100.0 %"."""
    return f"{100 * share if share >= 1 else min(100 * share, 99.9):.1f} %"


def model_name(report: Report) -> str:
    """Return the dense model's Hub id, or the name of its folder."""
    path = Path(report.model)
    return path.name if path.is_absolute() or os.path.exists(path) else report.model


def removed_text(counts: Mapping[str, UnitCounts | VocabularyFacts | None]) -> str:
    """Return how much was removed, such as "20 of 72 heads and 4,300 of 9,216 neurons removed".

    A kind of which the model has none, or none that could be removed, is left out.
    """
    shown = [f"{of.removed:,} of {of.total:,} {name}" for name, of in counts.items() if of and of.total]
    *first, last = shown or ["nothing"]
    return f"{', '.join(first)}{' and ' if first else ''}{last} removed"


def named_units(counts: Mapping[str, UnitCounts | None]) -> list[tuple[str, UnitCounts]]:
    """Return the full name and the counts of every kind of unit that could be removed."""
    named = [(f"{kind.module.split()[0]} {kind.units}", counts.get(kind.units)) for kind in KINDS.values()]
    return [(name, of) for name, of in named if of and of.total]


def kinds_text(report: Report, *, joined: str = "and") -> str:
    """Return the units that the run could remove: "heads", "neurons", or both, joined by a word."""
    return f" {joined} ".join(name.split()[-1] for name, _ in named_units(report.units))


def vocabulary_words(facts: VocabularyFacts) -> str:
    """Return a note on the texts that the vocabulary was trimmed to, and on others."""
    often = "" if facts.min_count == 1 else f" at least {facts.min_count} times"
    judged, more = facts.judged, facts.judged.tokens_ratio - 1
    return (
        f"The vocabulary has the {facts.kept:,} of {facts.total:,} tokens that {facts.texts:,} texts of {facts.source} "
        f"need{often}. Of the {judged.texts:,} evaluated rows, {_percent(judged.share_otherwise)} are read otherwise, "
        f"which makes {100 * more:.1f} % more tokens in all. A text in another language, or of another kind, is cut "
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
    return name if known is None else f"{known} ({kind})" if kind else known


def form_runtime(form: Judged) -> str:
    """Return the name of a form's runtime, without its bits."""
    return runtime_name(form.runtime.removesuffix("-int8"))


def form_name(form: Judged, forms: Sequence[Judged]) -> str:
    """Return a form's model and bits, such as "slim int8", and its runtime if the forms have several."""
    several = len(set(map(form_runtime, forms))) > 1
    return f"{form.model} {form.bits}" + (f", {form_runtime(form)}" if several else "")


def form_step(time: Timed | LatencyRow) -> str:
    """Return the timed shape, and the phase for a model that generates: "8 x 128", "1 x 128 decode", "8 rows"."""
    if time.phase == "rows":
        return f"{time.batch} {'row' if time.batch == 1 else 'rows'}"
    return f"{time.batch} x {time.sequence}" + ("" if time.phase == "forward" else f" {time.phase}")


def agreement(report: Report) -> str:
    """Return the name of the stability in tables: "same prediction", or "same within 0.1" for a regression."""
    word, tolerance = report.details.stability_of, report.details.stability_tolerance
    return f"same {word}" if tolerance is None else f"same within {tolerance:g}"


def keeps_metric(report: Report) -> bool:
    """Return whether what a model keeps is a share of the first metric, and not of the predictions."""
    metric = METRICS.get(report.quality.metric)
    shares = report.ranking is not None or (metric is not None and metric.terms is not None)
    return shares and report.quality.dense > 0


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


# The first sentence


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
    ranking: Mapping[str, Mapping[str, float]] | None


def lead_text(report: Report) -> str:
    """Return the result of the run in one sentence: what is kept, on which rows, then time and size.

    An example is "97.0 % of the predictions stay (95.1 to 98.2 %, 436 rows); Pearson 0.903 → 0.901; 0.82 of the time on
    ONNX Runtime at 8 x 128; 0.76 of the size; budget kept." A promise stands beside what was kept: "promised 97 % of
    the predictions; kept 97.6 % of 436 other rows (95.6 to 98.8 %)". A value that was not measured is left out.
    """
    subject = _subject(report)
    promise = _promise_text(report, subject)
    if report.ranking is not None:
        kept = [_ranking_text(report, subject), promise]
    elif subject.promise is not None and subject.promise.budget.metric is None:
        kept = [promise, _quality_text(report, subject)]
    else:
        share = "all" if subject.stability == 1 else f"{_percent(subject.stability)} of the"
        of = f"{share} {report.details.stability_of}s stay{_within(report)} ({_interval_and_rows(report, subject)})"
        kept = [of, _quality_text(report, subject), promise]
    size = f"{subject.size:.2f} of the size"
    parts = filter(None, [*kept, subject.time, size, _budget_result(report)])
    return f"{subject.name}{': ' if subject.name else ''}{'; '.join(parts)}."


def _subject(report: Report) -> _Subject:
    """Return the form to deploy; else the compound, if one was asked for; else the slim model."""
    details, forms, word = report.details, report.details.forms, report.details.stability_of
    found, joined, outcome = details.deployment, report.compound, details.outcome
    deployed = None if found is None else found.form
    if deployed is not None or joined is not None:
        number = len(forms) - 1 if deployed is None else deployed  # a compound is the last form
        form, times = forms[number], forms[0].times
        quiet = [step for step, at in enumerate(times) if not at.noisy]
        # A compound is for batches of several rows.
        wanted = [step for step in quiet if deployed is not None or times[step].batch > 1]
        metric = report.quality.metric if keeps_metric(report) else None
        index: Any = "dense" if metric and "dense_index" in (report.ranking or {}) else None
        if found is not None and deployed is not None:
            model = f"{form.model} model" if form.model in ("dense", "slim") else form.model
            name, share = f"Deploy the {model} in {form.bits} on {form_runtime(form)}", found.promise
        else:
            assert joined is not None
            name, share = f"{joined.name.title()} of both models", 1 - joined.disagreement
        keep = KeepBudget(predictions=share, metric=metric, index=index)
        return _Subject(
            name=name,
            stability=form.stability,
            interval="" if metric else _interval(form.stability_low, form.stability_high),
            quality=form.quality,
            promise=Outcome(Budget(keep=keep), word=word),
            kept=form_kept(report, form),
            time=_form_time(forms, number, next(iter(wanted or quiet), None)),
            size=_form_size(report, form),
            ranking=(found.ranking if found is not None else None) or report.ranking,
        )
    met = outcome if outcome is not None and outcome.budget.searched and outcome.met else None
    of_entities = keeps_metric(report) and report.ranking is None  # then the interval is not that of the stability
    return _Subject(
        name="",
        stability=report.stability,
        interval="" if of_entities else _interval(details.kept_low, details.kept_high),
        quality=report.quality.slim,
        promise=met,
        kept=None if met is None else _kept(report, met),
        time=_time(report),
        size=report.bytes.ratio,
        ranking=report.ranking,
    )


def _kept(report: Report, promise: Outcome) -> float | None:
    """Return the share of the predictions, or of the promised metric, that the slim model keeps; None if unknown."""
    metric, keep = promise.budget.metric, promise.budget.keep
    if metric is None:
        return report.stability
    found, slim_index = report.metrics.get(metric), (report.ranking or {}).get("slim_index", {})
    if found is None or found.dense <= 0:
        return None
    slim = slim_index.get(metric.removesuffix("@10")) if keep and keep.index == "slim" else found.slim
    return None if slim is None else slim / found.dense


def _form_time(forms: Sequence[Judged], number: int, step: int | None) -> str:
    """Return the time of the form of a number at a shape, relative to the first form's."""
    if step is None:
        return "time too noisy to tell"
    ratio = forms[number].times[step].ratio if number else 1.0  # that of the first form is its control's
    return f"{ratio:.2f} of the time of dense {forms[0].bits} at {form_step(forms[0].times[step])}"


def _form_size(report: Report, form: Judged) -> float:
    """Return the size of a form's file relative to the dense float32 one's; without a file, that of its checkpoint."""
    if form.bytes is not None:
        return form.bytes / (report.details.forms[0].bytes or report.bytes.dense)
    return report.bytes.ratio if form.model == "slim" else 1.0


def _time(report: Report) -> str:
    """Return the ratio of the time that was asked for; without one, or if all are noisy, that of the FLOPs.

    It is that of the budget if time was the budget; else that at the recipe's first shape, on ONNX Runtime if that was
    timed. Of several, it is the first that is not noisy, and never picked by its ratio.
    """
    rows = [row for row in report.latency if row.phase != "decode"]
    outcome = report.details.outcome
    timed = None if outcome is None else outcome.budget.latency
    if timed is not None:
        asked = budget_rows(timed, rows)
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
    of = METRICS[metric].of if metric in METRICS else ""
    index = " with your index as it is" if "dense_index" in (report.ranking or {}) and "ranking" in of else ""
    again = (subject.ranking or {}).get("slim_index", {}).get(metric.removesuffix("@10"))
    other = f", {_number(again)} re-embedded" if index and again is not None else ""
    if of == "own ranking":
        return f"{title_of(metric)} {_number(quality)}{index}{other}"
    numbers = f"{_number(dense)} → {_number(quality)}"
    if dense <= 0:
        return f"{title_of(metric)} {numbers}{index}"
    interval = _interval_and_rows(report, subject)
    return f"{_percent(quality / dense)} of {title_of(metric)} stays{index} ({interval}; {numbers}{other})"


def _promise_text(report: Report, subject: _Subject) -> str:
    """Return what was promised and what other rows keep: "promised 97 % of the predictions; kept ..."; or nothing."""
    if (promise := subject.promise) is None:
        return ""
    data, budget = report.details.data, promise.budget
    within = "" if budget.metric else _within(report)
    # What is promised are rows, or else many things per row, such as tokens or entities.
    of = "on" if budget.metric or report.details.stability_of == "next token" else "of"
    judged = f"{data.evaluation_samples:,} {'other ' if data.apart else ''}rows"
    text, result = f"promised {asked_words(promise)}{within}", _result(report, subject.kept, budget)
    interval = f" ({subject.interval})" if subject.interval and budget.metric is None else ""
    return f"{text}; {result} {of} {judged}{interval}" if result else text


def _result(report: Report, kept: float | None, budget: Budget) -> str:
    """Return what the evaluated rows keep, or lose, of what was promised; empty if the evaluation does not know."""
    if (share := budget.share) is None:
        found = report.metrics.get(str(budget.metric))
        return f"lost {_number(quality_loss(str(budget.metric), found.dense, found.slim))}" if found else ""
    if kept is None:
        return ""
    if kept >= 1:
        return "kept all" if kept == 1 else f"kept {100 * kept:.1f} %"
    # A share is never rounded up to all, and a broken promise never up to a kept one.
    tenths = math.floor(1000 * kept) if kept < share else round(1000 * kept)
    return f"kept {'only ' if kept < share else ''}{min(tenths, 999) / 10:.1f} %"


def _budget_result(report: Report) -> str:
    """Return whether the budget was kept; empty for a kept promise, a deployed form, or if the report has no budget."""
    outcome, deployed = report.details.outcome, report.details.deployment
    if outcome is None or (deployed is not None and deployed.form is not None):
        return ""
    if outcome.noisy:
        return "budget too noisy to confirm"
    share, found = outcome.budget.heads, outcome.found
    if not outcome.met or (share and found and abs(found.value - share) * report.heads.total >= 1):
        return "budget missed"
    return "" if outcome.budget.keep else "budget kept"


# Notes below the tables; each is empty where a report has nothing to say


def budget_text(report: Report) -> str:
    """Return what the budget allowed, and what was predicted and measured; empty for a share of the heads."""
    outcome, data = report.details.outcome, report.details.data
    if outcome is None or outcome.budget.heads is not None:
        return ""
    budget, timed, judged = outcome.budget, outcome.budget.timed, len(outcome.judged)
    where, predicted, more = " of the dense model", "", ""
    if budget.searched:
        rows = f"{outcome.samples:,} held-out rows"
        where = f", promised on {held_out_rows(report, otherwise=rows)}"
        more = f"; {judged} {'cut was' if judged == 1 else 'cuts were'} tried" if judged else ""
    elif budget.latency is not None:
        bits = f" in {budget.latency.dtype}" if budget.latency.dtype else ""
        where += f" on {budget.latency.runtime}{bits} at {budget.latency.batch} x {budget.latency.sequence}"
    if outcome.predicted is not None:
        time = f" of the time on {runtime_name(str(timed.runtime))}" if budget.searched and timed else ""
        predicted = f"; predicted {outcome.predicted:.3f}{time}"
    found = "Too noisy to measure" if outcome.noisy else f"Found {found_words(outcome)}"
    text = f"Budget: {asked_words(outcome)}{where}. {found}{more}{predicted}."
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
    """Return which rows choices were judged on: "256 further rows of train"."""
    data = report.details.data
    if not data.held_out_samples:
        return otherwise
    further = "further " if data.held_out_further else ""
    return f"{data.held_out_samples:,} {further}rows of {data.held_out_split}"


def method_text(report: Report) -> str:
    """Return which data the units were scored on, which data quality was measured on, and on what machine."""
    data, ranks = report.details.data, report.ranking is not None
    own = {"answer": "their answers", "next token": "their next tokens", "choice": "their right choices"}
    labels = f"with {own.get(report.details.stability_of, 'their labels')}"
    if data.labels != "data":
        labels = "with the model's own predictions as labels"
    used, there = data.evaluation_samples, data.evaluation_of
    rows = f"all {there:,} samples" if used >= there else f"{used:,} samples, drawn from the {there:,}"
    units, what = kinds_text(report).capitalize(), "rankings" if ranks else "predictions"
    scored = f"{units} were scored on {data.calibration_samples} samples {'without labels' if ranks else labels}; "
    if report.details.outcome is None and report.vocabulary is not None:  # only tokens went
        scored = ""
    notes = [f"{scored}{'quality' if scored else 'Quality'} is over {rows} of {data.evaluation_split}."]
    if not data.evaluation_labelled:
        notes.append(f"These have no labels: metrics compare with the dense model's own {what}.")
    if data.compensation_samples:
        scale = report.details.logit_scale
        scaled = "" if scale == 1 else f", and the logits multiplied by {scale:.3f}"
        notes.append(f"The output projections were refitted on {data.compensation_samples:,} samples{scaled}.")
    return " ".join(filter(None, [*notes, environment_text(report.environment)]))


def environment_text(environment: Mapping[str, Any]) -> str:
    """Return the hardware and the libraries that decide about time, in a sentence; empty if none is known."""
    names = dict.fromkeys(("cpu", "gpu", "torch", "cuda", "transformers", "onnxruntime", "openvino"), "")
    names |= {"onnxruntime_gpu": "onnxruntime-gpu", "node_llama_cpp": "node-llama-cpp"}
    known = ", ".join(f"{shown or name} {environment[name]}" for name, shown in names.items() if environment.get(name))
    return f"Measured with {known}." if known else ""


def latency_text(rows: Sequence[LatencyRow], names: tuple[str, str] = ("dense", "slim")) -> str:
    """Return the range of the controls, and how to read what the rows show."""
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
    return " ".join(text for told, text in notes if told)
