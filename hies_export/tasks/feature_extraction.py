"""An embedding for a text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..errors import DataError, quoted, refusing
from ..late import PreTrainedModel, Tensor, datasets, torch
from .labels import numbers_column
from .late import Batch, data
from .registry import register_task
from .task import Predictions, Task, Use, batched, random_projection

if TYPE_CHECKING:
    from ..model.text_encoder import TextReader

logger = logging.getLogger(__name__)

# Usual columns of queries, and of the documents that they should find.
_QUERIES, _DOCUMENTS = ("query", "question", "anchor"), ("document", "passage", "positive")
# Kinds of texts, which may have prompts of their own.
QUERY, DOCUMENT, TEXT = "query", "document", "text"


# Kind -> its texts, and the values of `TEXT_KEYS` that say how these belong together, (texts, ...) each.
_TextsByKind = dict[str, tuple[list[str], Batch]]


@register_task
class FeatureExtraction(Task):
    """Encoders of texts: a `TextEncoder` gives an embedding for each.

    Embeddings, (batch, dimension), are judged by what they rank. They need no labels. Every sample is scored several
    times, each time by another projection.

    Batches have `input_ids`, `attention_mask` and, if the model has segments, `token_type_ids`, (texts, longest of the
    batch). They hold every text of the samples once. To judge, batches say how texts belong together (`TEXT_KEYS`). All
    queries come before all documents, in batches of their own, and rows of the same query are one query. Texts alone
    need no description.

    Args:
        reader: Reads texts as the model's SentenceTransformer does, and says by what its embeddings are compared.
    """

    name = "feature-extraction"
    auto_class = "AutoModel"
    reads = ("text", "text label", "query document", "query document label")
    needs = "data.text (one column, or two and the label of their similarity), or data.query and data.document"
    text_columns = 2
    embeds = rows_together = True
    of_item = 1

    predicts = "embeddings"
    of_rows: ClassVar = {
        "queries": ("ndcg@10", "recall@10", "mrr@10"),
        "pairs": ("spearman", "pearson"),
        "texts": ("own_ndcg@10",),
    }
    metrics = of_rows["texts"]
    output_names = ("sentence_embedding",)
    repeats = 4

    def __init__(self, config: Any, *, reader: TextReader | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.reader = reader
        if reader is not None:
            self.similarity = reader.given.similarity_fn_name

    @classmethod
    def usual_columns(cls, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns of queries, documents and their grades, if a data set has them by their usual names."""
        query = next((name for name in _QUERIES if name in features), None)
        document = next((name for name in _DOCUMENTS if name in features), None)
        if query is None or document is None:
            return None
        return {"query": query, "document": document, "label": numbers_column(features)}

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse rows without text, pairs without a number, and queries that do not fit their documents."""
        if self.columns.query:
            self._check_queries(rows)
            return
        if self.columns.label:
            if len(self.columns.text) < 2:
                raise DataError(
                    "the label of texts to embed is the similarity of two, but data.text names one column; name two, "
                    "or leave data.label out"
                )
            data.read_numbers(rows, column=self.columns.label, what="the similarity of two texts")
        blank = [row for column in self.columns.text for row, text in enumerate(rows[column][:]) if not text.strip()]
        if len(blank) == len(rows) * len(self.columns.text):
            raise DataError(f"at least one row must have text, but all of {' and '.join(self.columns.text)} are blank")
        if blank and len(self.columns.text) > 1:
            raise DataError(
                f"every text of a pair must have text, but one of {data.row_name(rows, blank[0])} is blank; remove "
                "such rows"
            )
        if blank:
            logger.warning("%d of %d rows are blank in %r and left out", len(blank), len(rows), self.columns.text[0])

    def _check_queries(self, rows: datasets.Dataset) -> None:
        """Refuse data without queries, and rows without documents, or with labels that are not a number for each."""
        query, document = str(self.columns.query), str(self.columns.document)
        text_features = {query: rows.features[query], document: data.item_feature(rows.features[document])}
        for column, feature in text_features.items():
            if not data.holds_text(feature):
                needed, given = "a text or a list of texts" if column == document else "text", rows.features[column]
                raise DataError(f"the column {column!r} must hold {needed}, but it holds {data.kind_of(given)}")
        if not any((text or "").strip() for text in rows[query][:]):
            raise DataError(
                f"at least one row must have a query, but all of {query!r} are blank; name texts alone as data.text"
            )
        must = "every row must have a document with text"
        data.check_each(rows, document, data.has_text, must, "remove such rows")
        for row, (_, documents, grades) in enumerate(self._query_rows(rows)):
            if len(grades) != len(documents) or not all(map(data.is_number, grades)):
                label = str(self.columns.label)
                raise DataError(
                    f"a row must have a number in {label!r} for each of its documents, how much it is wanted, but "
                    f"{data.row_name(rows, row)} has {quoted(rows[label][row])} for {len(documents)}"
                )

    def _query_rows(self, rows: datasets.Dataset) -> Iterator[tuple[str, list[str], list[Any]]]:
        """Yield the query of each row, "" for none, its documents, and their grades, 1 without a label or a query."""
        label = self.columns.label
        queries, documents = rows[str(self.columns.query)][:], rows[str(self.columns.document)][:]
        labels = rows[label][:] if label else [None] * len(rows)
        for query, given, grades in zip(queries, documents, labels, strict=True):
            texts = [given] if isinstance(given, str) else given or []
            if not label or not (query or "").strip():
                grades = [1.0] * len(texts)
            yield query or "", texts, grades if isinstance(grades, list) else [grades]

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of the distinct texts, the shortest first; to be timed, in the order of the samples."""
        if use in ("judge", "time") and (self.columns.query or self.columns.label):
            kinds = self._queries_and_documents(samples) if self.columns.query else self._pairs(samples)
        else:
            kinds = self._distinct_texts(samples)
        found = []
        for kind, (texts, described) in kinds.items():
            for rows in batched(range(len(texts)), size):
                batch = self._encoded(kind, [texts[row] for row in rows])
                found.append(batch | {key: values[rows] for key, values in described.items()})
        yield from found if use == "time" else data.by_length(found, config=self.config)

    def _distinct_texts(self, samples: datasets.Dataset) -> _TextsByKind:
        """Return the distinct texts of each kind that are not blank, without a description."""
        if self.columns.query:
            rows = list(self._query_rows(samples))
            kinds = {QUERY: [query for query, _, _ in rows], DOCUMENT: [text for _, texts, _ in rows for text in texts]}
        else:
            columns = (samples[column][:] for column in self.columns.text)
            kinds = {TEXT: [text for row in zip(*columns, strict=True) for text in row]}
        return {kind: ([text for text in dict.fromkeys(texts) if text.strip()], {}) for kind, texts in kinds.items()}

    def _queries_and_documents(self, samples: datasets.Dataset) -> _TextsByKind:
        """Return the distinct queries and documents, described by which documents each query should find."""
        number_of: dict[str, int] = {}  # of each document
        grades_of: dict[str, dict[int, float]] = {}  # query -> number of a document -> its grade
        for query, documents, grades in self._query_rows(samples):
            for document, grade in zip(documents, map(float, grades), strict=True):
                number = number_of.setdefault(document, len(number_of))
                if query.strip():  # of several grades, the largest counts
                    known = grades_of.setdefault(query, {})
                    known[number] = max(grade, known.get(number, grade))
        relevant = {query: {d: g for d, g in graded.items() if g > 0} for query, graded in grades_of.items()}
        if unanswered := [query for query, graded in relevant.items() if not graded]:
            raise DataError(
                f"every query must have a relevant document to be judged by, one with a label above 0, but "
                f"{quoted(unanswered[0])} has none; remove its rows"
            )
        # The first rows of a file, which are timed, may have no query.
        most = max(map(len, relevant.values()), default=1)
        of_queries = _described(len(relevant), most, "query")
        of_documents = _described(len(number_of), most, "document")
        for row, graded in enumerate(relevant.values()):
            of_queries["relevant"][row, : len(graded)] = torch.tensor(list(graded))
            of_queries["grades"][row, : len(graded)] = torch.tensor(list(graded.values()))
        return {QUERY: (list(relevant), of_queries), DOCUMENT: (list(number_of), of_documents)}

    def _pairs(self, samples: datasets.Dataset) -> _TextsByKind:
        """Return the texts of all pairs, the two of a pair after each other, described by their similarity."""
        pairs = list(zip(*(samples[column][:] for column in self.columns.text), strict=True))
        scores = data.read_numbers(samples, column=str(self.columns.label), what="the similarity of two texts")
        described = {
            "pair": torch.arange(len(pairs)).repeat_interleave(2),
            "side": torch.tensor([0, 1]).repeat(len(pairs)),
            "score": torch.tensor(scores, dtype=torch.float32).repeat_interleave(2),
        }
        return {TEXT: ([text for pair in pairs for text in pair], described)}

    def _encoded(self, kind: str, texts: Sequence[str]) -> Batch:
        """Return the tokens of texts of a kind, as the reader gives them; it limits their number, too."""
        assert self.reader is not None
        limit = self.columns.max_length
        if limit is not None:
            limit = data.token_limit(self.reader.given.tokenizer, self.config, limit)
        with refusing("the tokenizer must read every text, but fails", "correct its files", DataError):
            batch = self.reader.read(kind, texts, limit)
        data.check_vocabulary(batch["input_ids"], self.config)
        return batch

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return the embeddings projected onto random signs, (batch,) float32."""
        return random_projection(output, number)

    def decide(self, predictions: Predictions) -> Tensor:
        """Return the embeddings."""
        return predictions.values

    def same(self, dense: Predictions, other: Predictions) -> NoReturn:
        """Refuse: embeddings are compared by what they rank."""
        raise DataError("embeddings are compared by what they rank; judge them with rows that can be ranked")


def _described(texts: int, most: int, kind: str) -> Batch:
    """Return values of `TEXT_KEYS` for queries or documents, with empty places for `most` relevant documents."""
    described = {"query": torch.full((texts,), -1), "document": torch.full((texts,), -1)}
    described[kind] = torch.arange(texts)
    return {**described, "relevant": torch.full((texts, most), -1), "grades": torch.zeros(texts, most)}
