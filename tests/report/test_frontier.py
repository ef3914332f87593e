"""The picture of agreement against time: who is where, which forms make the frontier, and what is too noisy."""

import itertools
import json
import math
import random
import re
import runpy
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.reports import make_report

from hies_export.report.details import deciding_step
from hies_export.report.figures import CAPTIONS, draw_report
from hies_export.report.frontier import WIDTH, Measured, Shape, frontier, frontier_figure, place_frontier
from hies_export.report.html import render_html
from hies_export.report.labels import Area, Label, place_labels
from hies_export.report.lead import lead_text
from hies_export.report.report import Report
from hies_export.report.terminal import print_report

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
    return {"batch": 8, "sequence": 128, "phase": "forward", "ms": 10 * ratio, "ratio": ratio, "noisy": noisy, **ends}


def report_of(*, noisy: tuple[bool, ...] = (False,), deployed: int | None = 3) -> Report:
    forms = [
        {
            **{"model": model, "runtime": "onnxruntime-cpu", "bits": bits, "bytes": 10**6, "quality": 0.9},
            **{
                "stability": same,
                "stability_low": same - 0.01,
                "stability_high": min(same + 0.0005, 1),
                "kept": same,
                "at_least": same - 0.005,
            },
            "times": [time(ratio, noisy=one) for one in noisy],
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


def test_points_are_where_time_and_agreement_say() -> None:
    figure = frontier_figure(report_of())
    assert figure is not None
    x = [mark.x for mark in figure.marks]
    # The first form is its own measure: its time is 1, whatever the control says.
    assert sorted(range(4), key=lambda number: x[number]) == [3, 1, 2, 0]
    assert figure.marks[0].y == figure.axes.top == dict((text, y) for y, text in figure.y_ticks)["100 %"]
    assert (x[0] - x[1]) / (x[1] - x[3]) == pytest.approx((1 - 0.5) / (0.5 - 0.38))
    y = [mark.y for mark in figure.marks]
    assert y[0] < y[1] < y[2] < y[3]
    assert [mark.chosen for mark in figure.marks] == [False, False, False, True]
    assert figure.line == [(x[3], y[3]), (x[1], y[1]), (x[0], y[0])]
    per_time, per_share = (x[0] - x[1]) / 0.5, (y[1] - y[0]) / 0.001
    for mark in figure.marks[1:]:
        (left, at, right, same_y), (same_x, low, also_x, high) = mark.whiskers
        assert (at, same_y, same_x, also_x) == (mark.y, mark.y, mark.x, mark.x)
        assert right - mark.x == pytest.approx(mark.x - left) == pytest.approx(0.01 * per_time)
        assert mark.y - high == pytest.approx(0.0005 * per_share)
        assert low == pytest.approx(min(mark.y + 0.01 * per_share, figure.axes.bottom))
    assert figure.promise == pytest.approx(y[0] + 0.02 * per_share)
    # What was chosen comes first, so that it keeps its name.
    assert [(label.lines, kind) for label, kind in figure.labels] == [
        (("slim int8", "0.38 of the time"), "best"),
        *(((name,), "") for name in ("dense float32", "dense int8", "slim float32")),
    ]
    assert apart([label for label, _ in figure.labels], [(mark.x, mark.y) for mark in figure.marks])


def apart(labels: Sequence[Label], points: Sequence[tuple[float, float]]) -> bool:
    """Whether no text lies on another, on a point or outside."""
    boxes = [label.area for label in labels]
    meet = [
        min(a.right, b.right) > max(a.left, b.left) and min(a.bottom, b.bottom) > max(a.top, b.top)
        for a, b in itertools.combinations(boxes, 2)
    ]
    on = [box.left < x < box.right and box.top < y < box.bottom for box in boxes for x, y in points]
    return not any(meet) and not any(on) and all(0 <= box.left < box.right <= WIDTH for box in boxes)


def some(count: int, *, seed: int, spread: float) -> list[Measured]:
    generator = random.Random(seed)
    spots = [(0.6 + spread * generator.random(), 1 - spread * generator.random() / 8) for _ in range(count)]
    return [
        Measured((f"tool {n}",), time, same, (time, time), (same, same), "other", 0, f"note {n}")
        for n, (time, same) in enumerate(spots)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_frontier_is_that_of_a_naive_search(seed: int) -> None:
    found = some(60, seed=seed, spread=0.4)
    line = [(found[number].time, found[number].same) for number in frontier(found)]
    assert line == sorted(naive([(one.time, one.same) for one in found]))
    # Of two that are equally fast, and of two that agree equally, only the better one counts.
    ties = [one._replace(time=time, same=same) for one, (time, same) in zip(found, TIES, strict=False)]
    assert [TIES[number] for number in frontier(ties)] == [(0.4, 0.9), (0.5, 0.99)]


TIES = ((0.5, 0.98), (0.5, 0.99), (0.4, 0.9), (0.6, 0.99))


def test_names_without_room_are_numbers_in_the_legend() -> None:
    found = some(6, seed=1, spread=0.4)
    found[3] = found[3]._replace(name=("a name that is wider than the picture, because it goes on and on",))
    crowd = some(30, seed=0, spread=0.01)
    for measured in (found, crowd):
        figure = place_frontier(measured, across="time", upwards="agreement")
        written = [label for label, _ in figure.labels]
        keys = {key.sample: key.text for key in figure.keys}
        names = [label for label in written if label.lines[0] not in keys]
        assert len(names) < len(written)
        assert sorted(keys.get(label.lines[0], label.lines[0]) for label in written) == sorted(
            one.name[0] for one in measured
        )
        # In a crowd a number may lie on another one.
        assert apart(written if measured is found else names, [(mark.x, mark.y) for mark in figure.marks])
    roomy = place_frontier(some(5, seed=1, spread=0.4), across="time", upwards="agreement")
    assert [label.lines[0] for label, _ in roomy.labels] == [f"tool {n}" for n in range(5)]


def test_a_name_stands_nearer_to_its_own_point_than_to_another() -> None:
    # To the left and right are points, above and below a line; in the corners the name would be a neighbour's.
    points, blocked = [(300.0, 250.0), (311.0, 250.0), (285.0, 250.0)], (300.0, 150.0, 300.0, 350.0)
    label, *_ = place_labels(points, [("own",), (), ()], within=Area(80, 30, 596, 400), lines=[blocked] * 3)
    assert label is not None
    middle = [(label.area.left + label.area.right) / 2, (label.area.top + label.area.bottom) / 2]
    assert label.leader or min(points, key=lambda point: math.dist(point, middle)) == points[0]


def test_what_agrees_far_less_than_promised_lies_below_with_its_number() -> None:
    report = report_of()
    other = Measured(("Tool", "int8"), 0.4, 0.7, (0.39, 0.41), (0.68, 0.72), "peer", 0, "Tool: 70%")
    without, figure = frontier_figure(report), frontier_figure(report, [other])
    assert figure is not None
    assert without is not None
    assert figure.y_ticks == without.y_ticks
    assert (figure.marks[-1].y, figure.labels[-1][0].lines) == (figure.axes.bottom, ("Tool ↓ 70 %", "int8"))
    assert [key.sample.kind for key in figure.keys if isinstance(key.sample, Shape)] == ["other", "peer"]


def test_the_file_stands_alone_in_light_and_dark() -> None:
    svg = draw_report(report_of())["frontier.svg"]
    root = ET.fromstring(svg)
    assert [element.tag.rpartition("}")[2] for element in root[:2]] == ["style", "rect"]
    inner = next(element for element in root.iter() if element.get("class") == "frontier")
    assert inner.get("role") == "img"
    assert "slim int8: 0.38 of the time, 98.5% same; dense int8" in str(inner.get("aria-label"))
    notes = [element.text for element in inner.iter() if element.tag.endswith("title")]
    assert [note.partition(":")[0] for note in notes if note] == [" ".join(form[:2]) for form in FORMS]
    words = [element.text for element in inner.iter() if element.tag.endswith("text")]
    assert {"dense float32", "dense int8", "slim int8", "95 % interval", "frontier"} <= set(words)
    light, dark = str(root[0].text).split("@media(prefers-color-scheme:dark)")
    for drawn in (".page{fill:", ".frontier .slim path{fill:", ".frontier polyline.best{stroke:", "text{fill:"):
        colours = [re.findall(re.escape(drawn) + "(#[0-9a-f]+)", part) for part in (light, dark)]
        assert all(colours), drawn
        assert colours[0] != colours[1], drawn
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
    assert (tmp_path / "out.svg").read_text().count('<g class="peer">') == 2  # the point, and what its mark means
    *_, good, _, dense = capsys.readouterr().out.splitlines()
    assert good == "| Good int8 | 1.00 MB | 97.0 % | 0.60 |"
    assert dense == "| dense float32 | 1.00 MB | 100.0 % | 1.00 |"


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
    assert page.count('<svg class="frontier"') == 1
    for text in (">dense float32</text>", ">0.38 of the time</text>", "98 % promised, on held-out rows"):
        assert text in page
    print_report(report, Console(width=200))
    out = capsys.readouterr().out
    assert "held out ≥" in out
    assert "98.00%" in out
    none = report_of(deployed=None)
    assert lead_text(none).startswith("0.81 of the time on ONNX Runtime")
