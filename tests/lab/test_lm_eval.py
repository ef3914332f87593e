"""Benchmarks of lm-eval against likelihoods written out; skipped, visibly, where the extra is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.cuts import plan_of
from support.models import causal_lm, generative_tokenizer
from support.references import choice_likelihoods

from hies_export import RecipeError, RequestError, Scores, find_attention, prune_units
from hies_lab.lm_eval import check_benchmarks, run_benchmarks

ROWS = [{"question": "Q a b", "choices": ["c d", "e"], "right": i % 2} for i in range(2)] + [
    {"question": f"Q {a} {b} c", "choices": [f"{b} a", f"{a} {b}", "yes no"], "right": i % 3}
    for i, (a, b) in enumerate(["ab", "cd", "ef", "gh", "ij", "kl", "ad", "be"])
]


def write_task(folder: Path, **fields: Any) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    path = folder / "letters.yaml"
    path.write_text(yaml.safe_dump(task | fields))
    return path


def naive(model: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Accuracy by the likelihood of each choice, and by that per character."""
    right, normalised = 0, 0
    for row in rows:
        scores = choice_likelihoods(model, row["question"], row["choices"])
        per_character = [s / len(c) for s, c in zip(scores, row["choices"], strict=True)]
        right += scores.index(max(scores)) == row["right"]
        normalised += per_character.index(max(per_character)) == row["right"]
    return {"letters acc": right / len(rows), "letters acc_norm": normalised / len(rows)}


def test_values_are_those_of_likelihoods_written_out(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    task = str(write_task(tmp_path))
    check_benchmarks([task])
    model = causal_lm()
    sites = find_attention(model, {"input_ids": torch.randint(3, 30, (2, 8))})
    scores = Scores("", {}, {s.name: torch.rand(s.units, dtype=torch.float64) for s in sites})
    slim = prune_units(model, plan_of(scores, sites, heads=0.25), sites)
    for judged in (model, slim):
        assert run_benchmarks(judged, generative_tokenizer(), [task]) == pytest.approx(naive(judged, ROWS))
    few = run_benchmarks(model, generative_tokenizer(), [task], samples=3)
    assert few == pytest.approx(naive(model, ROWS[:3]))


def test_unknown_tasks_and_lost_data_are_said_before_any_work(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    with pytest.raises(RecipeError, match=r"got 'helaswag'; did you mean 'hellaswag'"):
        check_benchmarks(["helaswag"])
    with pytest.raises(RecipeError, match=r"must be a file that exists, got .*gone\.yaml"):
        check_benchmarks([str(tmp_path / "gone.yaml")])
    lost = write_task(tmp_path, dataset_kwargs={"data_files": {"test": str(tmp_path / "gone.jsonl")}})
    with pytest.raises(RequestError, match=r"must be loadable, but lm-eval says: .*gone\.jsonl"):
        check_benchmarks([str(lost)])
