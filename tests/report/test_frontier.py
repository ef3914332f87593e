"""The picture of agreement against time: who is where, which forms make the frontier, and what is too noisy."""

import itertools
import json
import random
import re
import runpy
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import Browser
from support.reports import make_report, terminal

from hies_export.forms.time import deciding_step
from hies_export.report.drawing import MUTED, SECOND, for_page
from hies_export.report.figures import CAPTIONS, draw_report
from hies_export.report.frontier import FrontierFigure, Measured, draw_frontier, frontier_figure
from hies_export.report.html import render_html
from hies_export.report.report import Report
from hies_export.report.tables import forms_table
from hies_export.report.words import form_name, lead_text

ROOT = Path(__file__).resolve().parents[2]
# Model, bits, time and agreement of each form; the third is dominated.
FORMS = (
    ("dense", "float32", 1.01, 1.0),
    ("dense", "int8", 0.5, 0.999),
    ("slim", "float32", 0.7, 0.99),
    ("slim", "int8", 0.38, 0.985),
)


def time(ratio: float, *, noisy: bool = False) -> dict[str, Any]:
    ends = {"ratio_low": ratio - 0.01, "ratio_high": ratio + 0.01}
    control = {"control_ratio": 1.0, "control_low": 0.99, "control_high": 1.01}
    at = {"runtime": "onnxruntime-cpu", "batch": 8, "sequence": 128, "dense_ms": 10.0, "slim_ms": 10 * ratio}
    return {**at, "ratio": ratio, "noisy": noisy, **ends, **control}


def report_of(*, noisy: tuple[bool, ...] = (False,), deployed: int | None = 3) -> Report:
    forms = [
        {
            **{"model": model, "runtime": "onnxruntime-cpu", "bits": bits, "bytes": 10**6, "quality": 0.9},
            **{"stability": same, "stability_low": same - 0.01, "stability_high": min(same + 0.0005, 1)},
            **{"kept": same, "at_least": same - 0.005, "times": [time(ratio, noisy=one) for one in noisy]},
        }
        for model, bits, ratio, same in FORMS
    ]
    step = noisy.index(False) if False in noisy else 0
    found = {"promise": 0.98, "form": deployed, "step": step, "ways": [], "seconds": 60.0}
    return make_report(forms=forms, deployment=found)


