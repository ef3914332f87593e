"""What reports say of rankings, and of promises about them."""

import json
from typing import Any

import pytest
import yaml
from support.reports import SERVED, make_report

from hies_export.evaluate.promise import asked_words
from hies_export.pipeline.stages import judge_fields
from hies_export.recipe.budget import Budget, Found, KeepBudget, Outcome
from hies_export.report.card import render_card
from hies_export.report.html import render_html
from hies_export.report.report import Report
from hies_export.report.tables import comparison_table
from hies_export.report.words import budget_text, lead_text

NDCG = {
    "slim_index": {"ndcg": 0.88, "own_ndcg": 0.95, "top1": 0.91, "top10": 0.9, "cosine": 0.97},
    "dense_index": {"ndcg": 0.893, "own_ndcg": 0.96, "top1": 0.93, "top10": 0.92, "cosine": 0.96},
}
PROMISE: dict[str, Any] = {
    "budget": {"keep": {"predictions": 0.99, "metric": "ndcg@10", "index": "dense"}},
    **{"found": {"value": 0.996, "bound": 0.991}, "samples": 900},
}


def ranking_report(**details: Any) -> Report:
    metrics = {"ndcg@10": {"dense": 0.9, "slim": 0.893}, "mrr@10": {"dense": 0.8, "slim": 0.79}}
    values = make_report(metrics=metrics, stability_of="first hit", tried=[], **details)
    plain = json.loads(values.to_json())
    plain["quality"] = {"metric": "ndcg@10", "dense": 0.9, "slim": 0.893}
    return Report.from_values({**plain, "stability": 0.93, "ranking": NDCG}, where="here")


def test_a_report_tells_both_indices() -> None:
    report = ranking_report()
    table = comparison_table(report).rows
    rows = {row[0]: tuple(row[1:]) for row in table}
    assert len(rows) == len(table)  # every metric is told once
    assert "MRR@10, your index as it is" in rows
    assert rows["nDCG@10, your index as it is"] == ("0.9000", "0.8930", "-0.0070")
    assert rows["nDCG@10, everything re-embedded"] == ("0.9000", "0.8800", "-0.0200")
    assert rows["same first hit, your index as it is"] == ("", "93.0%", "")
    assert rows["same first hit, everything re-embedded"] == ("", "91.0%", "")
    assert not {"ndcg@10", "same first hit"} & rows.keys()
    assert json.loads(report.to_json())["ranking"] == NDCG
    assert report.summary()["ranking"] == NDCG
    assert "ranking" not in make_report().summary()


@pytest.mark.parametrize(
    ("index", "asked", "kept"),
    [
        ("dense", "99 % of nDCG@10 with your index as it is", "99.2"),
        ("slim", "99 % of nDCG@10 with everything re-embedded", "only 97.7"),
        (None, "99 % of nDCG@10", "99.2"),
    ],
)
def test_a_promise_names_the_metric_and_the_index(index: str | None, asked: str, kept: str) -> None:
    report = ranking_report(outcome=PROMISE | {"budget": {"keep": PROMISE["budget"]["keep"] | {"index": index}}})
    told, lead = budget_text(report), lead_text(report)
    assert f"Budget: {asked}, promised" in told
    assert "99.60 % (at least 99.10 % with 95 % confidence)" in told
    assert f"; promised {asked}; kept {kept} % on 64 other rows" in lead
    stays = "99.2 % of nDCG@10 stays with your index as it is (64 rows; 0.900 → 0.893)"
    assert stays in lead


def test_a_metric_of_pairs_which_has_no_index_is_told_once() -> None:
    indices = {index: {**numbers, "spearman": 0.88} for index, numbers in NDCG.items()}
    report = report_with(quality={"metric": "spearman", "dense": 0.9, "slim": 0.88}, ranking=indices)
    assert "97.8 % of Spearman stays (64 rows; 0.900 → 0.880);" in lead_text(report)


def test_a_loss_of_a_metric_of_rankings_names_the_index() -> None:
    keep = KeepBudget(metric="ndcg@10", by=0.01, index="slim")
    promise = Outcome(Budget(keep=keep), found=Found(0.002, 0.011), samples=9, confidence=0.95)
    assert asked_words(promise) == "a loss of at most 0.01 of nDCG@10 with everything re-embedded"
    assert judge_fields(promise) == {"metrics": ("ndcg@10",), "index": "slim", "confidence": 0.95, "as_of": 9}
    assert not promise.met
    assert Outcome(Budget(keep=KeepBudget(predictions=0.99, metric="ndcg@10")), found=Found(1.002, 0.9901)).met


def report_with(custom_code: bool = True, **changes: Any) -> Report:
    return Report.from_values(json.loads(ranking_report(custom_code=custom_code).to_json()) | changes, where="here")


def test_the_card_of_an_embedding_model_is_for_sentence_transformers() -> None:
    card = render_card(report_with(task="feature-extraction"), location="user/slim")
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["library_name"], head["pipeline_tag"]) == ("sentence-transformers", "sentence-similarity")
    assert {"sentence-transformers", "feature-extraction"} <= set(head["tags"])
    assert 'SentenceTransformer("user/slim", trust_remote_code=True)' in card
    assert "model.encode_query" in card
    assert "generate_text" not in card
    assert 'SentenceTransformer("slim")' in render_card(report_with(custom_code=False, task="feature-extraction"))


def test_the_card_of_a_reranker_is_for_sentence_transformers() -> None:
    report = report_with(ranking={"candidates": {"ndcg": 0.893, "own_ndcg": 0.95, "top1": 0.9, "top10": 1.0}})
    card = render_card(report, location="user/slim")
    assert yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == "text-ranking"
    assert 'CrossEncoder("user/slim", trust_remote_code=True)' in card
    assert "99.2 % of nDCG@10 stays (64 rows; 0.900 → 0.893)" in lead_text(report)


def test_a_page_names_the_served_folder_only_where_a_run_wrote_it() -> None:
    values = json.loads(ranking_report(**SERVED).to_json()) | {"task": "feature-extraction"}
    named = "SentenceTransformer(&quot;served&quot;"
    assert named in render_html(Report.from_values(values, where="here"))
    values["details"]["deployment"] |= {"form": None, "file": None}
    assert named not in render_html(Report.from_values(values, where="here"))
