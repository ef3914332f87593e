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
from torch.nn.functional import cosine_similarity, normalize

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
# How many similarities are held at once: 64 MB in float32, of which there are a few.
_AT_ONCE = 2**24


def kind_of_rows(batches: Sequence[Batch], *, embeds: bool = False) -> RowsKind | None:
    """Return what the rows of batches are to each other; None for a model that neither embeds nor reranks."""
    keys = batches[0].keys() if batches else ()
    if GROUP_KEY in keys:
        return "graded" if "grades" in keys else "groups"
    if not embeds:
        return None
    return "queries" if "query" in keys else "pairs" if "pair" in keys else "texts"


@dataclass(frozen=True)
class Rankings:
    """How rankings compare with what is relevant, and with the dense model's; a number for each query, (queries,).

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
    """The dense model's embeddings of texts, some of which are queries and some the documents that they search."""

    dense: Tensor  # (rows, dim) float32, of all rows
    queries: Tensor  # (queries,) int64, their rows
    documents: Tensor  # (documents,) int64, their rows
    grades: tuple[Tensor, Tensor] | None = None  # (queries, most), int64 places among `documents`, -1 fills; float32
    itself: bool = False  # whether every row is both a query and a document, which is no candidate of its own
    # Of the pairs of texts whose similarity is known: their rows, (2, pairs) int64, and it, (pairs,) float32.
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
            found = cls._of_queries(dense, batches)
        elif kind == "pairs":
            found = cls._of_pairs(dense, batches)
        else:
            rows = torch.arange(sum(map(size_of, batches)))
            if len(rows) < 2:
                raise DataError("texts are ranked among each other, which needs at least two, got 1")
            found = cls(dense, rows, rows, itself=True)
        return replace(found, similarity=similarity)

    @classmethod
    def _of_queries(cls, dense: Tensor, batches: Sequence[Batch]) -> RankedTexts:
        keys = ("query", "document", "relevant", "grades")
        query, document, relevant, grades = (_joined(batches, key) for key in keys)
        queries, documents = ((numbers >= 0).nonzero().flatten() for numbers in (query, document))
        if not len(queries) or not len(documents):
            raise DataError(
                f"a search needs queries and documents, got {len(queries)} and {len(documents)}; check data.query and "
                "data.document"
            )
        numbers, order = document[documents].sort()
        wanted = relevant[queries]
        places = torch.searchsorted(numbers, wanted.clamp(min=0)).clamp(max=len(numbers) - 1)
        missing = wanted[(wanted >= 0) & (numbers[places] != wanted)]
        if len(missing):
            raise DataError(f"every relevant document must be a row, but document {missing[0]} is none")
        places = places.where(wanted >= 0, -1)
        return cls(dense, queries, documents[order], (places, grades[queries].float()))

    @classmethod
    def _of_pairs(cls, dense: Tensor, batches: Sequence[Batch]) -> RankedTexts:
        pair, side, score = (_joined(batches, key) for key in ("pair", "side", "score"))
        first, second = ((side == number).nonzero().flatten() for number in (0, 1))
        first, second = first[pair[first].argsort()], second[pair[second].argsort()]
        if not torch.equal(pair[first], pair[second]):
            raise DataError("every pair of texts must have one row of side 0 and one of side 1")
        texts = [
            tuple(ids[mask != 0].tolist())
            for batch in batches
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        # Of equal second texts, the first row stands for all.
        distinct = {texts[row]: row for row in reversed(second.tolist())}
        documents = torch.tensor(sorted(distinct.values()))
        return cls(dense, first, documents, pairs=(torch.stack([first, second]), score[first].float()))

    def rankings(self, predictions: Tensor, *, old_index: bool = True) -> Rankings:
        """Return the rankings of embeddings, (rows, dim); with an old index, the documents have the dense model's."""
        queries = predictions if self.only_queries else self._whole(predictions)[self.queries]
        documents = self.dense if old_index else self._whole(predictions)
        ours, theirs = queries.float(), self.dense[self.queries].float()
        cosine = cosine_similarity(ours.double(), theirs.double())
        new, old = (of[self.documents].float() for of in (documents, self.dense))
        if self.similarity == "cosine":
            ours, theirs, new, old = (normalize(of, dim=-1) for of in (ours, theirs, new, old))
        size = max(1, _AT_ONCE // len(self.documents))
        parts = []
        for start in range(0, len(self.queries), size):
            rows = slice(start, start + size)
            found, dense = (self._similar(*of) for of in ((ours[rows], new), (theirs[rows], old)))  # (chunk, documents)
            if self.itself:
                own = torch.arange(len(found)), torch.arange(len(found)) + start
                found[own] = dense[own] = -torch.inf
            parts.append(_compared(found, dense, self._grades(rows), DEPTH))
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Rankings(**whole, cosine=cosine)

    def _similar(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Return similarities, (queries, documents); for a cosine, embeddings must have length 1."""
        if self.similarity in ("cosine", "dot"):
            return queries @ documents.T
        # By matrix products, distances of near texts would be rounding errors.
        exact = "donot_use_mm_for_euclid_dist"
        return -torch.cdist(queries, documents, p=1.0 if self.similarity == "manhattan" else 2.0, compute_mode=exact)

    def _grades(self, rows: slice) -> Tensor | None:
        """Return the grades of all documents for some queries, (chunk, documents); None if there are no grades."""
        if self.grades is None:
            return None
        places, grades = (part[rows] for part in self.grades)
        # Fills go to a last column, which is cut off.
        table = grades.new_zeros(len(grades), len(self.documents) + 1)
        table.scatter_(1, places.where(places >= 0, len(self.documents)), grades)
        return table[:, :-1]

    def similarities(self, predictions: Tensor, *, old_index: bool = False) -> tuple[Tensor, Tensor]:
        """Return the similarity of the two texts of every pair, and what is known of it, (pairs,) float64 each.

        With an old index, the second text has the dense model's vector.
        """
        from sentence_transformers import SimilarityFunction

        assert self.pairs is not None
        (first, second), known = self.pairs
        predictions = self._whole(predictions)
        one, two = predictions[first].double(), (self.dense if old_index else predictions)[second].double()
        return SimilarityFunction.to_similarity_pairwise_fn(self.similarity)(one, two), known.double()

    def by_index(self, predictions: Tensor) -> dict[str, dict[str, float]]:
        """Return the means on the dense model's index, and on the model's own if all rows are predicted.

        On the model's own index, `cosine` is the mean over the documents, not the queries.
        """
        by_index = {}
        if not self.only_queries:
            by_index["slim_index"] = self.rankings(predictions, old_index=False).means
            new, old = (of[self.documents].double() for of in (predictions, self.dense))
            by_index["slim_index"]["cosine"] = cosine_similarity(new, old).mean().item()
        by_index["dense_index"] = self.rankings(predictions).means
        return by_index

    def _whole(self, predictions: Tensor) -> Tensor:
        """Return predictions unchanged, after a check that they are of all rows."""
        if self.only_queries or len(predictions) != len(self.dense):
            raise DataError(
                f"embeddings of all {len(self.dense)} texts, documents included, are needed, got {len(predictions)}"
            )
        return predictions


@dataclass(frozen=True)
class RankedGroups:
    """The dense reranker's logits of the candidates of queries."""

    dense: Tensor  # (queries, most) float32, of each query's candidates; -inf fills
    places: tuple[Tensor, Tensor]  # (rows,) int64 each, where a row's logit is in such a table
    grades: Tensor | None = None  # (queries, most) float32, 0 fills

    @classmethod
    def of(cls, dense: Tensor, batches: Sequence[Batch]) -> RankedGroups:
        """Return what the dense model ranks in batches, given its logits of their rows, (rows, 1)."""
        _, query = _joined(batches, GROUP_KEY).unique(return_inverse=True)
        order = query.argsort(stable=True)
        sizes = query.bincount()
        place = torch.empty_like(query)
        place[order] = torch.arange(len(query)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        empty = cls(torch.empty(len(sizes), int(sizes.max())), (query, place))
        grades = empty._by_query(_joined(batches, "grades"), fill=0.0) if "grades" in batches[0] else None
        return replace(empty, dense=empty._by_query(dense), grades=grades)

    def _by_query(self, values: Tensor, fill: float = -torch.inf) -> Tensor:
        """Return values of rows, (rows, 1) or (rows,), by query and candidate, (queries, most) float32."""
        found = torch.full(self.dense.shape, fill)
        found[self.places] = values.detach().float().flatten()
        return found

    def rankings(self, predictions: Tensor, *, old_index: bool = True) -> Rankings:
        """Return the rankings of logits, (rows, 1); there is no index."""
        return Rankings(**_compared(self._by_query(predictions), self.dense, self.grades))

    def by_index(self, predictions: Tensor) -> dict[str, dict[str, float]]:
        """Return the means over the queries, under the name "candidates"."""
        return {"candidates": self.rankings(predictions).means}


# The dense model's rankings, which those of other models are compared with, in the order of the queries' rows.
Ranked = RankedTexts | RankedGroups


def ranked(dense: Tensor, batches: Sequence[Batch], similarity: Similarity = "cosine") -> Ranked:
    """Return what a dense model ranked in batches, given its predictions of their rows: logits or embeddings."""
    if GROUP_KEY in batches[0]:
        return RankedGroups.of(dense, batches)
    return RankedTexts.of(dense, batches, similarity)


def _joined(batches: Sequence[Batch], key: str) -> Tensor:
    return torch.cat([batch[key] for batch in batches]).cpu()


def _compared(scores: Tensor, dense: Tensor, grades: Tensor | None, depth: int | None = None) -> dict[str, Tensor]:
    """Return the fields of `Rankings` but `cosine`, given a model's `scores` and the dense model's.

    Both are (queries, candidates), as are the grades; -inf means no candidate. The gains of `own_ndcg` are the dense
    model's scores of its first `depth` candidates, by default of all, scaled to [0, 1].
    """
    count = (dense > -torch.inf).count_nonzero(1)[:, None]
    best = dense.topk(min(depth or dense.shape[1], dense.shape[1])).values
    high, low, bound = (best.gather(1, count.clamp(max=rank) - 1) for rank in (1, best.shape[1], TOP))
    first = _first(scores, dense)

    def gain(of: Tensor) -> Tensor:
        scaled = ((of - low) / (high - low)).where(high > low, 1.0).clamp(0, 1)  # 1 for all if all scores are equal
        return scaled.where(of.isfinite(), 0.0)

    found = {
        "own_ndcg": _dcg(gain(first)) / _dcg(gain(best)),
        "top1": first[:, 0] == high[:, 0],
        "top10": (first >= bound).where(first.isfinite(), False).sum(1) / count[:, 0].clamp(max=TOP).double(),
    }
    if grades is None:
        return found
    gains = _first(scores, grades)
    ideal = _dcg(grades.topk(min(TOP, grades.shape[1])).values)
    relevant, rank = gains > 0, torch.arange(1, gains.shape[1] + 1, dtype=torch.float64)
    return found | {
        "ndcg": (_dcg(gains) / ideal).where(ideal > 0, 0.0),
        "recall": relevant.sum(1) / (grades > 0).count_nonzero(1).clamp(min=1).double(),
        "mrr": (relevant / rank).amax(1),
    }


def _first(scores: Tensor, worth: Tensor) -> Tensor:
    """Return `worth` of the candidates with the largest scores, in their order, (queries, at most 10).

    Candidates of equal score are ordered by rising worth.
    """
    most = min(TOP, scores.shape[1])
    values, places = scores.topk(min(most + 1, scores.shape[1]))
    bound = values[:, most - 1 : most]
    if bool((values[:, most:] == bound).any()):
        # Candidates tie for the last place: take all of them, so that the order below decides.
        places = scores.topk(int((scores >= bound).count_nonzero(1).max())).indices
    scores, worth = scores.gather(1, places), worth.gather(1, places)
    order = worth.argsort(dim=1, stable=True)
    scores, worth = scores.gather(1, order), worth.gather(1, order)
    worth = worth.gather(1, scores.argsort(dim=1, descending=True, stable=True))
    return worth[:, :most]


def _dcg(gains: Tensor) -> Tensor:
    """Return the discounted cumulative gain of the first 10, (queries,) float64."""
    gains = gains[:, :TOP].double().clamp(min=0)
    return (gains / torch.arange(2, gains.shape[1] + 2).double().log2()).sum(1)