def naive(points: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    """The (time, agreement) that no other one beats in both."""
    return {
        (time, same)
        for time, same in points
        if not any(t <= time and s >= same and (t, s) != (time, same) for t, s in points)
    }


def drawn(svg: str, kind: str) -> list[ET.Element]:
    """The elements of a drawing whose id begins so."""
    return [element for element in ET.fromstring(svg).iter() if (element.get("id") or "").partition("|")[0] == kind]


def words(element: ET.Element) -> list[str]:
    return [text.text or "" for text in element.iter() if text.tag.endswith("text")]


def places(element: ET.Element) -> list[tuple[float, float]]:
    """Where a mark is, or the ends of a line."""
    uses = [(float(e.get("x", "")), float(e.get("y", ""))) for e in element.iter() if e.tag.endswith("use")]
    paths = "".join(e.get("d", "") for e in element.iter() if e.tag.endswith("path"))
    return uses or [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", paths)]


def test_points_are_where_time_and_agreement_say() -> None:
    figure = frontier_figure(report_of())
    assert figure is not None
    svg = draw_frontier(figure)
    x, y = zip(*(places(mark)[0] for mark in drawn(svg, "mark")), strict=True)
    # The first form is its own measure: its time is 1, whatever the control says.
    per_time, per_share = (x[0] - x[1]) / 0.5, (y[1] - y[0]) / 0.001
    assert min(per_time, per_share) > 0
    fastest_first = sorted(range(4), key=lambda number: FORMS[number][2])
    for number, (_, _, time, same) in enumerate(FORMS[1:], 1):
        across, down = x[0] - (1 - time) * per_time, y[0] + (1 - same) * per_share
        line = 2 * fastest_first.index(number)
        ends = [place for whisker in drawn(svg, "whisker")[line : line + 2] for place in places(whisker)]
        wanted = [(across, down), (across - 0.01 * per_time, down), (across + 0.01 * per_time, down)]
        wanted += [(across, down + 0.01 * per_share), (across, down - 0.0005 * per_share)]
        for one, other in zip([(x[number], y[number]), *ends], wanted, strict=True):
            assert one == pytest.approx(other, abs=0.01)
    assert places(drawn(svg, "best")[0]) == [(x[3], y[3]), (x[1], y[1]), (x[0], y[0])]
    # Numbers are from left to right, and the legend has the names; what was chosen is bold.
    assert [words(number) for number in drawn(svg, "number")] == [["1"], ["2"], ["3"], ["4"]]
    legend = words(drawn(svg, "legend_1")[0])
    assert legend[0] == "1  slim int8: 0.38 of the time, 98.5 %"
    assert [text[:16] for text in legend[1:4]] == ["2  dense int8: 0", "3  slim float32:", "4  dense float32"]
    bold = [text.text for text in ET.fromstring(svg).iter() if "font-weight: 700" in text.get("style", "")]
    assert bold == legend[:1]
    assert draw_frontier(figure) == svg


def some(count: int, *, seed: int, spread: float) -> list[Measured]:
    generator = random.Random(seed)
    spots = [(0.6 + spread * generator.random(), 1 - spread * generator.random() / 8) for _ in range(count)]
    return [
        Measured(f"tool {n}", time, same, (time, time), (same, same), MUTED) for n, (time, same) in enumerate(spots)
    ]


TIES = ((0.5, 0.98), (0.5, 0.99), (0.4, 0.9), (0.6, 0.99))


def test_the_frontier_is_that_of_a_naive_search() -> None:
    found = some(60, seed=0, spread=0.4)
    line = [(point.time, point.same) for point in FrontierFigure(found, "time", "agreement").best]
    assert line == sorted(naive([(one.time, one.same) for one in found]))
    # Of two that are equally fast, and of two that agree equally, only the better one counts.
    ties = [one._replace(time=time, same=same) for one, (time, same) in zip(found, TIES, strict=False)]
    best = FrontierFigure(ties, "time", "agreement").best
    assert [(point.time, point.same) for point in best] == [(0.4, 0.9), (0.5, 0.99)]


def test_every_point_has_a_number_and_numbers_that_would_overlap_are_one_text() -> None:
    apart = draw_frontier(FrontierFigure(some(5, seed=1, spread=0.4), "time", "agreement"))
    assert [words(number) for number in drawn(apart, "number")] == [[str(n)] for n in range(1, 6)]
    close = draw_frontier(FrontierFigure(some(20, seed=0, spread=0.01), "time", "agreement"))
    texts = [text for number in drawn(close, "number") for text in words(number)]
    assert len(texts) < 20
    assert sorted(int(number) for text in texts for number in text.split(", ")) == list(range(1, 21))


def test_what_agrees_far_less_than_promised_lies_below_with_its_number() -> None:
    other = Measured("Tool int8", 0.4, 0.7, (0.39, 0.41), (0.68, 0.72), SECOND)
    without, figure = frontier_figure(report_of()), frontier_figure(report_of(), [other])
    assert figure is not None
    assert without is not None
    assert figure.least == without.least
    svg = draw_frontier(figure)
    bottom = max(y for mark in drawn(svg, "mark") for _, y in places(mark))
    assert places(drawn(svg, "mark")[-1])[0][1] == bottom
    assert "2  Tool int8: 0.40 of the time, 70.0 %" in words(ET.fromstring(svg))


def test_no_name_is_markup_or_a_formula() -> None:
    odd = some(2, seed=1, spread=0.4)
    odd[0] = odd[0]._replace(name="<b>$x_1$ & 漢")
    svg = draw_frontier(FrontierFigure(odd, "time", "agreement"))
    assert "<b>$x_1$ & 漢" in " ".join(words(ET.fromstring(svg)))
    assert "<b>" not in svg


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_shows_texts_that_do_not_collide(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    figure = frontier_figure(report_of(), some(6, seed=2, spread=0.1))
    assert figure is not None
    script = (
        "(() => { const svg = document.querySelector('svg');"
        "const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] };"
        "return [box(svg), [...svg.querySelectorAll('text')].map(box),"
        "getComputedStyle(svg.querySelector('#number text')).fill] })()"
    )
    page = render_html(report_of())
    page = re.sub(r"(?s)<svg.*?</svg>", lambda _: for_page(draw_frontier(figure)), page, count=1)
    inside, texts, ink = browser.look(tmp_path, page, script, width=width, dark=dark)
    assert len(texts) > 25
    for one, other in itertools.combinations(texts, 2):
        across, down = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
        assert across < 1 or down < 2, (one, other)
    for text in texts:
        assert inside[0] - 1 <= text[0] < text[2] <= inside[2] + 1
    assert ink == ("rgb(242, 241, 236)" if dark else "rgb(20, 20, 15)")


def test_the_file_stands_alone() -> None:
    svg = draw_report(report_of())["frontier.svg"]
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert "The frontier: slim int8: 0.38 of the time, 98.5 %; dense int8" in str(root.get("aria-label"))
    assert {"95 % interval", "frontier", "98 % promised, on held-out rows"} <= set(words(root))
    assert "var(" not in svg
    assert list(draw_report(make_report())) == [
        name for name in CAPTIONS if name not in ("frontier.svg", "neurons.svg")
    ]


def test_other_tools_are_drawn_beside_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text(report_of().to_json())
    at = {"batch": 8, "sequence": 128, "ratio": 0.6, "low": 0.58, "high": 0.62, "noisy": False}
    tool = {"bits": "int8", "bytes": 10**6, "stability": 0.97, "low": 0.96, "quality": 0.9, "problem": None}
    tools = [
        tool | {"name": "Good", "times": [at | {"batch": 1, "ratio": 9.0}, at]},
        tool | {"name": "Noisy", "times": [at | {"noisy": True}]},
        tool | {"name": "Failed", "times": [at], "problem": "it failed"},
    ]
    (tmp_path / "peers.json").write_text(json.dumps(tools))
    files = [str(tmp_path / name) for name in ("report.json", "peers.json", "out.svg")]
    monkeypatch.setattr("sys.argv", ["frontier.py", *files])
    runpy.run_path(str(ROOT / "bench" / "frontier.py"))
    shown = words(ET.fromstring((tmp_path / "out.svg").read_text()))
    assert [text for text in shown if re.match(r"\d  (Good|Noisy|Failed)", text)] == [
        "3  Good int8: 0.60 of the time, 97.0 %"
    ]
    *_, good, _, dense = capsys.readouterr().out.splitlines()
    assert good == "| Good int8 | 1.00 MB | 97.0 % | 0.60 |"
    assert dense == "| dense float32 | 1.00 MB | 100.0 % | 1.00 |"


def test_a_noisy_shape_decides_nothing() -> None:
    report, noisy = report_of(noisy=(True, False)), report_of(noisy=(True, True))
    assert deciding_step(report.details.forms[0].times) == 1
    assert frontier_figure(report) is not None
    assert frontier_figure(noisy) is None
    assert "What to deploy" not in render_html(noisy)


def test_a_form_that_was_timed_briefly_has_one_time() -> None:
    whole = report_of(noisy=(False, False))
    forms = [
        replace(form, times=form.times[: 1 if number == 1 else 2]) for number, form in enumerate(whole.details.forms)
    ]
    report = make_report(forms=forms, deployment=whole.details.deployment)
    name = form_name(forms[1], forms)
    table, figure = forms_table(report), frontier_figure(report)
    assert table is not None
    (row,) = (row for row in table.rows if row[0] == name)
    assert (bool(row[-2]), row[-1]) == (True, "")
    assert figure is not None
    assert len(figure.found) == len(forms)


def test_every_rendering_says_what_to_deploy() -> None:
    report = report_of()
    assert lead_text(report).startswith("Deploy the slim model in int8 on ONNX Runtime: promised 98 % of ")
    page = render_html(report)
    for text in ("<h2>What to deploy</h2>", ">1  slim int8: 0.38 of the time, 98.5 %</text>", "98 % promised, on held"):
        assert text in page
    out = terminal(report)
    assert "held out ≥" in out
    assert "98.00%" in out
    assert "; 0.81 of the time on ONNX Runtime" in lead_text(report_of(deployed=None))
