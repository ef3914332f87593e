"""report.json: written, read, and read by its keys as by its fields."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.reports import DATA, make_report, terminal

from hies_export.errors import RequestError
from hies_export.report.card import render_card
from hies_export.report.lead import lead_text
from hies_export.report.report import FirstMetric, Report
from hies_export.report.text import method_text


def test_a_report_is_what_its_file_says(tmp_path: Path) -> None:
    report = make_report()
    (tmp_path / "report.json").write_text(report.to_json())
    assert Report.from_file(tmp_path) == Report.from_file(tmp_path / "report.json") == report
    values = json.loads(report.to_json())
    assert report.summary() == {name: value for name, value in values.items() if name != "details"} | {
        "flops": {**values["flops"], "shape": (8, 128)}
    }


def test_fields_answer_to_the_keys_of_the_file() -> None:
    report = make_report()
    assert report.parameters == {"dense": 1000, "slim": 800}
    assert report.quality["slim"] == report.quality.slim == 0.89
    assert {**report.flops} == {"dense": 10**9, "slim": 8 * 10**8, "shape": (8, 128)}
    assert [row["runtime"] for row in report.latency] == [row.runtime for row in report.latency]
    with pytest.raises(KeyError, match="dens"):
        report.quality["dens"]


@pytest.mark.parametrize("change", [{"heads": {"total": 12}}, {"parameters": {"dense": "many", "slim": 1}}])
def test_a_file_that_is_no_report_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(json.loads(make_report().to_json()) | change))
    with pytest.raises(RequestError, match=f"a report must be a report.json .*{next(iter(change))}"):
        Report.from_file(tmp_path)


@pytest.mark.parametrize(
    ("quality", "slim", "metric", "warned"),
    [
        (0.743, 0.27, "matthews_correlation", True),
        (0.95, 0.9, "accuracy", False),
        (0.5, 0.9, "accuracy", False),  # worse where it was chosen
        (12.0, 20.0, "perplexity", True),
        (20.0, 12.0, "perplexity", False),
        (None, 0.2, "accuracy", False),
    ],
)
def test_rows_that_the_model_knows_are_suspected(quality: float | None, slim: float, metric: str, warned: bool) -> None:
    curve = [{"alpha": a, "quality": quality, "standard_error": 0.1, "stability": 0.5} for a in (0.0, 0.5)]
    data = DATA | {"held_out_samples": 256, "held_out_split": "train[:90%]"}
    report = make_report(data=data, alpha_curve=curve, uncompensated=None)
    found = method_text(replace(report, quality=FirstMetric(metric=metric, dense=0.3, slim=slim)))
    said = "further rows of train[:90%], and has"
    assert (said in found) is warned


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"evaluation_of": 1500, "evaluation_rows": "drawn"}, "over 600 samples, drawn from the 1,500 of validation."),
        ({"evaluation_of": 1500, "evaluation_rows": "first"}, "over the first 600 of the 1,500 samples of validation."),
        ({"evaluation_of": 600, "evaluation_rows": "drawn"}, "over all 600 samples of validation."),
    ],
)
def test_a_report_says_which_rows_quality_is_of(data: dict[str, Any], said: str) -> None:
    assert f"quality is {said}" in method_text(make_report(data=DATA | {"evaluation_samples": 600} | data))


def test_rows_without_labels_have_no_accuracy() -> None:
    told, untold = (make_report(data=DATA | {"evaluation_labelled": known}, alpha_curve=[]) for known in (True, False))
    for report, there in ((told, True), (untold, False)):
        shown = [lead_text(report), terminal(report), render_card(report, origin={})]
        assert ["accuracy" in text for text in shown] == [there] * 3
    assert "These have no labels: metrics compare with the dense model's own predictions." in method_text(untold)
    assert "no labels" not in method_text(told)
