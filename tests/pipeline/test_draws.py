"""Rows of a query are never divided between the uses of a run."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.models import word_tokenizer
from support.reading import reading
from transformers import BertConfig

from hies_export import RequestError
from hies_export.data.rows import load_rows
from hies_export.pipeline import draw as draws_module
from hies_export.pipeline.draw import Promise, Splits, draw, draw_evaluated, hold_out
from hies_export.pipeline.options import PruneSection
from hies_export.recipe.sections import (
    CalibrationSection,
    CascadeSection,
    Columns,
    DataSection,
    EvaluationSection,
    HeldOutSection,
)

OPTIONS = PruneSection.model_validate(
    {"budget": {"heads": 0.5}, "alpha": "auto", "compensation": {"method": "least_squares", "samples": 20}}
)
# Rows that add documents only.
ALONE = 40


def write(file: Path) -> Path:
    """Write 120 rows of 40 queries, two to four of each, and documents that none of them names."""
    chance = random.Random(0)
    sizes = [2, 3, 4] * 13 + [3]
    rows = [{"query": f"q{n}", "document": f"d{n} {i}", "id": n} for n, size in enumerate(sizes) for i in range(size)]
    rows += [{"query": None, "document": f"other {n}", "id": None} for n in range(ALONE)]
    chance.shuffle(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def splits_of(
    tmp_path: Path,
    *,
    scoring: int = 20,
    seed: int = 0,
    held_out: Any = None,
    evaluation: Any = None,
    grouped: bool = False,
) -> tuple[Splits, Any]:
    """Return splits of a single file, and what loads their rows."""
    file, task = write(tmp_path / "rows.jsonl"), "feature-extraction"
    columns: dict[str, Any] = {"query": "query", "document": "document"}
    if grouped:
        columns, task = {"text": ("query", "document"), "group": "id"}, "text-classification"
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "null" not in line))
    files = {"train": file, "validation": file}
    data, evaluation = DataSection(files=files, **columns), EvaluationSection(**evaluation or {})
    model = {"config": BertConfig(num_labels=1), "processor": word_tokenizer(["a"])}
    reader = reading(task, columns=Columns(**columns), **model)
    calibration = CalibrationSection(samples=scoring, seed=seed)
    splits = Splits(data, calibration, evaluation, held_out and HeldOutSection(**held_out))
    return splits, partial(reader.load, files=files)


def queries(rows: datasets.Dataset) -> set[Any]:
    return set(rows["id"]) - {None}


def rows_of(some: set[int]) -> int:
    """Return how many rows these queries have."""
    return sum(2 + n % 3 if n < 39 else 3 for n in some)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_uses_share_no_query(tmp_path: Path, grouped: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "HELD_OUT_SAMPLES", 50)
    splits, load = splits_of(tmp_path, grouped=grouped, seed=seed)
    found = draw(splits, load, OPTIONS)
    assert not queries(found.scoring) & queries(found.held_out)
    assert 20 <= len(found.scoring) < 24
    assert 46 < len(found.held_out) < 54
    assert rows_of(queries(found.held_out) | queries(found.scoring)) == len(found.scoring) + len(found.held_out)
    assert set(found.compensation["document"]) == set(found.scoring["document"])


@pytest.mark.parametrize("count", [None, 31])
def test_an_evaluated_split_is_divided_between_queries(tmp_path: Path, count: int | None) -> None:
    held_out = {"split": "validation"} | ({} if count is None else {"samples": count})
    splits, load = splits_of(tmp_path, held_out=held_out)
    found, rows = draw(splits, load, OPTIONS).held_out, draw_evaluated(splits, load)
    assert not queries(found) & queries(rows)
    assert queries(found) | queries(rows) == set(range(40))
    # Only rows with a query are halved; what queries may find besides is left to the evaluation.
    most = count or 120 // 2
    assert most <= len(found) < most + 4
    assert None not in found["query"][:]
    assert rows["query"][:].count(None) == ALONE


@pytest.mark.parametrize(("held_out", "count"), [(None, 50), ({"split": "validation", "samples": 40}, 30)])
def test_of_the_evaluated_rows_whole_queries_are_drawn(tmp_path: Path, held_out: Any, count: int) -> None:
    rows = draw_evaluated(*splits_of(tmp_path, held_out=held_out, evaluation={"samples": count}))
    assert count <= len(rows) < count + 4
    assert rows_of(queries(rows)) == len(rows)


def test_a_query_is_left_to_evaluate(tmp_path: Path) -> None:
    splits, load = splits_of(tmp_path, held_out={"split": "validation", "samples": 120})
    with pytest.raises(RequestError, match="fewer than its 120 samples can be held out, got held_out.samples: 120"):
        draw_evaluated(splits, load)


@pytest.mark.parametrize("held_out", [{}, {"samples": 5}])
def test_a_single_query_is_not_divided(tmp_path: Path, held_out: Any) -> None:
    splits, load = splits_of(tmp_path, held_out={"split": "validation", **held_out})
    rows = [{"query": query, "document": "d"} for query in ("q", None, None)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RequestError, match="too few samples to divide, 1; name another split as held_out"):
        draw_evaluated(splits, load)


@pytest.mark.parametrize("scoring", [119, 130])
def test_documents_alone_are_not_held_out(tmp_path: Path, scoring: int) -> None:
    splits, load = splits_of(tmp_path, scoring=scoring)
    with pytest.raises(RequestError, match=f"beyond the {scoring} to score on, but the split 'train' has 120"):
        draw(splits, load, OPTIONS)


def test_a_promise_has_queries_where_most_rows_add_documents(tmp_path: Path) -> None:
    splits, load = splits_of(tmp_path)
    refitted = {"method": "least_squares", "samples": 200}
    options = PruneSection.model_validate({"budget": {"flops": 0.5}, "compensation": refitted})
    found = draw(splits, load, options, CascadeSection(disagreement=0.1, samples=100))
    assert len(queries(found.promised)) > 20
    assert not queries(found.promised) & (queries(found.scoring) | queries(found.compensation))


def loading(files: Any) -> Any:
    """Return what loads the rows of a split of some files."""
    return lambda split, **drawn: load_rows(files=files, split=split, **drawn)


def held_out_of(splits: Splits, needed: int, load: Any, *, most: int = 1000) -> int | None:
    """Return how many rows are held out for a promise that needs some."""
    section = hold_out(splits, Promise("99 %", (needed,), most), load).held_out
    return section and section.samples


def test_a_promise_counts_rows_with_a_query(tmp_path: Path) -> None:
    train, file = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    rows = [{"query": f"q{n}" if n < 30 else None, "document": f"d{n}"} for n in range(300)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(files={"train": train, "validation": file}, query="query", document="document")
    splits, load = Splits(data, CalibrationSection(), EvaluationSection()), loading(data.files)
    assert held_out_of(splits, 22, load) == 22
    assert held_out_of(splits, 23, load) is None


@pytest.mark.parametrize(("asked", "left"), [(160, 80), (100, 100)])
def test_all_rows_to_evaluate_are_those_that_are_not_held_out(tmp_path: Path, asked: int, left: int) -> None:
    splits, load = splits_of(tmp_path, evaluation={"samples": asked})
    assert hold_out(splits, Promise("99 %", (20,), 1000), load).evaluation.samples == left


def test_a_promise_about_queries_holds_out_as_many_queries_as_it_needs(tmp_path: Path) -> None:
    """Ten candidates a query: 20 queries are 200 rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": f"{q}", "d": f"{q} {d}"}) + "\n" for q in range(60) for d in range(10)))
    data = DataSection(files={"train": file, "validation": file}, text=("q", "d"), group="q")
    splits, load = Splits(data, CalibrationSection(), EvaluationSection()), loading(data.files)
    assert held_out_of(splits, 20, load, most=100) == 200
    assert held_out_of(splits, 45, load, most=100) == 450
    assert held_out_of(splits, 46, load, most=100) is None  # 460 of 600 rows are more than three quarters
