"""The picture of agreement against time: who is where, which forms make the frontier, and what is too noisy."""

import itertools
from typing import Any

import pytest
from support.reports import make_report

from hies_export.report.details import deciding_step
from hies_export.report.frontier import frontier_figure
from hies_export.report.html import render_html
from hies_export.report.lead import lead_text
from hies_export.report.report import Report
from hies_export.report.terminal import print_report

# Model, bits, time and agreement of each form; the third is dominated.
FORMS = (
    ("dense", "float32", 1.01, 1.0),
    ("dense", "int8", 0.5, 0.999),
    ("slim", "float32", 0.7, 0.99),
    ("slim", "int8", 0.38, 0.985),
)


def time(ratio: float, *, noisy: bool = False) -> dict[str, Any]:
    ends = {"ratio_low": ratio - 0.01, "ratio_high": ratio + 0.01}
    return {"batch": 8, "sequence": 128, "phase": "forward", "ms": 10 * ratio, "ratio": ratio, "noisy": noisy, **ends}


def report_of(*, noisy: tuple[bool, ...] = (False,), deployed: int | None = 3) -> Report:
    forms = [
        {
            **{"model": model, "runtime": "onnxruntime-cpu", "bits": bits, "bytes": 10**6, "quality": 0.9},
            **{"stability": same, "stability_low": same - 0.01, "kept": same, "at_least": same - 0.005},
            "times": [time(ratio, noisy=one) for one in noisy],
        }
        for model, bits, ratio, same in FORMS
    ]
    step = noisy.index(False) if False in noisy else 0
    found = {"promise": 0.98, "form": deployed, "step": step, "ways": [], "seconds": 60.0}
    return make_report(forms=forms, deployment=found)


def test_points_are_where_time_and_agreement_say() -> None:
    figure = frontier_figure(report_of())
    assert figure is not None
    x = [point.x for point in figure.points]
    # The first form is its own measure: its time is 1, whatever the control says.
    assert sorted(range(4), key=lambda number: x[number]) == [3, 1, 2, 0]
    assert (x[0] - x[1]) / (x[1] - x[3]) == pytest.approx((1 - 0.5) / (0.5 - 0.38))
    y = [point.y for point in figure.points]
    assert y[0] < y[1] < y[2] < y[3]
    assert all(point.y_low > point.y for point in figure.points)
    assert [point.chosen for point in figure.points] == [False, False, False, True]
    assert figure.line == [(x[3], y[3]), (x[1], y[1]), (x[0], y[0])]
    assert y[3] < figure.promise < figure.points[3].y_low
    for one, other in itertools.combinations(figure.points, 2):
        apart = abs(one.label[0] - other.label[0]), abs(one.label[1] - other.label[1])
        assert apart[0] > 13 or apart[1] > 13


def test_a_noisy_shape_decides_nothing() -> None:
    report = report_of(noisy=(True, False))
    assert deciding_step(report.details.forms) == 1
    assert frontier_figure(report) is not None
    noisy = report_of(noisy=(True, True))
    assert frontier_figure(noisy) is None
    assert "What to deploy" not in render_html(noisy)
    assert frontier_figure(make_report()) is None


def test_the_page_and_the_lead_say_what_to_deploy(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    report = report_of()
    lead = "Deploy the slim model in int8 on ONNX Runtime: 0.38 of the time of dense float32 at 8 x 128; "
    assert lead_text(report).startswith(lead)
    page = render_html(report)
    assert "<h2>What to deploy</h2>" in page
    assert page.count('<svg class="plot frontier"') == 1
    for text in ("1&nbsp;dense float32", "4&nbsp;slim int8, chosen", "the dashed line is the promise"):
        assert text in page
    print_report(report, Console(width=200))
    out = capsys.readouterr().out
    assert "held out ≥" in out
    assert "98.00%" in out
    none = report_of(deployed=None)
    assert lead_text(none).startswith("0.81 of the time on ONNX Runtime")
