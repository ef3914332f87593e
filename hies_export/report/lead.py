"""The sentence that every rendering of a run leads with, for a person to repeat: time, agreement, quality, budget."""

from __future__ import annotations

import math
import statistics
from typing import Any

from ..evaluate.metrics import METRICS, counted_by, quality_loss, title_of
from ..forms.judge import deciding_step, relative_times
from ..forms.measured import LatencyRow
from ..recipe.budget import Budget, KeepBudget, Outcome
from .outcomes import asked_words, found_words
from .report import Report
from .tables import form_step
from .text import evaluated_share, keeps_metric, runtime_name, samples_word


def lead_text(report: Report) -> str:
    """Return the result of the run in one sentence.

    An example is "0.82 of the time on ONNX Runtime at 8 x 128; 97 % of the predictions stay; Pearson 0.903 → 0.901;
    budget kept." A promise stands beside what was kept: "promised 97 % of the predictions; kept 97.6 % of 436 other
    rows". A value that was not measured is left out.
    """
    promise, budget = _promise(report), _budget(report)
    parts = [_deployed(report) or _cascade(report) or _time(report)]
    if report.ranking is not None:
        parts += [_ranking(report), promise]
    elif _promises_predictions(report):
        parts += [promise, _quality(report)]
    else:
        parts += [_agreement(report), _quality(report), promise]
    return "; ".join(filter(None, [*parts, budget])) + "."


def _deployed(report: Report) -> str:
    """Return which form to deploy, and its time; empty if that was not asked, or none keeps the promise."""
    found = report.details.deployment
    if found is None or found.form is None:
        return ""
    forms = report.details.forms
    form = forms[found.form]
    model = "cascade" if form.model == "cascade" else f"{form.model} model"
    what = f"Deploy the {model} in {form.bits} on {runtime_name(form.runtime.removesuffix('-int8'))}"
    step = deciding_step(forms)
    if step is None:
        return f"{what}, time too noisy to tell"
    ratio, at = relative_times(forms, step)[found.form], form_step(form.times[step])
    return f"{what}: {ratio:.2f} of the time of dense {forms[0].bits} at {at}"


def _cascade(report: Report) -> str:
    """Return the time of a cascade in batches of several rows; empty if none was asked for."""
    if report.cascade is None:
        return ""
    forms = report.details.forms
    quiet = [step for step, at in enumerate(forms[0].times) if not at.noisy]
    if not quiet:
        return "Cascade of both models, time too noisy to tell"
    step = next((step for step in quiet if forms[0].times[step].batch > 1), quiet[0])
    ratio, at = relative_times(forms, step)[-1], form_step(forms[0].times[step])
    return f"Cascade of both models: {ratio:.2f} of the time of dense {forms[0].bits} at {at}"


def asked_row(report: Report) -> LatencyRow | None:
    """Return the row of time that was asked for; None if it is noisy or was not measured.

    It is the budget's row if time was the budget. Otherwise it is the row of the recipe's first shape on ONNX Runtime,
    for which the run exports the model, or on the first runtime if ONNX Runtime was not timed. It is never picked by
    its ratio.
    """
    rows = [row for row in report.latency if row.phase != "decode"]
    outcome = report.details.outcome
    timed = None if outcome is None else outcome.budget.latency
    if timed is not None:
        asked = (timed.runtime, timed.batch, timed.sequence)
        found = [row for row in rows if (row.runtime, row.batch, row.sequence) == asked]
    else:
        at_shape = [row for row in rows if (row.batch, row.sequence) == tuple(report.flops.shape)]
        found = [row for row in at_shape if row.runtime.startswith("onnxruntime")] or at_shape
    return found[0] if found and not found[0].noisy else None


