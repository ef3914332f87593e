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
        query, document = (next((name for name in of if name in features), None) for of in (_QUERIES, _DOCUMENTS))
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
        """Refuse rows without documents, or without a number for each of them if there are labels; or no query."""
        query, document = str(self.columns.query), str(self.columns.document)
        inner = {query: rows.features[query], document: data.item_feature(rows.features[document])}
        for column, feature in inner.items():
            if not data.holds_text(feature):
                what, given = "a text or a list of texts" if column == document else "text", rows.features[column]
                raise DataError(f"the column {column!r} must hold {what}, but it holds {data.kind_of(given)}")
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
        """Yield each row's query, "" for none, its documents, and how much each is wanted: 1 without label or query."""
        columns = self.columns
        labels = rows[columns.label][:] if columns.label else [1.0] * len(rows)
        read = (rows[str(columns.query)][:], rows[str(columns.document)][:], labels)
        for query, given, grades in zip(*read, strict=True):
            documents = [given] if isinstance(given, str) else given or []
            if columns.label is None or not (query or "").strip():
                grades = [1.0] * len(documents)
            yield query or "", documents, grades if isinstance(grades, list) else [grades]

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of the distinct texts, the shortest first; to be timed, in the order of the samples."""
        if use in ("judge", "time") and (self.columns.query or self.columns.label):
            kinds = self._queries(samples) if self.columns.query else self._pairs(samples)
        else:
            kinds = self._texts(samples)
        found = [
            self._encoded(kind, [texts[row] for row in part]) | {key: value[part] for key, value in described.items()}
            for kind, (texts, described) in kinds.items()
            for part in batched(range(len(texts)), size)
        ]
        yield from found if use == "time" else data.by_length(found, config=self.config)

    def _texts(self, samples: datasets.Dataset) -> dict[str, tuple[list[str], Batch]]:
        """Return the distinct texts of each kind that are not blank, without a description."""
        if self.columns.query:
            found = list(self._query_rows(samples))
            kinds = {QUERY: [row[0] for row in found], DOCUMENT: [text for row in found for text in row[1]]}
        else:
            columns = (samples[column][:] for column in self.columns.text)
            kinds = {TEXT: [text for row in zip(*columns, strict=True) for text in row]}
        return {kind: ([text for text in dict.fromkeys(texts) if text.strip()], {}) for kind, texts in kinds.items()}

    def _queries(self, samples: datasets.Dataset) -> dict[str, tuple[list[str], Batch]]:
        """Return the distinct queries and the distinct documents, each with their description by `TEXT_KEYS`."""
        documents: dict[str, int] = {}
        wanted: dict[str, dict[int, float]] = {}
        for query, texts, grades in self._query_rows(samples):
            numbers = [documents.setdefault(text, len(documents)) for text in texts]
            if query.strip():
                found = wanted.setdefault(query, {})
                for number, grade in zip(numbers, map(float, grades), strict=True):
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
        """Return the texts of all pairs, the two of a pair after each other, with their description by `TEXT_KEYS`."""
        pairs = list(zip(*(samples[column][:] for column in self.columns.text), strict=True))
        scores = data.read_numbers(samples, column=str(self.columns.label), what="the similarity of two texts")
        described = {
            "pair": torch.arange(len(pairs)).repeat_interleave(2),
            "side": torch.tensor([0, 1]).repeat(len(pairs)),
            "score": torch.tensor(scores, dtype=torch.float32).repeat_interleave(2),
        }
        return {TEXT: ([text for pair in pairs for text in pair], described)}

    def _encoded(self, kind: str, texts: Sequence[str]) -> Batch:
        assert self.reader is not None
        asked = self.columns.max_length
        limit = None if asked is None else data.token_limit(self.reader.given.tokenizer, self.config, asked)
        with refusing("the tokenizer must read every text, but fails", "correct its files", DataError):
            found = self.reader.read(kind, texts, limit)
        data.check_vocabulary(found["input_ids"], self.config)
        return found

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
    """Return the description of texts of a kind, none of which has relevant documents yet."""
    none = torch.full((texts,), -1)
    described = {QUERY: none, DOCUMENT: none.clone(), "relevant": none[:, None].repeat(1, most)}
    return described | {kind: torch.arange(texts), "grades": torch.zeros(texts, most)}
