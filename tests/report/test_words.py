"""The sentences: what leads, what was promised and kept, which rows, and why something was chosen."""

import copy
import dataclasses
import html
import re
from typing import Any

import pytest
from support.reports import CASCADE, DATA, SERVED, TRIED, alphas, latency_row, make_report, outcome, terminal

from hies_export.report.card import render_card
from hies_export.report.html import render_html, render_markdown
from hies_export.report.report import FirstMetric, Report
from hies_export.report.tables import forms_table, report_parts
from hies_export.report.words import lead_text, method_text, tried_text
from hies_export.units.counts import si

TIMED = {"ratio": 0.85, "runtime": "torch", "batch": 1, "sequence": 128}
LATENCY = outcome({"latency": TIMED}, 0.83, predicted=0.84, noisy=False)
KEEP = outcome({"keep": {"predictions": 0.97}}, 0.99, 0.975, samples=436)
# Held-out rows are of the evaluated split.
DIVIDED: dict[str, Any] = DATA | {"held_out_samples": 436, "held_out_split": "validation", "held_out_further": False}


TRIED_ROWS = [
    TRIED | {"criterion": name, "quality": 0.9, "stability": 0.9, "chosen": name == "his"} for name in ("hies", "his")
]
APART = DATA | {"held_out_split": "train[:60%]", "evaluation_split": "train[60%:]"}


def with_rows(*rows: dict[str, Any], **details: Any) -> Report:
    return dataclasses.replace(make_report(**details), latency=rows)


def test_every_rendering_begins_with_the_sentence_and_has_all_notes() -> None:
    report = dataclasses.replace(make_report(**SERVED | {"tried": TRIED_ROWS}), cascade=CASCADE)
    lead, parts = lead_text(report), report_parts(report)
    assert len(parts) == 6
    markdown, page = render_markdown(report), html.unescape(render_html(report))
    assert markdown.split("\n\n")[1] == lead
    assert page.split("</h1>")[1].startswith(f'\n<p class="lead">{lead}</p>')
    assert f"## What it costs and saves\n\n{lead}\n" in render_card(report)
    assert terminal(report).startswith(f"\n{lead}\n")
    printed = " ".join(terminal(report).split())
    for name, part in parts.items():
        for note in filter(None, part.notes):
            assert note in page, name
            assert note in re.sub(r"\\(.)", r"\1", markdown), name
            assert note in printed, name
            assert name == "chosen" or note in re.sub(r"\\(.)", r"\1", render_card(report)), name


FIRST, SECOND = {"batch": 8, "sequence": 128}, {"batch": 32, "sequence": 128}
TORCH, ORT = latency_row("torch", 0.9, **FIRST), latency_row("onnxruntime-cpu", 0.88, **FIRST)
BEST = latency_row("onnxruntime-cpu", 0.7, **SECOND)
NOISY = latency_row("onnxruntime-cpu", 0.5, noisy=True, **FIRST)
DECODE = latency_row("onnxruntime-cuda", 0.6, phase="decode", **FIRST)
PREFILL = latency_row("onnxruntime-cuda", 0.65, phase="prefill", dtype="float16", **FIRST)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([TORCH, BEST, ORT], "0.88 of the time on ONNX Runtime at 8 x 128;"),
        ([BEST, TORCH], "0.90 of the time on torch at 8 x 128;"),
        ([TORCH, BEST, NOISY], "0.90 of the time on torch at 8 x 128;"),
        ([BEST, NOISY], "0.80 of the FLOPs, time too noisy to tell;"),
        ([DECODE, PREFILL], "0.65 of the time on ONNX Runtime (cuda) at 8 x 128 prefill in float16;"),
        ([DECODE, NOISY], "0.80 of the FLOPs, time too noisy to tell;"),
        ([DECODE], "0.80 of the FLOPs; 0.80 of the size"),  # nothing of noise
    ],
)
def test_the_time_is_the_one_that_was_asked_for_and_not_the_best(rows: list[dict[str, Any]], said: str) -> None:
    assert f"; {said}" in lead_text(with_rows(*rows))


def test_a_budget_of_time_names_its_own_row_and_bits() -> None:
    for dtype in ("float32", "bfloat16"):
        others = [latency_row("onnxruntime-cpu", 0.7), latency_row("torch", 0.9, batch=1, dtype="float16")]
        asked = latency_row("torch", 0.83, batch=1, dtype=dtype)
        report = with_rows(*others, asked, outcome=outcome({"latency": TIMED | {"dtype": dtype}}, 0.83, noisy=False))
        assert "; 0.83 of the time on torch at 1 x 128" in lead_text(report)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (outcome({"heads": 0.25}, 0.25), "budget kept"),
        # A difference of a head or more is never rounded away.
        (outcome({"heads": 0.336}, 0.25), "budget missed"),
        (outcome({"flops": 0.8}, 0.801, predicted=0.8), "budget missed"),
        (LATENCY, "budget kept"),
        (outcome({"latency": TIMED}, 0.86), "budget missed"),
        (LATENCY | {"noisy": True}, "budget too noisy to confirm"),
    ],
)
def test_a_budget_is_kept_or_missed(found: dict[str, Any], said: str) -> None:
    report = with_rows(latency_row("torch", 0.86, ratio_low=0.845, batch=1), outcome=found)
    assert lead_text(report).endswith(f"{said}.")