def _time(report: Report) -> str:
    """Return the time ratio of the row that was asked for, else the median; without times, the ratio of FLOPs."""
    timed = [row for row in report.latency if row.phase != "decode"]
    if not timed:
        return f"{report.flops.ratio:.2f} of the FLOPs"
    asked = asked_row(report)
    quiet = [asked] if asked else [row for row in timed if not row.noisy]
    if not quiet:
        return f"{report.flops.ratio:.2f} of the FLOPs, time too noisy to tell"
    if len(quiet) > 1:
        middle = statistics.median(row.ratio for row in quiet)
        return f"{middle:.2f} of the time (median over {len(quiet)} runtimes and shapes)"
    (row,) = quiet
    phase = "" if row.phase == "forward" else f" ({row.phase})"
    dtype = "" if row.dtype == "float32" else f" in {row.dtype}"
    return f"{row.ratio:.2f} of the time on {runtime_name(row.runtime)} at {row.batch} x {row.sequence}{phase}{dtype}"


def _judged(report: Report) -> tuple[float, float]:
    """Return the agreement and the first metric of the model that the sentence names."""
    found, forms = report.details.deployment, report.details.forms
    if found is not None and found.form is not None:
        return forms[found.form].stability, forms[found.form].quality
    if report.cascade is not None:
        return report.cascade.stability, forms[-1].quality
    return report.stability, report.quality.slim


def _agreement(report: Report) -> str:
    """Return how many predictions stay, and the tolerance for a regression."""
    what, tolerance = report.details.stability_of, report.details.stability_tolerance
    within = "" if tolerance is None else f" within {tolerance:g}"
    stability, _ = _judged(report)
    if stability == 1:
        return f"all {what}s stay{within}"
    # Not all, so never rounded to all.
    digits = 0 if stability < 0.99 else 1
    share = min(100 * stability, 99.9)
    return f"{share:.{digits}f} % of the {what}s stay{within}"


def _ranking(report: Report) -> str:
    """Return the first metric of rankings, the share that stays, and the index that queries search, on both indices."""
    metric, dense, (_, quality) = report.quality.metric, report.quality.dense, _judged(report)
    name, numbers = title_of(metric), f"{_number(dense)} → {_number(quality)}"
    assert report.ranking is not None
    of = METRICS[metric].of if metric in METRICS else ""
    index = " with your index as it is" if "dense_index" in report.ranking and "ranking" in of else ""
    again = _embedded_again(report)
    if of == "own ranking":
        return f"{name} {_number(quality)}{index}" + (f", {_number(again)} re-embedded" if again is not None else "")
    if dense <= 0:
        return f"{name} {numbers}{index}"
    # Not all, so never rounded to all.
    share = 100 * quality / dense if quality >= dense else min(100 * quality / dense, 99.9)
    other = "" if again is None else f", {_number(again)} re-embedded"
    return f"{share:.1f} % of {name} stays{index} ({numbers}{other})"


def _embedded_again(report: Report) -> float | None:
    """Return the first metric with everything re-embedded by the model that the sentence names; None if not known."""
    found, assumed = report.details.deployment, report.ranking
    ranking = assumed if found is None or found.ranking is None else found.ranking
    key = {"ndcg@10": "ndcg", "own_ndcg@10": "own_ndcg"}.get(report.quality.metric, "")
    return (ranking or {}).get("slim_index", {}).get(key)


def _quality(report: Report) -> str:
    """Return the first metric of the dense model and of the one that the sentence names; empty without labels."""
    metric, (_, quality) = report.quality.metric, _judged(report)
    if (counted := counted_by(metric)) is not None:
        # Not all, so never rounded to all.
        return f"{min(100 * quality, 99.9):.1f} % of the {counted}" if quality < 1 else f"all {counted}"
    if not report.details.data.evaluation_labelled:
        return ""
    return f"{title_of(metric)} {_number(report.quality.dense)} → {_number(quality)}"


