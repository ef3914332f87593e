"""Read texts to embed: texts alone, pairs with their similarity, or queries with the documents they should find."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import datasets
import torch

from ..errors import DataError, quoted
from .batches import Batch, by_length
from .columns import STRINGS, is_number, kind_of, read_numbers
from .processors import encoded, read_as_asked
from .reader import Reader, batched
from .rows import row_name

logger = logging.getLogger(__name__)

# Kinds of texts, which may have prompts of their own.
QUERY, DOCUMENT, TEXT = "query", "document", "text"


@dataclass(frozen=True)
class EmbeddingReader(Reader):
    """Reads texts to embed.

    Batches have `input_ids`, `attention_mask` and, if the model has segments, `token_type_ids`, (texts, longest of the
    batch). They hold every text of the samples once.

    When `judging`, batches say how texts belong together (`TEXT_KEYS`). All queries come before all documents, in
    batches of their own, and rows of the same query are one query. Texts alone need no description.

    Attributes:
        prompts: What is written before a text, by its kind: "query", "document", or "text" for any other.
        lower, lengths, special_tokens, tokenizer: As in `SentenceSettings`.
        judged: Whether batches describe their rows.
        sorts: Whether the shortest texts come first, and not those of the first rows.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    lower: bool = False
    lengths: Mapping[str, int] = field(default_factory=dict)
    special_tokens: bool = True
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    judged: bool = False
    sorts: bool = True

    def __post_init__(self) -> None:
        """Let the processor, which is the reader's own, read as the settings ask."""
        if self.tokenizer or self.lower:
            read_as_asked(self.processor, self.tokenizer, lower=self.lower)

    def judging(self) -> EmbeddingReader:
        """Return the reader of the same samples whose batches say how texts belong together."""
        return replace(self, judged=True)

    def as_they_come(self) -> EmbeddingReader:
        """Return the reader of the same samples whose batches describe their rows, and are not sorted by length."""
        return replace(self, judged=True, sorts=False)

    @property
    def scored_pairs(self) -> bool:
        """Whether texts come in pairs with a known similarity."""
        return len(self.columns.text) > 1 and self.columns.label is not None

    def _check_targets(self, rows: datasets.Dataset) -> None:
        if self.columns.query:
            _check_queries(rows, *self._of_queries)
            return
        if self.columns.label:
            if not self.scored_pairs:
                raise DataError(
                    "the label of texts to embed is the similarity of two, but data.text names one column; name two, "
                    "or leave data.label out"
                )
            read_numbers(rows, column=self.columns.label, what="the similarity of two texts")
        blank = [row for column in self.columns.text for row, text in enumerate(rows[column][:]) if not text.strip()]
        if len(blank) == len(rows) * len(self.columns.text):
            raise DataError(f"at least one row must have text, but all of {' and '.join(self.columns.text)} are blank")
        if blank and len(self.columns.text) > 1:
            raise DataError(
                f"every text of a pair must have text, but one of {row_name(rows, blank[0])} is blank; remove such rows"
            )
        if blank:
            logger.warning("%d of %d rows are blank in %r and left out", len(blank), len(rows), self.columns.text[0])

    @property
    def _of_queries(self) -> tuple[str, str, str | None]:
        """The columns of queries, documents and labels."""
        return str(self.columns.query), str(self.columns.document), self.columns.label

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        if self.judged and (self.columns.query or self.scored_pairs):
            texts = self._queries(samples) if self.columns.query else self._pairs(samples)
            found = self._of_kinds(texts, batch_size)
        else:
            found = self._texts(samples, batch_size)
        yield from by_length(list(found), config=self.config) if self.sorts else found

    def _texts(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        """Batches of the distinct texts of each kind."""
        texts = [item for item in dict.fromkeys(self._each(samples)) if item[1].strip()]
        for kind in (QUERY, DOCUMENT, TEXT):
            of_kind = [text for each, text in texts if each == kind]
            yield from (self._encoded(kind, part) for part in batched(of_kind, batch_size))

    def _each(self, samples: datasets.Dataset) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of all texts."""
        if self.columns.query:
            for query, documents, _ in _answers(samples, *self._of_queries):
                yield QUERY, query
                yield from ((DOCUMENT, document) for document in documents)
        else:
            columns = (samples[column][:] for column in self.columns.text)
            yield from ((TEXT, text) for row in zip(*columns, strict=True) for text in row)

    def _queries(self, samples: datasets.Dataset) -> dict[str, tuple[list[str], Batch]]:
        """Return the queries and the documents, each with its description."""
        documents: dict[str, int] = {}
        wanted: dict[str, dict[int, float]] = {}
        for query, texts, grades in _answers(samples, *self._of_queries):
            numbers = [documents.setdefault(text, len(documents)) for text in texts]
            if query.strip():
                found = wanted.setdefault(query, {})
                for number, grade in zip(numbers, grades, strict=True):
                    found[number] = max(grade, found.get(number, grade))
        relevant = {query: {d: g for d, g in found.items() if g > 0} for query, found in wanted.items()}
        if nothing := next((query for query, found in relevant.items() if not found), None):
            raise DataError(
                f"every query must have a relevant document to be judged by, one with a label above 0, but "
                f"{quoted(nothing)} has none; remove its rows"
            )
        # The first rows of a file, which are timed, may have no query.
        most = max(map(len, relevant.values()), default=1)
        of_queries = _described(len(relevant), most, "query")
        of_documents = _described(len(documents), most, "document")
        for row, found in enumerate(relevant.values()):
            of_queries["relevant"][row, : len(found)] = torch.tensor(list(found))
            of_queries["grades"][row, : len(found)] = torch.tensor(list(found.values()))
        return {QUERY: (list(relevant), of_queries), DOCUMENT: (list(documents), of_documents)}

    def _pairs(self, samples: datasets.Dataset) -> dict[str, tuple[list[str], Batch]]:
        """Return the texts of all pairs, the two of a pair after each other, with their description."""
        pairs = list(zip(*(samples[column][:] for column in self.columns.text), strict=True))
        scores = read_numbers(samples, column=str(self.columns.label), what="the similarity of two texts")
        described = {
            "pair": torch.arange(len(pairs)).repeat_interleave(2),
            "side": torch.tensor([0, 1]).repeat(len(pairs)),
            "score": torch.tensor(scores, dtype=torch.float32).repeat_interleave(2),
        }
        return {TEXT: ([text for pair in pairs for text in pair], described)}

    def _of_kinds(self, texts: Mapping[str, tuple[list[str], Batch]], batch_size: int) -> Iterator[Batch]:
        for kind, (of_kind, described) in texts.items():
            for part in batched(range(len(of_kind)), batch_size):
                batch = self._encoded(kind, [of_kind[row] for row in part])
                yield batch | {key: value[part] for key, value in described.items()}

    def _encoded(self, kind: str, texts: Sequence[str]) -> Batch:
        prompted = [self.prompts.get(kind, "") + text for text in texts]
        length, special = self.lengths.get(kind, self.max_length), self.special_tokens
        return encoded(self.processor, self.config, prompted, max_length=length, add_special_tokens=special)


def _described(texts: int, most: int, kind: str) -> Batch:
    """Return the description of texts of a kind, none of which has relevant documents yet."""
    none = torch.full((texts,), -1)
    described = {QUERY: none, DOCUMENT: none.clone(), "relevant": none[:, None].repeat(1, most)}
    return described | {kind: torch.arange(texts), "grades": torch.zeros(texts, most)}


def _answers(
    rows: datasets.Dataset, query: str, document: str, label: str | None
) -> Iterator[tuple[str, list[str], list[float]]]:
    """Yield the query of each row, "" for none, its documents, and how much each is wanted: 1 without a label."""
    labels = rows[label][:] if label else [None] * len(rows)
    for asked, found, grades in zip(rows[query][:], rows[document][:], labels, strict=True):
        documents = [found] if isinstance(found, str) else found or []
        if label is None or not (asked or "").strip():
            grades = [1.0] * len(documents)
        yield asked or "", documents, list(map(float, grades)) if isinstance(grades, list) else [float(grades)]


def _check_queries(rows: datasets.Dataset, query: str, document: str, label: str | None) -> None:
    """Refuse rows whose queries, documents or labels do not belong together."""
    feature = rows.features[document]
    if getattr(rows.features[query], "dtype", None) not in STRINGS:
        raise DataError(f"the column {query!r} must hold text, but it holds {kind_of(rows.features[query])}")
    if getattr(getattr(feature, "feature", feature), "dtype", None) not in STRINGS:
        raise DataError(f"the column {document!r} must hold a text or a list of texts, but it holds {kind_of(feature)}")
    queries = [(text or "").strip() for text in rows[query][:]]
    if not any(queries):
        raise DataError(
            f"at least one row must have a query, but all of {query!r} are blank; name texts alone as data.text"
        )
    labels = rows[label][:] if label else [None] * len(rows)
    for row, (asked, found, given) in enumerate(zip(queries, rows[document][:], labels, strict=True)):
        documents: Sequence[Any] = [found] if isinstance(found, str) else found or []
        if not documents or not all(text and text.strip() for text in documents):
            what = "an empty one" if documents else "none"
            raise DataError(
                f"every row must have a document with text in {document!r}, but {row_name(rows, row)} has {what}; "
                "remove such rows"
            )
        grades = given if isinstance(given, list) else [given]
        if label and asked and (len(grades) != len(documents) or not all(map(is_number, grades))):
            raise DataError(
                f"a row must have a number in {label!r} for each of its documents, how much it is wanted, but "
                f"{row_name(rows, row)} has {quoted(given)} for {len(documents)}"
            )
