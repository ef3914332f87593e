"""Reports of runs that removed neurons: counts by hand, in every rendering, with and without heads."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from support.reports import DATA, make_report, terminal
from support.reports import TRIED as TRIED_ROW

from hies_export import Kept, PruningPlan, Report
from hies_export.report.card import render_card
from hies_export.report.figures import draw_report
from hies_export.report.html import render_html, render_markdown
from hies_export.report.report import CUT, KEPT, NeuronCount, UnitCounts, plan_counts
from hies_export.report.tables import BAR_WIDTH, bar, comparison_table, plan_maps, tried_table
from hies_export.report.words import method_text, removed_text, title
from hies_export.vocabulary.tokenizer import CutBeside
from hies_export.vocabulary.trim import VocabularyFacts

PLAN = PruningPlan(
    kept={
        "layer.0.attention": Kept((0, 2, 3), 4),
        "layer.1.attention": Kept((1,), 4),
        "layer.0": Kept(tuple(range(1000)), 1536, kind="mlp"),
        "layer.1": Kept(tuple(range(1536)), 1536, kind="mlp"),
    },
    criterion="hies",
    alpha=0.5,
)
TRIED = [
    TRIED_ROW | {"criterion": "hies", "alpha": 0.25, "quality": 0.86123, "stability": 0.951},
    TRIED_ROW | {"criterion": "<b>|", "token_weights": 0.1, "quality": 0.9, "stability": 1.0, "chosen": True},
]


def without_heads(report: Report) -> Report:
    heads = {"total": 0, "removed": 0, "kept_per_layer": []}
    return dataclasses.replace(
        report, heads=heads, details=report.details.model_copy(update={"head_map": {}, "heads": {}})
    )


def test_a_plan_is_counted_by_kind() -> None:
    counts = plan_counts(PLAN)
    assert counts["heads"] == {"total": 8, "removed": 4, "kept_per_layer": [3, 1]}
    assert counts["neurons"] == {"total": 3072, "removed": 536, "kept_per_layer": [1000, 1536]}
    assert removed_text(counts) == "4 of 8 heads and 536 of 3,072 neurons removed"
    judged = CutBeside(1, 0, 1, 1)
    tokens = VocabularyFacts(total=90, kept=60, source="", texts=1, judged=judged, max_abs=0.0)
    assert removed_text(counts | {"tokens": tokens}) == "4 of 8 heads, 536 of 3,072 neurons and 30 of 90 tokens removed"
    assert removed_text({"heads": counts["heads"]}) == "4 of 8 heads removed"
    assert removed_text({**counts, "heads": UnitCounts(0, 0, [])}) == "536 of 3,072 neurons removed"
    of_heads = dataclasses.replace(PLAN, kept=PLAN.of_kind("attention"))
    assert plan_counts(of_heads) == {"heads": counts["heads"]}
    assert list(plan_maps(of_heads)) == ["heads"]


def test_a_bar_is_full_or_empty_only_where_the_layer_is() -> None:
    for kept, marks in ((0, 0), (1, 1), (1535, 23), (1536, 24)):
        assert bar(NeuronCount(kept, 1536)) == KEPT * marks + CUT * (BAR_WIDTH - marks)


def test_the_file_has_neurons_only_where_they_could_go(tmp_path: Path) -> None:
    report, plain = make_report(neurons=64), make_report()
    assert report.summary()["neurons"] == {"total": 192, "removed": 24, "kept_per_layer": [64, 56, 48]}
    (tmp_path / "report.json").write_text(report.to_json())
    assert Report.from_file(tmp_path) == report
    assert "neurons" not in plain.summary()
    assert "neurons" not in json.loads(plain.to_json())
    assert "neurons.svg" not in draw_report(plain)


def test_texts_name_both_kinds() -> None:
    report = make_report(neurons=64, data=DATA | {"calibration_samples": 8})
    assert title(report) == "some/model, 3 of 12 heads and 24 of 192 neurons removed"
    assert method_text(report).startswith("Heads and neurons were scored on 8 samples with their labels; quality is")
    assert title(without_heads(report)) == "some/model, 24 of 192 neurons removed"
    assert method_text(without_heads(report)).startswith("Neurons were scored on 8")
    assert [tuple(row[1:4]) for row in comparison_table(report).rows[:2]] == [
        ("12", "9", "-25.0%"),
        ("192", "168", "-12.5%"),
    ]
    card = render_card(report)
    assert "- attention-heads\n- feed-forward-neurons\n" in card
    assert "  1  ■■■■■■■■■■■■■■■■■■■■■···  56/64\n" in card
    assert "Its layers have different numbers of heads or neurons" in render_card(
        make_report(neurons=64, custom_code=True)
    )


def test_every_rendering_draws_the_bars() -> None:
    report = make_report(neurons=1536)
    bar = "■" * 21 + "···"
    for text in (terminal(report), render_markdown(report)):
        assert f"  1  {bar}  1,344/1,536\n" in text
    assert ">1,344 of 1,536</text>" in render_html(report)
    bars = re.findall(r'd="M (\S+) \S+ \nL (\S+) \S+ [^"]*" clip-path', draw_report(report)["neurons.svg"])
    full, kept, _, part, *_ = (float(right) - float(left) for left, right in bars)
    assert (kept / full, part / full) == pytest.approx((1, 0.875), abs=1e-3)


def test_a_run_that_left_heads_alone_renders() -> None:
    report = without_heads(make_report(neurons=64))
    page, figures = render_html(report), draw_report(report)
    assert "<svg" in page
    for text in (page, render_markdown(report), render_card(report), terminal(report)):
        assert "attention heads" not in text
        assert "feed-forward neurons" in text
    assert list(figures) == ["latency.svg", "neurons.svg"]


def test_what_was_tried_is_a_table() -> None:
    report = make_report(tried=TRIED)
    table = tried_table(report)
    assert table is not None
    assert list(table.header) == ["candidate", "accuracy", "same prediction", ""]
    assert [list(row) for row in table.rows] == [
        ["hies, alpha 0.25", "0.8612", "95.1%", ""],
        ["<b>|, token weights 0.1", "0.9000", "100.0%", "chosen"],
    ]
    markdown, page = render_markdown(report), render_html(report)
    assert "## How it was chosen, on held-out rows\n\n| candidate | accuracy |" in markdown
    assert "| &lt;b>\\|, token weights 0.1 | 0.9000 | 100.0% | chosen |" in markdown
    assert "<td>&lt;b&gt;|, token weights 0.1</td>" in page
    unlabelled = tried_table(make_report(tried=[{**row, "quality": None} for row in TRIED]))
    assert unlabelled is not None
    assert "accuracy" not in unlabelled.header
    nothing = make_report(tried=[])
    assert tried_table(nothing) is None
    assert "How it was chosen" not in render_html(nothing) + render_markdown(nothing)
