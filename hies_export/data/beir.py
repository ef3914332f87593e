"""Read queries, documents and which of these each query should find, in the layout of BEIR's data sets.

A folder has `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`), both gzipped or not, and in
`qrels` a tsv file for each split, with a header and the columns query, document and score.

Source: https://github.com/beir-cellar/beir, "Load your custom dataset".
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from ..errors import DataError, listed
from ..progress import quiet

logger = logging.getLogger(__name__)

_FEATURES = datasets.Features(
    {
        "query": datasets.Value("string"),
        "document": datasets.List(datasets.Value("string")),
        "label": datasets.List(datasets.Value("float64")),
    }
)


def judgements_of(path: Path) -> Path | None:
    """Return the file of judgements that a path names, as such or by the folder of the data set; None if it does not.

    A folder stands for its split test, or the only one.
    """
    if path.is_file():
        beside = path.absolute().parent
        return path if beside.name == "qrels" and _beside(beside.parent, "corpus") else None
    if not _beside(path, "corpus") or not (path / "qrels").is_dir():
        return None
    found = {file.name.partition(".")[0]: file for file in sorted((path / "qrels").glob("*.tsv*"))}
    if "test" not in found and len(found) != 1:
        raise DataError(
            f"a folder of queries and documents must have qrels/test.tsv, or one such file of another name, but "
            f"{path} has {listed(found) or 'none'}; name the file of a split, such as {path / 'qrels' / 'dev.tsv'}"
        )
    return found.get("test") or next(iter(found.values()))


def read_judgements(file: Path, cache: str) -> datasets.Dataset:
    """Return a row for each query of a file of judgements, and one for each document that none of them names.

    The columns are `query`, `document`, a list of texts (title and text), and `label`, a list of scores. Rows without a
    query are evenly spread among the others, so that a slice of the rows has its share of both. Queries that should
    find nothing are left out. Documents are mapped from a file in the folder `cache`.

    Raises:
        DataError: A file is not as it should be.
    """
    judgements = _judgements(file)
    folder = file.absolute().parent.parent
    queries = {found["_id"]: found["text"] for found in _objects(folder, "queries") if found["_id"] in judgements}
    named = {document for query in queries for document in judgements[query]}
    texts: dict[str, str] = {}
    unnamed = 0
    for found in _objects(folder, "corpus"):
        if found["_id"] in named:
            texts[found["_id"]] = _text(found)
        else:
            unnamed += bool(_text(found))
    missing = len(judgements) - len(queries), sum(not texts.get(document) for document in named)
    if any(missing):
        logger.warning("%s names %d queries and %d documents that have no text: they are left out", file, *missing)
    answered: list[dict[str, Any]] = []
    written: set[str] = set()
    for query, text in queries.items():
        scores = {document: score for document, score in judgements[query].items() if texts.get(document)}
        if text.strip() and any(score > 0 for score in scores.values()):
            answered.append({"query": text, "document": [texts[d] for d in scores], "label": list(scores.values())})
            written.update(scores)
    if not answered:
        raise DataError(f"{file} must name queries that should find documents, of queries.jsonl and corpus.jsonl")
    unnamed += sum(bool(text) for document, text in texts.items() if document not in written)
    # `datasets` would take a list for shards, to be read one by one.
    of_both = {"folder": str(folder), "answered": tuple(answered), "written": written, "alone": unnamed}
    with quiet():
        rows = datasets.Dataset.from_generator(
            _rows, features=_FEATURES, cache_dir=cache, keep_in_memory=False, gen_kwargs=of_both
        )
    assert isinstance(rows, datasets.Dataset)
    return rows


def _rows(folder: str, answered: tuple[dict[str, Any], ...], written: set[str], alone: int) -> Iterator[dict[str, Any]]:
    """Yield the queries' rows, and spread among them those of `alone` documents that are not written with a query."""
    remaining = iter(answered)
    done = 0
    others = (
        text for found in _objects(Path(folder), "corpus") if found["_id"] not in written if (text := _text(found))
    )
    for number, text in enumerate(others):
        due = number * len(answered) // alone + 1
        yield from islice(remaining, due - done)
        yield {"query": None, "document": [text], "label": None}
        done = due
    yield from remaining


def _judgements(file: Path) -> dict[str, dict[str, float]]:
    """Return the score of each document that a query names."""
    found: dict[str, dict[str, float]] = {}
    with _opened(file) as lines:
        for number, line in enumerate(lines):
            parts = line.rstrip("\r\n").split("\t")
            if not number or not line.strip():
                continue
            try:
                query, document, score = parts
                found.setdefault(query, {})[document] = float(score)
            except ValueError:
                raise DataError(
                    f"a line of {file} must be a query, a document and a score, with tabs between them, but line "
                    f"{number + 1} has {len(parts)} parts: {line.strip()[:80]!r}"
                ) from None
    return found


def _objects(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a jsonl file, which have an id and a text."""
    file = _beside(folder, name)
    if file is None:
        raise DataError(
            f"{folder} must have queries.jsonl beside corpus.jsonl, gzipped or not, but has no {name}.jsonl"
        )
    with _opened(file) as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
                yield {"_id": str(found["_id"]), "title": found.get("title") or "", "text": str(found["text"] or "")}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(
                    f"a line of {file} must be an object with _id and text, but line {number + 1} is "
                    f"{line.strip()[:80]!r}"
                ) from None


def _text(document: dict[str, Any]) -> str:
    return f"{document['title']} {document['text']}".strip()


def _beside(folder: Path, name: str) -> Path | None:
    return next((file for end in ("", ".gz") if (file := folder / f"{name}.jsonl{end}").is_file()), None)


def _opened(file: Path) -> Any:
    return gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")