@pytest.mark.parametrize(
    ("data", "kept", "said"),
    [
        (DIVIDED, 0.97, "; kept 97.0 % of 64 other rows"),
        # Neither a missed promise nor a changed prediction is rounded away.
        (DIVIDED, 0.96999, "; kept only 96.9 % of 64 other rows"),
        (DIVIDED, 0.99999, "; kept 99.9 % of 64 other rows"),
        (DIVIDED, 1.0, "; kept all of 64 other rows"),
        (DATA | {"held_out_samples": 436}, 0.957, "; kept only 95.7 % of 64 other rows"),
        (APART, 0.976, "; kept 97.6 % of 64 other rows"),
        (APART | {"held_out_split": "train"}, 0.976, "; kept 97.6 % of 64 rows"),
    ],
)
def test_what_was_promised_stands_beside_what_was_kept(data: dict[str, Any], kept: float, said: str) -> None:
    report = dataclasses.replace(make_report(outcome=KEEP, data=data), stability=kept)
    said = f"promised 97 % of the predictions{said}; accuracy 0.900 → 0.890; 0.81 of the time on ONNX Runtime"
    assert lead_text(report).startswith(said)


def test_a_promise_says_of_what_it_is() -> None:
    def lead(changed: dict[str, Any], **details: Any) -> str:
        return lead_text(make_report(outcome=KEEP | changed, data=DIVIDED, **details))

    within = "promised 97 % of the predictions within 0.25; kept 97.0 % of 64 other rows;"
    assert lead({}, stability_tolerance=0.25).startswith(within)
    tokens = "promised 97 % of the next tokens; kept 97.0 % on 64 other rows;"
    assert lead({"word": "next token"}, stability_of="next token").startswith(tokens)

    def losing(metric: str) -> str:
        return lead(outcome({"keep": {"metric": metric, "by": 0.02}}, 0.01, 0.02))

    asked = "; promised a loss of at most 0.02 of"
    assert f"{asked} accuracy; lost 0.010 on 64 other rows; 0.81 of" in losing("accuracy")
    # Where the evaluation does not compute the metric, or nothing was promised.
    assert f"{asked} Matthews correlation; 0.81 of" in losing("matthews_correlation")
    broken = lead({"found": {"value": 0.99, "bound": 0.96}})
    assert broken.startswith("97.0 % of the predictions stay (64 rows); accuracy")
    assert broken.endswith("; budget missed.")


@pytest.mark.parametrize(
    ("form", "model", "kept", "numbers"),
    [
        (0, "Deploy the dense model in float32 on ONNX Runtime", "kept all of", (99.0, "0.900", 1.00, 1.00)),
        (1, "Deploy the slim model in int8 on ONNX Runtime", "kept 99.2 % of", (98.5, "0.870", 0.45, 0.50)),
        (2, "Deploy the cascade in int8 on ONNX Runtime", "kept only 98.0 % of", (98.9, "0.850", 0.48, 1.25)),
        (None, "Cascade of both models", "kept only 98.0 % of", (98.9, "0.850", 0.48, 1.25)),
    ],
)
def test_one_sentence_speaks_of_one_model(form: int | None, model: str, kept: str, numbers: tuple[Any, ...]) -> None:
    served = copy.deepcopy(SERVED)
    for one, stability, quality in zip(served["forms"], (1.0, 0.992, 0.98), (0.9, 0.87, 0.85), strict=True):
        one |= {"stability": stability, "quality": quality}
    served["forms"][1]["bytes"], served["forms"][2]["bytes"] = 2000, 5000
    served["deployment"]["form"] = form
    report = dataclasses.replace(make_report(**served, data=DIVIDED), cascade=CASCADE)
    at_least, quality, time, size = numbers
    said = (
        f"{model}: promised 99 % of the predictions; {kept} 64 other rows (at least {at_least} %); accuracy 0.900 → "
        f"{quality}; {time:.2f} of the time of dense float32 at 8 rows; {size:.2f} of the size."
    )
    assert lead_text(report) == said
    # Whether a cut has its size does not matter to what is deployed, nor whether there is a cascade.
    if form is not None:
        cut = served | {"outcome": outcome({"flops": 0.75}, 0.8), "data": DIVIDED}
        assert lead_text(make_report(**cut)) == said


