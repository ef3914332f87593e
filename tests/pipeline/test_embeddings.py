"""Runs of embedding models, judged again by loops over what their slim folders embed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from support.exported import run_onnx
from support.models import word_tokenizer, write_recipe
from support.references import ranked
from support.runs import deploy_on, without_tracing
from support.sentences import WORDS, bert_encoder, in_memory, sentence_folder
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer, PreTrainedModel

import hies_export
from hies_export import PruningRecipe, Report
from hies_export.pipeline import choose as choosing
from hies_export.pipeline import measure as measuring
from hies_export.pipeline.load_recipe import load_recipe

Row = dict[str, Any]
SEARCH = {"query": "query", "document": "document"}


def words(start: int, count: int = 5) -> str:
    return " ".join(WORDS[(start * 7 + step * step * 3) % len(WORDS)] for step in range(count))


def searches(count: int, first: int = 0) -> list[Row]:
    """Rows of a query with two or three documents that should be found, and rows of a document alone."""
    rows: list[Row] = []
    for query in range(first, first + count):
        found = [words(3 * query + step, 6 + step) for step in range(2 + query % 2)]
        rows += [{"query": words(5 * query + 1, 3), "document": found}, {"query": None, "document": [words(9 * query)]}]
    return rows


def texts(count: int, first: int = 0) -> list[Row]:
    return [{"text": words(number, 3 + number % 4)} for number in range(first, first + count)]


def project(
    folder: Path,
    rows: Callable[..., list[Row]] | tuple[list[Row], list[Row]],
    *,
    task: str = "feature-extraction",
    columns: Row,
    **fields: Any,
) -> PruningRecipe:
    """Write rows and a recipe for the model in folder/model, and read the recipe."""
    splits = rows if isinstance(rows, tuple) else (rows(24), rows(14, 50))
    for name, of in zip(("train", "validation"), splits, strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    data = {"files": {"train": "train.jsonl", "validation": "validation.jsonl"}} | columns
    usual = {
        "calibration": {"samples": 16, "batch_size": 8},
        "prune": {"criterion": "his", "budget": {"heads": 0.4}},
        "measure": {"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 2},
    }
    return PruningRecipe.from_yaml(write_recipe(folder, task, data=data, **(usual | fields)))


def run(recipe: PruningRecipe) -> Report:
    """Run a recipe, and return what its report.json says."""
    with without_tracing():
        hies_export.run(recipe)
    return Report.from_file(recipe.output)


def encoder_in_8_bits() -> PreTrainedModel:
    """Return an encoder with a layer that 8 bits make faster; both tests that write graphs trace it once."""
    return bert_encoder(num_hidden_layers=1, intermediate_size=512)


def embed(folder: Path, of: list[str]) -> Tensor:
    """Return the embeddings of texts, one at a time."""
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    return torch.tensor(model.encode(of, batch_size=1)).double()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-5)


def test_queries_and_documents_are_judged_on_both_indices(tmp_path: Path) -> None:
    options = {"prompts": {"query": "w3 w4 ", "document": ""}, "default_prompt_name": None}
    sentence_folder(tmp_path / "model", options=options)
    prune = {"modules": ["attention", "mlp"], "criterion": "compensated", "budget": {"flops": 0.7}}
    prune["compensation"] = {"method": "least_squares", "samples": 24}
    report = run(project(tmp_path, searches, columns=SEARCH, prune=prune, vocabulary={}))
    assert report.vocabulary.kept < report.vocabulary.total
    assert report.task == "feature-extraction"
    assert report.quality.metric == "ndcg@10"
    raw = json.loads((tmp_path / "out/report.json").read_text())
    assert raw["ranking"].keys() == {"slim_index", "dense_index"}
    assert raw["quality"].keys() == {"metric", "dense", "slim"}

    rows = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    wanted = {row["query"]: row["document"] for row in rows if row["query"]}
    documents = list(dict.fromkeys(text for row in rows for text in row["document"]))
    slim = tmp_path / "out/slim"
    assert (slim / "modules.json").is_file()
    of = {
        name: (embed(folder, [f"w3 w4 {query}" for query in wanted]), embed(folder, documents))
        for name, folder in (("dense", tmp_path / "model"), ("slim", slim))
    }

    def similarities(queries: str, index: str) -> list[list[float]]:
        return [cosine_similarity(query, of[index][1]).tolist() for query in of[queries][0]]

    grades = [[float(text in found) for text in documents] for found in wanted.values()]

    def rankings(scores: list[list[float]], dense: list[list[float]]) -> dict[str, float]:
        rows = [ranked(*map(np.array, of), 100) for of in zip(scores, dense, grades, strict=True)]
        return {name: mean([row[name] for row in rows]) for name in ("ndcg", "own_ndcg", "top1", "top10")}

    dense = similarities("dense", "dense")
    for index, part in (("slim", 1), ("dense", 0)):
        scores = similarities("slim", index)
        cosine = cosine_similarity(of["slim"][part], of["dense"][part]).mean().item()
        known = {"cosine": cosine} | rankings(scores, dense)
        told = raw["ranking"][f"{index}_index"]
        assert {name: told[name] for name in known} == near(known)
        assert told["cosine"] < 0.9999, "something was cut"
    assert report.quality.dense == near(rankings(dense, dense)["ndcg"])
    assert report.quality.slim == near(raw["ranking"]["dense_index"]["ndcg"])
    assert hies_export.load(slim).config.model_type == "bert"


def test_rows_to_time_are_queries_as_they_come(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "model", [])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    def varied(count: int, first: int = 0) -> list[Row]:
        return [row | {"query": row["query"] and words(i, 2 + i % 5)} for i, row in enumerate(searches(count, first))]

    _, delivery = load_recipe(project(tmp_path, varied, columns=SEARCH))
    assert delivery.in_order is not None
    batches = delivery.in_order(1)
    asked = [row["query"] for row in varied(14, 50) if row["query"]]
    assert [batch["input_ids"].tolist() for batch in batches] == [[ids] for ids in tokenizer(asked)["input_ids"]]


def test_a_form_to_deploy_that_is_no_export_of_the_run_is_moved_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence_folder(tmp_path / "model", encoder=encoder_in_8_bits())
    monkeypatch.setattr(choosing, "SIZES", 3)
    deploy_on(monkeypatch)
    monkeypatch.setattr(measuring, "fastest", lambda *_: (0, 0))
    prune = {"criterion": "his", "budget": {"heads": 0.4}, "modules": ["attention"], "compensation": None}
    recipe = project(tmp_path, (texts(40), texts(40, 50)), columns={"text": "text"}, prune=prune)
    hies_export.deploy(recipe, keep=0.3)
    report = Report.from_file(recipe.output)
    found = report.details.deployment
    assert report.heads.removed > 0
    assert found.file == "dense-onnx-float32/model.onnx"
    assert (recipe.output / found.file).is_file()
    served = json.loads((recipe.output / "served" / "hies_served.json").read_text())
    assert (served["file"], served["runtime"]) == ("model.onnx", "onnxruntime-cpu")


def test_a_run_leaves_graphs_where_the_tools_of_the_hub_look_for_them(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "model", encoder=encoder_in_8_bits())
    report = hies_export.run(project(tmp_path, texts, columns={"text": "text"}, export={"quantize": "int8"}))
    assert (report.quality.metric, report.quality.dense) == ("own_ndcg@10", near(1.0))
    assert report.quality.slim == near(report.ranking["dense_index"]["own_ndcg"])
    out, text = tmp_path / "out", words(3)
    named = ["model.onnx", "model_qint8_avx512_vnni.onnx", "model_quantized.onnx"]
    assert sorted(path.name for path in (out / "slim/onnx").iterdir()) == named
    expected = embed(out / "slim", [text])
    inputs = AutoTokenizer.from_pretrained(out / "slim")(text, return_tensors="pt")
    for file, close in [*((out / "slim/onnx" / name, name == named[0]) for name in named), (out / "served", False)]:
        graph = next(file.glob("*.onnx")) if file.is_dir() else file
        found = run_onnx(graph, inputs)["sentence_embedding"]
        cosine = cosine_similarity(torch.tensor(found).double(), expected).item()
        assert cosine == pytest.approx(1.0, abs=1e-5 if close else 0.02)
    assert (out / "served/modules.json").is_file()


def test_a_last_quarter_of_searches_has_whole_queries() -> None:
    rows: list[Row] = [{"query": None, "document": words(40 + number)} for number in range(8)]
    # Rows of a query do not follow each other, so that a last quarter by row has one of every query.
    rows += [{"query": words(query, 3), "document": words(4 * query + step)} for step in range(4) for query in range(8)]
    given = in_memory(bert_encoder(), word_tokenizer(WORDS, model_max_length=64))
    result = hies_export.prune(given, Dataset.from_list(rows), budget={"heads": 0.25})
    held_out = result.pruning.rows.held_out
    found = torch.cat([batch["relevant"][batch["query"] >= 0] for batch in held_out])
    assert (found >= 0).sum(1).tolist() == [4, 4]
    assert sum(int((batch["document"] >= 0).sum()) for batch in held_out) == 2 * 4 + 2
