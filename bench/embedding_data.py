"""Read the rows that embedding models and rerankers are judged on: BoolQ's questions and passages, STS-B's pairs."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Split:
    """Questions, distinct passages in alphabetical order, and the number of the right passage of every question."""

    queries: list[str]
    documents: list[str]
    right: list[int]


def boolq_halves(data: Path, seed: int) -> tuple[Split, Split]:
    """Return two random halves of BoolQ's validation rows; the second has no question on a passage of the first."""
    rows = read(data / "boolq" / "validation.jsonl.gz")
    random.Random(seed).shuffle(rows)
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    seen = {row["passage"] for row in first}
    return _split(first), _split([row for row in second if row["passage"] not in seen])


def stsb_pairs(data: Path) -> tuple[list[str], list[str], list[float]]:
    """Return both sentences of STS-B's test pairs, and their scores."""
    rows = read(data / "stsb" / "test.jsonl.gz")
    return [row["sentence1"] for row in rows], [row["sentence2"] for row in rows], [float(row["label"]) for row in rows]


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a gzipped file of JSON lines."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _split(rows: list[dict[str, Any]]) -> Split:
    documents = sorted({row["passage"] for row in rows})
    places = {document: place for place, document in enumerate(documents)}
    return Split([row["question"] for row in rows], documents, [places[row["passage"]] for row in rows])