def _number(value: float) -> str:
    """Return a metric with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"


def _promised(report: Report) -> Outcome | None:
    """Return the promise about the model that the sentence names; None if there is none."""
    found, outcome, word = report.details.deployment, report.details.outcome, report.details.stability_of
    if found is not None and found.form is not None:
        metric = report.quality.metric if keeps_metric(report) and report.quality.dense > 0 else None
        index: Any = "dense" if metric and "dense_index" in (report.ranking or {}) else None
        return Outcome(Budget(keep=KeepBudget(predictions=found.promise, metric=metric, index=index)), word=word)
    if report.cascade is not None:
        keep = KeepBudget(predictions=1 - report.cascade.disagreement)
        return Outcome(Budget(keep=keep), samples=report.cascade.rows, word=word)
    return outcome if outcome is not None and outcome.budget.keep is not None and outcome.met else None


def _promises_predictions(report: Report) -> bool:
    promised = _promised(report)
    return promised is not None and promised.budget.metric is None


def _promise(report: Report) -> str:
    """Return what was promised and what other rows keep: "promised 97 % of the predictions; kept 97.6 % of ..."."""
    promised = _promised(report)
    if promised is None:
        return ""
    tolerance = report.details.stability_tolerance
    within = "" if promised.budget.metric or tolerance is None else f" within {tolerance:g}"
    loss = "" if promised.budget.by is None else "a loss of "
    on, others = _promised_on(report, promised)
    text = f"promised {loss}{asked_words(promised)}{within}{on}"
    result = _result(report, promised)
    return f"{text}; {result} {others}" if result else text


def _promised_on(report: Report, promised: Outcome) -> tuple[str, str]:
    """Return which rows a promise was made on, if they are not like those that judge it, and which judge it."""
    data, word = report.details.data, samples_word(report)
    # A row has many tokens, and many entities.
    of = "on" if promised.budget.metric or report.details.stability_of == "next token" else "of"
    if not data.alike:
        held_out = f" on {promised.samples or data.held_out_samples:,} {word} of {data.held_out_split}"
        return held_out, f"{of} {data.evaluation_samples:,} {word} of {data.evaluation_split}"
    if not data.apart:
        return "", f"{of} {data.evaluation_samples:,} {word}, some of which it was promised on"
    return "", f"{of} {data.evaluation_samples:,} other {word}"


def _result(report: Report, promised: Outcome) -> str:
    """Return what the evaluated rows keep, or lose, of what was promised; empty if the evaluation does not know."""
    metric, share = promised.budget.metric, promised.budget.share
    if share is None:
        found = report.metrics.get(str(metric))
        return "" if found is None else f"lost {_number(quality_loss(str(metric), found.dense, found.slim))}"
    keep = promised.budget.keep
    kept = _kept(report, metric, None if keep is None else keep.index)
    if kept is None:
        return ""
    if kept >= 1:
        return "kept all" if kept == 1 else f"kept {100 * kept:.1f} %"
    # Not all, so never rounded to all, and never up to the promise.
    tenths = math.floor(1000 * kept) if kept < share else round(1000 * kept)
    return f"kept {'only ' if kept < share else ''}{min(tenths, 999) / 10:.1f} %"


def _kept(report: Report, metric: str | None, index: str | None) -> float | None:
    """Return the share of predictions or of a metric that stays on the evaluated rows, if the evaluation knows it."""
    (stability, quality), deployed = _judged(report), report.details.deployment
    if metric is None:
        return stability
    if deployed is not None and deployed.form is not None:
        return quality / report.quality.dense
    return evaluated_share(report, metric, index)


def _budget(report: Report) -> str:
    """Return whether a budget that promises nothing was kept; empty if the report does not know."""
    outcome, heads, deployed = report.details.outcome, report.heads, report.details.deployment
    if deployed is not None and deployed.form is not None:
        return ""
    if outcome is None:
        return ""
    budget, found = outcome.budget, outcome.found
    assert found is not None
    if budget.keep is not None:
        return "" if outcome.met else f"{asked_words(outcome)} promised, and held-out rows have {found_words(outcome)}"
    if budget.heads is not None:
        if abs(heads.removed - budget.heads * heads.total) < 1:
            return "budget kept"
        removed = 100 * heads.removed / heads.total
        return f"{removed:.3g}% of the heads removed for a budget of {100 * budget.heads:.3g}%"
    if outcome.noisy:
        return "budget too noisy to confirm"
    if outcome.met:
        return "budget kept"
    if budget.max_drop is not None:
        return f"budget missed by {found.value - budget.max_drop.by:.3g}"
    asked = asked_row(report)
    if budget.latency is not None and asked is not None and asked.ratio_low <= budget.latency.ratio:
        return f"budget of {budget.ratio:g} within the interval of the measurement"
    return f"budget missed, {found.value:.3f} where {budget.ratio:g} was allowed"
