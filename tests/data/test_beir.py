"""Queries and documents in BEIR's layout, against a naive reading of the files."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest

from hies_export.data.rows import load_rows, taken_from
from hies_export.errors import DataError


def write(folder: Path, *, ending: str = "", splits: tuple[str, ...] = ("train", "test"), **other: str) -> Path:
    """Write 30 documents, of which the 8 queries of a split name some, and return the folder."""
    chance = random.Random(3)
    opened: Any = gzip.open if ending else open
    corpus = [{"_id": f"d{n}", "title": f"title {n}" if n % 2 else "", "text": f"text {n}"} for n in range(30)]
    queries = [{"_id": f"q{n}", "text": f"question {n}"} for n in range(16)]
    (folder / "qrels").mkdir(parents=True)
    for name, objects in (("corpus", corpus), ("queries", queries)):
        with opened(folder / f"{name}.jsonl{ending}", "wt") as file:
            file.write(other.get(name) or "".join(json.dumps(found) + "\n" for found in objects))
    for number, split in enumerate(splits):
        lines = ["query-id\tcorpus-id\tscore"]
        for query in range(8 * number, 8 * number + 8):
            lines += [f"q{query}\td{n}\t{1 + n % 2}" for n in chance.sample(range(20), 1 + query % 3)]
        with (folder / "qrels" / f"{split}.tsv").open("w") as file:
            file.write(other.get(split) or "\n".join(lines) + "\n")
    return folder


def naive(folder: Path, split: str) -> tuple[dict[str, dict[str, float]], set[str]]:
    """Return the scores of each query's documents, and all documents."""
    texts = {}
    for line in (folder / "corpus.jsonl").read_text().splitlines():
        found = json.loads(line)
        texts[found["_id"]] = f"{found['title']} {found['text']}" if found["title"] else found["text"]
    queries = {q["_id"]: q["text"] for q in map(json.loads, (folder / "queries.jsonl").read_text().splitlines())}
    wanted: dict[str, dict[str, float]] = {}
    for line in (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]:
        query, document, score = line.split("\t")
        wanted.setdefault(queries[query], {})[texts[document]] = float(score)
    return wanted, set(texts.values())


def load(path: Path, **options: Any) -> datasets.Dataset:
    return load_rows(files={"train": path}, split="train", **options)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_is_its_queries_and_all_documents(tmp_path: Path, split: str) -> None:
    folder = write(tmp_path / "data")
    rows = load(folder / "qrels" / f"{split}.tsv")
    wanted, corpus = naive(folder, split)
    read = {row["query"]: dict(zip(row["document"], row["label"], strict=True)) for row in rows if row["query"]}
    assert read == wanted
    alone = [row["document"] for row in rows if row["query"] is None]
    assert all(len(documents) == 1 for documents in alone)
    named = {document for scores in wanted.values() for document in scores}
    assert sorted(documents[0] for documents in alone) == sorted(corpus - named)
    assert all(row["label"] is None for row in rows if row["query"] is None)
    # Each half of the rows has its share of the queries.
    halves = [sum(query is not None for query in rows["query"][: len(rows) // 2]), len(read)]
    assert halves[0] in (3, 4, 5)


def test_gzipped_files_are_the_same_rows(tmp_path: Path) -> None:
    plain, packed = write(tmp_path / "plain"), write(tmp_path / "packed", ending=".gz")
    assert load(plain)[:] == load(packed)[:]


def test_a_folder_stands_for_its_test_split_or_the_only_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "two")
    assert load(folder)[:] == load(folder / "qrels" / "test.tsv")[:]
    only = write(tmp_path / "one", splits=("dev",))
    assert load(only)[:] == load(only / "qrels" / "dev.tsv")[:]
    with pytest.raises(DataError, match=r"must have qrels/test.tsv, or one such file .* has dev, train; name the file"):
        load(write(tmp_path / "other", splits=("train", "dev")))


def test_of_a_few_rows_those_with_a_query_come_first(tmp_path: Path) -> None:
    rows = load(write(tmp_path / "data"), samples=9, shuffle_seed=0, together="query")
    assert [query is not None for query in rows["query"]] == [True] * 8 + [False]
    assert taken_from(rows) > 9


def test_a_table_beside_no_corpus_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("a\tb\n1\t2\n")
    assert load(tmp_path / "qrels" / "test.tsv").column_names == ["a", "b"]


def test_what_has_no_text_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    judged = "query-id\tcorpus-id\tscore\nq0\td1\t1\nq0\tnone\t1\nqnone\td1\t1\nq1\td2\t0\n"
    rows = load(write(tmp_path / "data", test=judged))
    assert [row["document"] for row in rows if row["query"]] == [["title 1 text 1"]]
    # What a query should not find is in the corpus nevertheless.
    assert sum(len(documents) for documents in rows["document"]) == 30
    assert "names 1 queries and 1 documents that have no text: they are left out" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("test", "query-id\tcorpus-id\tscore\nq0 d1 1\n", "a query, a document and a score, .* line 2 has 1 parts"),
        ("test", "query-id\tcorpus-id\tscore\nq0\td1\thigh\n", "a query, a document and a score, .* line 2 has 3"),
        ("test", "query-id\tcorpus-id\tscore\nother\td1\t1\n", "must name queries that should find documents"),
        ("corpus", '{"id": "d1"}\n', "must be an object with _id and text, but line 1 is"),
        ("queries", "no object\n", "must be an object with _id and text, but line 1 is 'no object'"),
    ],
)
def test_files_that_are_not_as_they_should_be(tmp_path: Path, name: str, content: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        load(write(tmp_path / "data", **{name: content}))
    write(tmp_path / "less")
    (tmp_path / "less" / "queries.jsonl").unlink()
    with pytest.raises(DataError, match=r"must have queries.jsonl beside corpus.jsonl, .* has no queries.jsonl"):
        load(tmp_path / "less")
