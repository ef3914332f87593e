"""Rank the documents of queries by embeddings, or their candidates by a reranker, and judge the rankings.

A ranking is compared with the documents that are relevant, and with the dense model's own. Candidates of equal score
are ordered as badly as possible: the least relevant, or the least liked by the dense model, comes first. So a model
that gives everything one score earns nothing by the order of the rows, and the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..data.batches import GROUP_KEY, Batch, size_of
from ..errors import DataError
from ..model.text_encoder import Similarity

# What the rows of batches are to each other: queries and the documents that they should find; pairs of texts with the
# score of their similarity; texts alone, each of which is a query and a document of the others; or the candidates of
# queries for a reranker, with grades ("graded") or without ("groups").
RowsKind = Literal["queries", "pairs", "texts", "graded", "groups"]
# Rankings are judged by their first candidates.
TOP = 10
# The dense model's similarities are gains for as many of its first documents, and for none beyond.
DEPTH = 100
# How many similarities are held at once: 64 MB in float64, of which there are a few.
_AT_ONCE = 2**23


def kind_of_rows(batches: Sequence[Batch], *, embeds: bool = False) -> RowsKind | None:
    """Return what the rows of batches are to each other; None for a model that neither embeds nor reranks."""
    keys = batches[0].keys() if batches else ()
    if GROUP_KEY in keys:
        return "graded" if "grades" in keys else "groups"
    if not embeds:
        return None
    if "query" in keys:
        return "queries"
    return "pairs" if "pair" in keys else "texts"


@dataclass(frozen=True)
class Rankings:
    """How rankings agree with the relevant documents, and with the dense model's ranking; all fields are (queries,).

    Gains are linear and divided by log2(rank + 1), with ranks from 1, as in trec_eval. A query without relevant
    candidates has 0 in `ndcg`, `recall` and `mrr`.

    Source: Järvelin and Kekäläinen, ACM TOIS 20 (2002).
    """

    own_ndcg: Tensor  # float64, nDCG@10 with the dense model's scores as gains, scaled to [0, 1]
    top1: Tensor  # bool, whether the first candidate is the dense model's
    top10: Tensor  # float64, share of the dense model's first 10 that are among the first 10
    ndcg: Tensor | None = None  # float64, nDCG@10 with grades as gains; None, as below, if nothing relevant is known
    recall: Tensor | None = None  # float64, share of the relevant candidates that are among the first 10
    mrr: Tensor | None = None  # float64, 1 / rank of the first relevant candidate, 0 beyond rank 10
    cosine: Tensor | None = None  # float64, of a query's embedding to the dense model's; None for a reranker

    @property
    def known(self) -> dict[str, Tensor]:
        """The fields that are not None, by name."""
        return {name: values for name, values in vars(self).items() if values is not None}

    @property
    def means(self) -> dict[str, float]:
        """The means of the known fields over the queries, by name."""
        return {name: values.double().mean().item() for name, values in self.known.items()}

    @property
    def table(self) -> np.ndarray:
        """The known fields as a structured array, (queries,), of float64."""
        rows = np.empty(len(self.top1), dtype=[(name, np.float64) for name in self.known])
        for name, values in self.known.items():
            rows[name] = values.numpy()
        return rows


@dataclass(frozen=True)
class RankedTexts:
    """The dense model's embeddings of texts, some of which are queries and some the documents that they search.

    With `old_index`, documents and the second texts of pairs have the dense model's embeddings.
    """

    dense: Tensor  # (rows, dim) float32, of all rows
    queries: Tensor  # (queries,) int64, their rows
    documents: Tensor  # (documents,) int64, their rows
    # Each query's relevant documents, (queries, most): int64 positions in `documents`, -1 fills, and float32 grades.
    grades: tuple[Tensor, Tensor] | None = None
    self_search: bool = False  # whether every row is both a query and a document, which is no candidate of its own
    # Of pairs of texts with a labelled similarity: the rows of both, (2, pairs) int64, and the label, (pairs,) float32.
    pairs: tuple[Tensor, Tensor] | None = None
    only_queries: bool = False  # whether predictions are of the rows of queries alone, in their order
    similarity: Similarity = "cosine"  # by which embeddings are compared

    @classmethod
    def of(cls, dense: Tensor, batches: Sequence[Batch], similarity: Similarity = "cosine") -> RankedTexts:
        """Return what the dense model ranks in batches, given its embeddings of their rows, (rows, dim).

        A DataError refuses rows that cannot be ranked, such as queries without documents.
        """
        kind = kind_of_rows(batches, embeds=True)
        if kind == "queries":
            texts = cls._of_queries(dense, batches)
        elif kind == "pairs":
            texts = cls._of_pairs(dense, batches)
        else:
            rows = torch.arange(sum(map(size_of, batches)))
            if len(rows) < 2:
                raise DataError("texts are ranked among each other, which needs at least two, got 1")
            texts = cls(dense, rows, rows, self_search=True)
        return replace(texts, similarity=similarity)

    @classmethod
    def _of_queries(cls, dense: Tensor, batches: Sequence[Batch]) -> RankedTexts:
        """Return queries and documents, with the position of each relevant document, which batches name by number."""
        # In `query` and `document`, a row has its number, or -1 if it is of the other kind; -1 fills `relevant`.
        relevant, grades = _joined(batches, "relevant"), _joined(batches, "grades")
        document = _joined(batches, "document")
        queries = (_joined(batches, "query") >= 0).nonzero().flatten()
        documents = (document >= 0).nonzero().flatten()
        if not len(queries) or not len(documents):
            raise DataError(
                f"a search needs queries and documents, got {len(queries)} and {len(documents)}; check data.query and "
                "data.document"
            )
        numbers, order = document[documents].sort()
        wanted = relevant[queries]
        positions = torch.searchsorted(numbers, wanted.clamp(min=0)).clamp(max=len(numbers) - 1)
        missing = wanted[(wanted >= 0) & (numbers[positions] != wanted)]
        if len(missing):
            raise DataError(f"every relevant document must be a row, but document {missing[0]} is none")
        positions = positions.where(wanted >= 0, -1)
        return cls(dense, queries, documents[order], (positions, grades[queries].float()))

    @classmethod
    def _of_pairs(cls, dense: Tensor, batches: Sequence[Batch]) -> RankedTexts:
        """Return pairs of texts, `side` 0 and 1 of each `pair`: the first ones search the distinct second ones."""
        pair, side, score = (_joined(batches, key) for key in ("pair", "side", "score"))
        first, second = ((side == number).nonzero().flatten() for number in (0, 1))
        first, second = first[pair[first].argsort()], second[pair[second].argsort()]  # both in the order of the pairs
        if not torch.equal(pair[first], pair[second]):
            raise DataError("every pair of texts must have one row of side 0 and one of side 1")
        texts = [
            tuple(ids[mask != 0].tolist())
            for batch in batches
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        # Of equal second texts, the first row stands for all: in reverse order it overwrites the later ones.
        row_of_text = {texts[row]: row for row in reversed(second.tolist())}
        documents = torch.tensor(sorted(row_of_text.values()))
        return cls(dense, first, documents, pairs=(torch.stack([first, second]), score[first].float()))

    def rankings(self, predictions: Tensor, *, old_index: bool = True) -> Rankings:
        """Rank the documents for each query by embeddings, (rows, dim), and compare with the dense model's rankings."""
        from sentence_transformers import SimilarityFunction

        assert old_index or not self.only_queries
        similar = SimilarityFunction.to_similarity_fn(self.similarity)
        # In float64, as distances of near texts are rounding errors of matrix products otherwise.
        queries = (predictions if self.only_queries else predictions[self.queries]).double()
        documents = (self.dense if old_index else predictions)[self.documents].double()
        dense_queries, dense_documents = self.dense[self.queries].double(), self.dense[self.documents].double()
        cosine = cosine_similarity(queries, dense_queries)
        chunk_size = max(1, _AT_ONCE // len(self.documents))
        chunks = []
        for start in range(0, len(self.queries), chunk_size):
            rows = slice(start, start + chunk_size)
            scores = similar(queries[rows], documents)  # (chunk, documents)
            dense_scores = similar(dense_queries[rows], dense_documents)
            if self.self_search:
                query = torch.arange(len(scores))
                scores[query, start + query] = dense_scores[query, start + query] = -torch.inf
            chunks.append(_compared(scores, dense_scores, self._grades(rows), DEPTH))
        fields = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        return Rankings(**fields, cosine=cosine)

    def _grades(self, rows: slice) -> Tensor | None:
        """Return the grades of all documents for some queries, (chunk, documents); None if there are no grades."""
        if self.grades is None:
            return None
        positions, grades = self.grades[0][rows], self.grades[1][rows]
        # Fills go to a last column, which is cut off.
        table = grades.new_zeros(len(grades), len(self.documents) + 1)
        table.scatter_(1, positions.where(positions >= 0, len(self.documents)), grades)
        return table[:, :-1]

    def similarities(self, predictions: Tensor, *, old_index: bool = False) -> tuple[Tensor, Tensor]:
        """Return the predicted and the labelled similarity of the two texts of every pair, (pairs,) float64 each."""
        from sentence_transformers import SimilarityFunction

        assert self.pairs is not None
        (first, second), labels = self.pairs
        documents = self.dense if old_index else predictions
        similarity = SimilarityFunction.to_similarity_pairwise_fn(self.similarity)
        return similarity(predictions[first].double(), documents[second].double()), labels.double()

    def by_index(self, predictions: Tensor) -> dict[str, dict[str, float]]:
        """Return `Rankings.means` on the dense model's index and, if all rows are predicted, on the model's own."""
        by_index = {}
        if not self.only_queries:
            by_index["slim_index"] = self.rankings(predictions, old_index=False).means
            documents, dense_documents = predictions[self.documents].double(), self.dense[self.documents].double()
            # On its own index, `cosine` is of the documents, not of the queries.
            by_index["slim_index"]["cosine"] = cosine_similarity(documents, dense_documents).mean().item()
        by_index["dense_index"] = self.rankings(predictions).means
        return by_index


@dataclass(frozen=True)
class RankedGroups:
    """The dense reranker's logits of each query's candidates, in a table with a row per query."""

    dense: Tensor  # (queries, most) float32, logits; -inf fills rows of queries with fewer than most candidates
    places: tuple[Tensor, Tensor]  # row and column in that table of each row of the batches, (rows,) int64 each
    grades: Tensor | None = None  # (queries, most) float32, 0 fills

    @classmethod
    def of(cls, dense: Tensor, batches: Sequence[Batch]) -> RankedGroups:
        """Return what the dense model ranks in batches, given its logits of their rows, (rows, 1)."""
        _, query = _joined(batches, GROUP_KEY).unique(return_inverse=True)
        sizes = query.bincount()
        starts = sizes.cumsum(0) - sizes
        # A row's column is its number among the rows of its query.
        column = torch.empty_like(query)
        column[query.argsort(stable=True)] = torch.arange(len(query)) - starts.repeat_interleave(sizes)
        shape, places = (len(sizes), int(sizes.max())), (query, column)
        grades = _table(_joined(batches, "grades"), places, shape, fill=0.0) if "grades" in batches[0] else None
        return cls(_table(dense, places, shape), places, grades)

    def rankings(self, predictions: Tensor, *, old_index: bool = True) -> Rankings:
        """Rank each query's candidates by logits, (rows, 1), and compare with the dense rankings; there is no index."""
        return Rankings(**_compared(_table(predictions, self.places, self.dense.shape), self.dense, self.grades))

    def by_index(self, predictions: Tensor) -> dict[str, dict[str, float]]:
        """Return `Rankings.means` under the name "candidates", because a reranker has no index."""
        return {"candidates": self.rankings(predictions).means}


# The dense model's rankings, which those of other models are compared with, in the order of the queries' rows.
Ranked = RankedTexts | RankedGroups


def _joined(batches: Sequence[Batch], key: str) -> Tensor:
    """Return a tensor of all batches, concatenated on the CPU."""
    return torch.cat([batch[key] for batch in batches]).cpu()


def _table(values: Tensor, places: tuple[Tensor, Tensor], shape: tuple[int, ...], fill: float = -torch.inf) -> Tensor:
    """Return values of rows, (rows, 1) or (rows,), in a table (queries, most) float32; see `RankedGroups`."""
    table = torch.full(shape, fill)
    table[places] = values.detach().float().flatten()
    return table


def _compared(scores: Tensor, dense: Tensor, grades: Tensor | None, depth: int | None = None) -> dict[str, Tensor]:
    """Return the fields of `Rankings` but `cosine`, given a model's `scores` and the dense model's.

    Both are (queries, candidates), as are the grades; -inf means no candidate. The gains of `own_ndcg` are the dense
    model's scores of its first `depth` candidates, by default of all, scaled to [0, 1].
    """
    count = (dense > -torch.inf).count_nonzero(1)[:, None]
    best = dense.topk(min(depth or dense.shape[1], dense.shape[1])).values
    # The dense scores at the first rank, at the last that earns a gain, and at rank 10, or at the last candidate.
    high, low, tenth = (best.gather(1, count.clamp(max=rank) - 1) for rank in (1, best.shape[1], TOP))
    first = _worth_of_first(scores, dense)

    def gain(kept: Tensor) -> Tensor:
        scaled = ((kept - low) / (high - low)).where(high > low, 1.0).clamp(0, 1)  # 1 for all if all scores are equal
        return scaled.where(kept.isfinite(), 0.0)

    fields = {
        "own_ndcg": _dcg(gain(first)) / _dcg(gain(best)),
        "top1": first[:, 0] == high[:, 0],
        "top10": (first >= tenth).where(first.isfinite(), False).sum(1) / count[:, 0].clamp(max=TOP).double(),
    }
    if grades is None:
        return fields
    gains = _worth_of_first(scores, grades)
    ideal = _dcg(grades.topk(min(TOP, grades.shape[1])).values)
    relevant, rank = gains > 0, torch.arange(1, gains.shape[1] + 1, dtype=torch.float64)
    return fields | {
        "ndcg": (_dcg(gains) / ideal).where(ideal > 0, 0.0),
        "recall": relevant.sum(1) / (grades > 0).count_nonzero(1).clamp(min=1).double(),
        "mrr": (relevant / rank).amax(1),
    }


def _worth_of_first(scores: Tensor, worth: Tensor) -> Tensor:
    """Return the worth of the 10 candidates with the largest scores, in their order, (queries, at most 10).

    `scores` and `worth` are (queries, candidates). Candidates of equal score are ordered by rising worth.
    """
    most = min(TOP, scores.shape[1])
    values, places = scores.topk(min(most + 1, scores.shape[1]))
    last = values[:, most - 1 : most]
    if bool((values[:, most:] == last).any()):
        # Candidates tie for the last place: take all of them, so that the order below decides.
        places = scores.topk(int((scores >= last).count_nonzero(1).max())).indices
    scores, worth = scores.gather(1, places), worth.gather(1, places)
    # The second sort is stable, so that candidates of equal score stay ordered by worth.
    by_worth = worth.argsort(dim=1, stable=True)
    scores, worth = scores.gather(1, by_worth), worth.gather(1, by_worth)
    by_score = scores.argsort(dim=1, descending=True, stable=True)
    return worth.gather(1, by_score)[:, :most]


def _dcg(gains: Tensor) -> Tensor:
    """Return the discounted cumulative gain of the first 10, (queries,) float64."""
    gains = gains[:, :TOP].double().clamp(min=0)
    return (gains / torch.arange(2, gains.shape[1] + 2).double().log2()).sum(1)