@pytest.mark.parametrize(("share", "said"), [(0.99999, "99.9 % of the entities"), (1.0, "all entities")])
def test_entities_that_stay_are_told_beside_the_sentences(share: float, said: str) -> None:
    keep = outcome({"keep": {"predictions": 0.9, "metric": "own_entity_f1"}}, 0.95, 0.91, samples=8)
    metrics = {"own_entity_f1": {"dense": 1.0, "slim": share}}
    report = make_report(stability_of="sentence", outcome=keep, metrics=metrics, data=DIVIDED)
    text = lead_text(dataclasses.replace(report, quality=FirstMetric("own_entity_f1", 1.0, share)))
    assert text.startswith(f"97.0 % of the sentences stay (64 rows); {said}; promised 90 % of the entities; kept ")
    assert f"; kept {'all' if share == 1 else '99.9 %'} on 64 other rows; 0.81 of the time" in text


def test_a_noisy_time_is_not_told_of_what_is_deployed() -> None:
    served = copy.deepcopy(SERVED)
    for one in served["forms"]:
        one["times"] = [one["times"][0] | {"noisy": True}, one["times"][0] | {"batch": 32, "noisy": False}]
    report = make_report(**served)
    assert "; 0.45 of the time of dense float32 at 32 rows; " in lead_text(report)
    for one in served["forms"]:
        one["times"][1]["noisy"] = True
    assert lead_text(make_report(**served)).endswith("; time too noisy to tell; 1.00 of the size.")


def test_sizes_have_three_digits_and_the_prefix_that_fits() -> None:
    found = [si(number) for number in (0.5, 999, 999_499, 999_500, 9_996_000, 10**15 - 1)]
    assert found == ["0.50 ", "999 ", "999 k", "1.00 M", "10.0 M", "1000 T"]


@pytest.mark.parametrize(
    ("stability", "low", "high", "said"),
    [
        (1.0, 0.98766, 1.0, "all predictions stay (at least 98.7 %, 64 rows); "),
        # Never rounded to all, and an interval is rounded outwards.
        (0.9999, 0.98766, 1.0, "99.9 % of the predictions stay (at least 98.7 %, 64 rows); "),
        (0.9866, 0.95199, 0.98101, "98.7 % of the predictions stay (95.1 to 98.2 %, 64 rows); "),
    ],
)
def test_predictions_that_stay_are_told_with_their_interval(
    stability: float, low: float, high: float, said: str
) -> None:
    report = dataclasses.replace(make_report(kept_low=low, kept_high=high), stability=stability)
    assert lead_text(report).startswith(said)


@pytest.mark.parametrize(
    ("details", "quality", "said"),
    [
        (
            {"stability_of": "next token"},
            ("perplexity", 6.658, 12.34),
            "next tokens stay (64 rows); perplexity 6.66 → 12.3;",
        ),
        ({}, ("perplexity", 1234.6, 2345.6), "97.0 % of the predictions stay (64 rows); perplexity 1,235 → 2,346;"),
        ({"stability_tolerance": 0.25}, ("pearson", 0.9034, 0.9013), "within 0.25 (64 rows); Pearson 0.903 → 0.901;"),
    ],
)
def test_the_sentence_names_what_is_predicted(details: dict[str, Any], quality: Any, said: str) -> None:
    report = make_report(**details)
    assert said in lead_text(dataclasses.replace(report, quality=FirstMetric(*quality)))


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        (alphas(0.1, 0.5), "most predictions is taken, of those within one standard error of the best accuracy."),
        ([row | {"quality": None} for row in alphas(0.1, 0.5)], "The alpha that keeps most predictions is taken."),
        (TRIED_ROWS, "by two standard errors and its accuracy is not clearly worse."),
        ([], ""),
    ],
)
def test_a_choice_names_its_rule(rows: list[dict[str, Any]], rule: str) -> None:
    found = tried_text(make_report(tried=rows))
    assert rule in found
    assert bool(rule) is bool(found)


def test_rows_without_labels_have_no_accuracy() -> None:
    shown = [forms_table(make_report(data=DATA | {"evaluation_labelled": known}, **SERVED)) for known in (True, False)]
    labelled, unlabelled = ([*table.header] for table in shown if table is not None)
    assert [name for name in labelled if name not in unlabelled] == ["accuracy"]
    told, untold = (make_report(data=DATA | {"evaluation_labelled": known}, tried=[]) for known in (True, False))
    for report, there in ((told, True), (untold, False)):
        shown = [lead_text(report), terminal(report), render_card(report, origin={})]
        assert ["accuracy" in text for text in shown] == [there] * 3
    assert "These have no labels: metrics compare with the dense model's own predictions." in method_text(untold)
    assert "no labels" not in method_text(told)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"evaluation_of": 1500}, "over 600 samples, drawn from the 1,500 of validation."),
        ({"evaluation_of": 600}, "over all 600 samples of validation."),
    ],
)
def test_a_report_says_which_rows_quality_is_of(data: dict[str, Any], said: str) -> None:
    assert f"quality is {said}" in method_text(make_report(data=DATA | {"evaluation_samples": 600} | data))
