"""report.html: what it says, that it loads nothing, and how a real browser shows it."""

import dataclasses
import html
import io
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import metadata_load
from markdown_it import MarkdownIt
from rich.console import Console
from support.browser import Browser
from support.reports import DATA, latency_row, make_report, outcome, terminal

from hies_export import OutputExistsError, Report, RequestError
from hies_export.report.card import render_card
from hies_export.report.comparison import Bench, print_bench, read_report, render_bench
from hies_export.report.figures import CAPTIONS, draw_report, write_figures
from hies_export.report.html import one_line, render_html, render_markdown
from hies_export.report.report import KEPT
from hies_export.report.words import budget_text

NOT_OF_ONE_FORM = ("frontier.svg", "neurons.svg")


class Page(HTMLParser):
    """Tags, attributes and text of a page, without the line breaks between elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data)


def test_every_head_is_there_with_its_numbers() -> None:
    report = make_report()
    for name in ("heads", "score", "his", "entropy"):
        drawn = ET.fromstring(draw_report(report)[f"{name}.svg"])
        crosses = [use for group in drawn.iter() if group.get("id") == "cut" for use in group.iter() if use.get("x")]
        cells = [use for use in drawn.iter() if use.get("x") and "fill: #0072b2" in use.get("style", "")]
        assert len(cells) == 12
        assert len(crosses) == report.heads["removed"]
    shades = [float(found) for found in re.findall(r"fill-opacity: ([\d.]+)", draw_report(report)["his.svg"])]
    assert shades == pytest.approx([0.06 + 0.94 * number / 11 for number in range(11)], abs=1e-6)  # the last is full
    page = render_html(report)
    assert all(caption in html.unescape(page) for name, caption in CAPTIONS.items() if name not in NOT_OF_ONE_FORM)


def test_noisy_rows_give_no_ratio() -> None:
    report = make_report()
    text, markdown = "".join(Page(render_html(report)).words), render_markdown(report)
    for shown in (text, markdown):
        assert "0.810" in shown
        assert "0.700" not in shown.replace("0.7000", "")  # that is a metric
    assert "noisy" in text
    assert "| noisy | [1.030, 1.200] |" in markdown
    assert "measure again on an idle machine" in markdown
    # What it realised is not shown either, and not explained.
    assert "Realised" in markdown
    assert "ealised" not in render_markdown(dataclasses.replace(report, latency=report.latency[2:]))


TIMED = {"ratio": 0.85, "runtime": "torch", "batch": 8, "sequence": 128}


def test_a_budget_is_told_with_what_was_measured() -> None:
    timed = outcome({"latency": TIMED}, 0.86, predicted=0.84, noisy=False)
    kept = outcome({"keep": 0.9}, 0.95, bound=0.92, samples=256, judged=[{}, {}])
    for found, sentence in (
        (timed, "0.85 of the time of the dense model on torch at 8 x 128. Found 0.860; predicted 0.840."),
        (outcome({"flops": 0.85}, 0.86), "at most 0.85 of the FLOPs of the dense model. Found 0.860."),
        (kept, "Found 95.00 % (at least 92.00 % with 95 % confidence); 2 cuts were tried."),
    ):
        assert sentence in budget_text(make_report(outcome=found))


def test_a_decode_step_shows_tokens() -> None:
    speed = {"tokens_per_second": {"dense": 812.3, "slim": 1043.1}, "realised": None}
    step = latency_row("torch", 0.78, phase="decode", dtype="bfloat16", **speed)
    report = make_report()
    report = dataclasses.replace(report, latency=[*report.latency, step])
    markdown, page = render_markdown(report), "".join(Page(render_html(report)).words)
    assert "| torch 8 x 128 decode bfloat16 | 100.00 ms | 78.00 ms | 0.780 [0.770, 0.792] |" in markdown
    assert "| 812 → 1043 |" in markdown
    assert "812 → 1043" in page


def test_a_bench_is_shown_and_other_json_refused(tmp_path: Path) -> None:
    rows = [
        latency_row("torch", 0.8),
        latency_row("openvino", 1.1, noisy=True),
    ]
    values = {"a": "<b>BERT", "b": "LLaMA", "latency": rows, "environment": {"gpu": "a card", "torch": "2.13.0"}}
    (tmp_path / "bench.json").write_text(json.dumps(values))
    bench = read_report(tmp_path / "bench.json")
    assert isinstance(bench, Bench)
    text = render_bench(bench)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("section") == 1
    assert "<b>BERT" not in text
    # What the axis is of; the control.
    for shown in ("B / A; orange", "A / A, the control"):
        assert shown in "".join(page.words)
    out = io.StringIO()
    print_bench(bench, Console(file=out, width=140))
    assert out.getvalue().startswith("A <b>BERT, B LLaMA\n")
    assert re.search(r"openvino .* noisy ", out.getvalue())
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(RequestError, match="a report must be a report.json or a run's folder"):
        read_report(tmp_path / "bench.json")


def test_figures_of_a_run_are_drawn_the_same_twice() -> None:
    report = make_report(neurons=64)
    found = draw_report(report)
    assert list(found) == list(CAPTIONS)[1:]  # of one form there is no frontier
    assert draw_report(report) == found
    texts = {name: [e.text for e in ET.fromstring(svg).iter() if e.tag.endswith("text")] for name, svg in found.items()}
    ends = {name: texts[f"{name}.svg"][0] for name in ("heads", "score", "his", "entropy")}
    assert ends == {
        "heads": "0",
        "score": "empty: 0.12, full: 0.15",
        "his": "empty: 0, full: 0.11",
        "entropy": "empty: 0.5, full: 0.8",
    }
    # The noisy row has a name and a control, and no ratio.
    names = [f"{runtime} 8 x 128" for runtime in ("torch", "onnxruntime-cpu", "onnxruntime-cpu-int8")]
    told = [text for text in texts["latency.svg"] if text in (*names, "0.830", "0.810", "0.700", "noisy")]
    assert sorted(map(str, told)) == sorted([*names, "0.830", "0.810", "noisy"])
    assert "latency.svg" not in draw_report(dataclasses.replace(report, latency=[]))


def test_heads_of_which_all_stay_are_filled() -> None:
    report = make_report()
    whole = {module: KEPT * len(line) for module, line in report.details.head_map.items()}
    report = dataclasses.replace(report, details=report.details.model_copy(update={"head_map": whole}))
    shades = re.findall(r"fill-opacity: ([\d.]+)", draw_report(report)["heads.svg"])
    assert not shades or {float(shade) for shade in shades} == {1.0}
    assert draw_report(report)["heads.svg"].count("<use ") >= sum(map(len, whole.values()))


def test_a_figure_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    figures = draw_report(make_report())
    write_figures(figures, tmp_path)
    write_figures(figures, tmp_path)
    (tmp_path / "latency.svg").write_text("<svg>mine</svg>")
    (tmp_path / "heads.svg").unlink()
    with pytest.raises(OutputExistsError, match=r"only if it is a figure of hies-export, but .*latency\.svg is some"):
        write_figures(figures, tmp_path)
    assert (tmp_path / "latency.svg").read_text() == "<svg>mine</svg>"
    assert not (tmp_path / "heads.svg").exists()


EVIL = "</script><img src=x>|`"


def report_of(name: str) -> Report:
    """A report in which everything that a recipe, a model or a machine can name has one name."""
    details = {
        "head_map": {name: KEPT * 4},
        "heads": {name: {"his": [0.0, 1.0, 2.0, 3.0]}},
        "metrics": {name: {"dense": 0.9, "slim": 0.89}},
        "outcome": outcome({"latency": TIMED | {"runtime": name}}, 0.86, predicted=0.84, noisy=False),
        "stability_of": name,
        "data": DATA | {"evaluation_split": name},
    }
    return dataclasses.replace(
        make_report(),
        model=name,
        criterion=name,
        quality={"metric": name, "dense": 0.9, "slim": 0.89},
        latency=[latency_row(name, 0.8, dtype=name), latency_row(name, 0.8, noisy=True, cuda_graph=True, loads=2)],
        environment={"cpu": name},
        seconds={name: 1.0},
        details=details,
    )


def test_names_are_text_on_every_page() -> None:
    report = report_of(EVIL)
    row = latency_row(EVIL, 0.8, dtype=EVIL)
    bench = Bench.from_values({"a": EVIL, "b": EVIL, "latency": [row], "environment": {"cpu": EVIL}})
    for text in (render_html(report), render_bench(bench)):
        page = Page(text)
        assert "img" not in [tag for tag, _ in page.tags]
        assert EVIL in "".join(page.words)
    for text in (render_markdown(report), render_card(report).split("\n---\n")[1]):
        # What is left of "<" after the code spans, which show it as it is.
        assert "<" not in re.sub(r"(`+) .*? \1", "", text)
        tables = re.findall(r"(?m)^\|.*\n(?:\|.*\n)+", text)
        assert tables
        assert all(len({len(re.findall(r"(?<!\\)\|", line)) for line in of.splitlines()}) == 1 for of in tables)


# Links, a picture, emphasis, an entity, and a backslash that would end the escape of the bar behind it.
MARKED = "[a](http://b)![c](d)[e][f]*g*_h_**i**~~j~~&lt;\\|\n# k\n---\n```\n| l |"


def test_names_are_text_in_markdown() -> None:
    """As an independent parser of CommonMark sees it."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for render, names in ((render_markdown, 12), (render_card, 8)):
        found = [parser.render(render(report).split("\n---\n\n")[-1]) for report in (report_of(MARKED), make_report())]
        tags = [set(re.findall(r"<(\w+)", text)) for text in found]
        assert tags[0] - tags[1] <= {"code"}
        assert found[0].count("[a](http://b)![c](d)[e][f]*g*_h_**i**~~j~~&amp;lt;") >= names


def test_no_name_ends_a_block_of_code() -> None:
    assert one_line("a\n```\r\nb\u2028c") == "a ``` b c"


def test_metadata_is_what_it_was_given(tmp_path: Path) -> None:
    evil = "a: b\n---\nlicense: mit # {x} 'q' \"r\" [s] &t *u !v %w @x `y` null 1e3"
    report = dataclasses.replace(report_of(MARKED), task=evil)
    (tmp_path / "README.md").write_text(render_card(report, origin={"base_model": evil, "license": evil}))
    metadata: Any = metadata_load(tmp_path / "README.md")
    assert (metadata["base_model"], metadata["license"], metadata["pipeline_tag"]) == (evil, evil, evil)


def test_a_terminal_shows_names_as_they_are() -> None:
    report = dataclasses.replace(make_report(), latency=[latency_row("[red]torch[/]", 0.8)])
    assert "[red]torch[/] 8 x 128" in terminal(report)


def test_nothing_is_loaded_from_anywhere() -> None:
    text = render_html(make_report())
    tags = [attributes for _, attributes in Page(text).tags]
    for attributes in tags:
        assert not (attributes.keys() & {"src", "srcset", "action"})
        assert (attributes.get("href") or "data:,").startswith(("#", "data:,"))
    assert not re.search(r"https?:|url\((?!#)|@import", text)
    (policy,) = (of["content"] for of in tags if of.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_shows_it_whole(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    step = latency_row("onnxruntime-cpu-int8", 0.78, phase="decode", dtype="bfloat16", realised=None)
    step["tokens_per_second"] = {"dense": 812.3, "slim": 1043.1}
    report = make_report(layers=24, heads=16, neurons=4096)
    report = dataclasses.replace(report, latency=[*report.latency, step])
    bench = Bench.from_values(
        {"a": "one", "b": "two", "latency": report.latency[:3], "environment": report.environment}
    )
    script = (
        "(() => { const box = e => e.getBoundingClientRect(), all = s => [...document.querySelectorAll(s)];"
        "return {width: [document.documentElement.scrollWidth, innerWidth],"
        "cut: all('figcaption,th,td').filter(e => e.scrollWidth > e.clientWidth + 1),"
        "outside: all('svg text').filter(e => {const a = box(e), b = box(e.closest('svg'));"
        "return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1}).map(e => e.textContent)"
        "} })()"
    )
    for page in (render_bench(bench), render_html(report)):
        found = browser.look(tmp_path, page, script, width=width, dark=dark)
        assert found["width"] == [width, width]
        assert (found["outside"], found["cut"]) == ([], [])
        assert len(browser("Page.captureScreenshot")["data"]) > 13_000


@pytest.mark.slow
def test_a_browser_would_have_complained(browser: Browser, tmp_path: Path) -> None:
    page = render_html(make_report()).replace("</body>", "<img src='https://example.org/x.png'></body>")
    with pytest.raises(AssertionError, match="blocked"):
        browser.look(tmp_path, page, "0")
