"""Rankings of embeddings and rerankers, against loops over the queries and scikit-learn."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from support.reading import classifying, given
from support.references import ranked
from torch import Tensor

from hies_export.data.batches import samples_of
from hies_export.errors import DataError, RecipeError
from hies_export.evaluate import ranking
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.metrics import check_metrics
from hies_export.evaluate.ranking import RankedGroups, RankedTexts, RowsKind, kind_of_rows
from hies_export.model.text_encoder import Similarity, TextReader
from hies_export.tasks import FeatureExtraction, Predictions

Batches = list[dict[str, Tensor]]


def embedding(similarity: Similarity = "cosine") -> FeatureExtraction:
    return FeatureExtraction(None, reader=TextReader(SimpleNamespace(similarity_fn_name=similarity)))


def embedded(vectors: Tensor) -> Predictions:
    return given(vectors, "embeddings")


def batch(rows: Tensor, **keys: Tensor) -> dict[str, Tensor]:
    ids = torch.stack([rows, torch.full_like(rows, 7)], 1)
    return {"input_ids": ids, "attention_mask": torch.tensor([[1, 0]]).expand(len(rows), 2), **keys}


def cut_up(rows: Tensor, size: int, **keys: Tensor) -> Batches:
    places = range(0, len(rows), size)
    return [batch(rows[n : n + size], **{key: of[n : n + size] for key, of in keys.items()}) for n in places]


def searches(queries: int = 9, documents: int = 30, most: int = 3, seed: int = 0) -> Batches:
    """Batches of queries, out of order, then of documents; rows are numbered in the order of the batches."""
    generator = torch.Generator().manual_seed(seed)
    relevant, grades = torch.full((queries, most), -1), torch.zeros(queries, most)
    for query in range(queries):
        count = query % (most + 1)
        relevant[query, :count] = torch.randperm(documents, generator=generator)[:count]
        grades[query, :count] = torch.randint(1, 4, (count,), generator=generator).float()
    of = {"document": torch.full((queries,), -1), "relevant": relevant, "grades": grades}
    asked = cut_up(torch.arange(queries), 4, query=torch.randperm(queries), **of)
    no = torch.full((documents,), -1)
    of = {"query": no, "relevant": no[:, None].expand(-1, most), "grades": torch.zeros(documents, most)}
    numbers = torch.randperm(documents, generator=generator)
    return [*asked, *cut_up(queries + torch.arange(documents), 8, document=numbers, **of)]


def column(batches: Batches, key: str) -> Tensor:
    return torch.cat([one[key] for one in batches])


def cosines(one: Tensor, two: Tensor) -> np.ndarray:
    one, two = (of.double() / of.double().norm(dim=-1, keepdim=True) for of in (one, two))
    return (one @ two.T).numpy()


def check(found: ranking.Rankings, expected: list[dict[str, float]]) -> None:
    for name in expected[0]:
        values = found.known[name].double().tolist()
        assert values == pytest.approx([of[name] for of in expected], abs=1e-5), name
        assert len(set(values)) > 1, name


def vectors(rows: int, seed: int = 0, dim: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, dim, generator=generator)
    return dense, dense + 0.7 * torch.randn(rows, dim, generator=generator)


@pytest.mark.parametrize("old_index", [True, False])
@pytest.mark.parametrize("documents", [6, 30, 140])
def test_queries_rank_documents_as_loops_do(old_index: bool, documents: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(ranking, "_AT_ONCE", 4 * documents)
    batches = searches(documents=documents)
    dense, slim = vectors(9 + documents)
    # Lengths do not matter.
    slim *= torch.rand(len(slim), 1) + 0.5
    places = {number: row for row, number in enumerate(column(batches, "document").tolist()) if number >= 0}
    rows = [places[number] for number in range(documents)]
    found = RankedTexts.of(dense, batches).rankings(slim, old_index=old_index)
    grades = np.zeros((9, documents))
    for of_query, relevant, known in zip(grades, column(batches, "relevant"), column(batches, "grades"), strict=False):
        of_query[relevant[relevant >= 0]] = known[relevant >= 0]
    scores, own = cosines(slim[:9], (dense if old_index else slim)[rows]), cosines(dense[:9], dense[rows])
    expected = [ranked(*of, 100) for of in zip(scores, own, grades, strict=True)]
    if documents == 6:
        expected = [{name: of[name] for name in ("own_ndcg", "top1", "ndcg", "mrr")} for of in expected]
    check(found, expected)
    assert found.cosine is not None
    assert found.cosine.tolist() == pytest.approx(np.diag(cosines(slim[:9], dense[:9])).tolist(), abs=1e-6)


@pytest.mark.parametrize("old_index", [True, False])
def test_texts_alone_are_ranked_among_the_others(old_index: bool) -> None:
    batches = cut_up(torch.arange(130), 50)
    dense, slim = vectors(130)
    found = RankedTexts.of(dense, batches).rankings(slim, old_index=old_index)
    tables = cosines(slim, dense if old_index else slim), cosines(dense, dense)
    expected = [ranked(*(np.delete(table[row], row) for table in tables), None, 100) for row in range(130)]
    check(found, expected)
    assert found.ndcg is None


SIMILARITIES: dict[Similarity, Any] = {
    "dot": lambda a, b: a @ b,
    "euclidean": lambda a, b: -np.sqrt(((a - b) ** 2).sum()),
    "manhattan": lambda a, b: -np.abs(a - b).sum(),
}


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_embeddings_are_compared_by_the_similarity_of_their_model(similarity: Similarity) -> None:
    alike = SIMILARITIES[similarity]
    batches = cut_up(torch.arange(60), 50)
    dense, slim = vectors(60)
    for of in (dense, slim):  # lengths do matter
        of *= torch.linspace(0.2, 3, 60)[:, None]
    judge = Judge(batches, embedded(dense), ("own_ndcg@10",), task=embedding(similarity), index="slim")
    tables = [
        np.array([[alike(a, b) for b in of] for a in of]) for of in (slim.double().numpy(), dense.double().numpy())
    ]
    expected = [ranked(*(np.delete(table[row], row) for table in tables), None, 100) for row in range(60)]
    check(judge.rankings(embedded(slim)), expected)

    batches = pairs()
    first, second = sides(batches)
    dense, slim = (of[column(batches, "input_ids")[:, 0]] * torch.linspace(0.2, 3, 80)[:, None] for of in vectors(80))
    judge = Judge(batches, embedded(dense), ("pearson",), task=embedding(similarity))
    scores = [alike(slim[a].double().numpy(), slim[b].double().numpy()) for a, b in zip(first, second, strict=True)]
    wanted = np.corrcoef(scores, column(batches, "score")[first])[0, 1]
    assert judge.of(embedded(slim)).metrics["pearson"] == pytest.approx(wanted)


def pairs(count: int = 40) -> Batches:
    """Pairs whose texts come in any order; the second sides of the pairs 3 and 5 are equal."""
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(1))
    pair, side = order // 2, order % 2
    rows = order.clone()
    rows[order == 2 * 5 + 1] = 2 * 3 + 1
    score = torch.rand(count, generator=torch.Generator().manual_seed(2))
    return cut_up(rows, 16, pair=pair, side=side, score=score[pair])


def sides(batches: Batches) -> tuple[list[int], list[int]]:
    """The rows of the first and of the second texts, in the order of the pairs."""
    places = list(zip(column(batches, "pair").tolist(), column(batches, "side").tolist(), strict=True))
    first, second = ([places.index((pair, side)) for pair in range(len(places) // 2)] for side in (0, 1))
    return first, second


def test_pairs_are_judged_by_their_similarity_and_their_first_texts_rank_the_second() -> None:
    batches = pairs()
    dense, slim = (of[column(batches, "input_ids")[:, 0]] for of in vectors(80))
    judge = Judge(batches, embedded(dense), ("spearman", "pearson", "own_ndcg@10"), task=embedding())
    first, second = sides(batches)
    score = column(batches, "score")[first].double().numpy()
    for old_index, second_of in ((True, dense), (False, slim)):
        alike = [cosines(slim[a : a + 1], second_of[b : b + 1])[0, 0] for a, b in zip(first, second, strict=True)]
        told = judge.ranking(embedded(slim))["dense_index" if old_index else "slim_index"]
        assert told["spearman"] == pytest.approx(scipy.stats.spearmanr(alike, score).statistic)
        if not old_index:
            quality = judge.of(embedded(slim)).metrics
            assert quality["spearman"] == told["spearman"]
            assert quality["pearson"] == pytest.approx(np.corrcoef(alike, score)[0, 1])
    distinct = dense[[row for pair, row in enumerate(second) if pair != 5]]
    scores, own = (cosines(of[first], distinct) for of in (slim, dense))
    check(judge.rankings(embedded(slim)), [ranked(*of, None, 100) for of in zip(scores, own, strict=True)])
    assert samples_of(batches) == 40


def groups(graded: bool) -> Batches:
    """Candidates of 7 queries, 1 to 25 of them, in any order."""
    group = torch.cat([torch.full((count,), 3 * number) for number, count in enumerate((1, 2, 9, 10, 11, 25, 12))])
    group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(3))]
    grades = torch.randint(-1, 3, (len(group),), generator=torch.Generator().manual_seed(4)).clamp(min=0).float()
    return cut_up(torch.arange(len(group)), 16, group=group, **({"grades": grades} if graded else {}))


@pytest.mark.parametrize("graded", [True, False])
def test_a_reranker_is_judged_by_the_order_of_the_candidates(graded: bool) -> None:
    batches = groups(graded)
    group = column(batches, "group")
    dense, slim = vectors(len(group), dim=1)
    names = classifying("numbers").usual_metrics(rows=kind_of_rows(batches))
    judge = Judge(batches, given(dense), names, classifying("numbers"))
    expected = []
    for number in range(0, 21, 3):
        rows = group == number
        if rows.sum() == 1:
            grade = column(batches, "grades")[rows] > 0 if graded else 0
            expected.append({"own_ndcg": 1.0, "top1": 1.0, "top10": 1.0})
            if graded:
                expected[-1] |= dict.fromkeys(("ndcg", "recall", "mrr"), float(grade))
            continue
        grades = column(batches, "grades")[rows].double().numpy() if graded else None
        expected.append(ranked(slim[rows].flatten().numpy(), dense[rows].flatten().numpy(), grades, 10**6))
    check(judge.rankings(given(slim)), expected)
    means = {name: np.mean([of[name] for of in expected]) for name in expected[0]}
    assert judge.ranking(given(slim)) == {"candidates": pytest.approx(means)}
    quality = judge.of(given(slim))
    wanted = {"ndcg@10": "ndcg", "mrr@10": "mrr"} if graded else {"own_ndcg@10": "own_ndcg"}
    assert quality.metrics == pytest.approx({name: means[of] for name, of in wanted.items()})
    assert quality.stability == pytest.approx(means["top1"])
    # Differences below the tolerance of a regression are not the question.
    assert judge.of(given(0.001 * slim)).stability == quality.stability < 1
    assert samples_of(batches) == 7


def test_equal_scores_earn_nothing_and_the_order_of_rows_does_not_matter() -> None:
    batches = groups(True)
    dense, _ = vectors(len(column(batches, "group")), dim=1)
    ties = dense.round()
    constant = torch.zeros_like(dense)
    order = torch.randperm(len(dense), generator=torch.Generator().manual_seed(5))
    whole = {key: column(batches, key) for key in batches[0]}
    shuffled = [{key: of[order] for key, of in whole.items()}]
    for beside in (dense, ties):
        one, two = RankedGroups.of(beside, batches), RankedGroups.of(beside[order], shuffled)
        for of in (dense, ties, constant):
            found, again = one.rankings(of).means, two.rankings(of[order]).means
            assert found == pytest.approx(again)
        # The dense model itself is never worse than itself, ties or not.
        itself = one.rankings(beside).means
        assert itself["own_ndcg"] == itself["top1"] == itself["top10"] == 1
    found = RankedGroups.of(dense, batches).rankings(constant)
    sizes = column(batches, "group").unique(return_counts=True)[1]
    assert found.top1.tolist() == (sizes == 1).tolist()
    worst = RankedGroups.of(dense, batches).rankings(-column(batches, "grades")[:, None])
    assert torch.equal(found.ndcg, worst.ndcg)  # type: ignore[arg-type]


def test_on_the_dense_index_only_queries_are_predicted_again() -> None:
    batches = searches()
    dense, slim = vectors(39)
    names = embedding().usual_metrics(rows="queries")
    found = embedded(dense)
    of = {index: Judge(batches, found, names, embedding(), index=index) for index in ("slim", None)}
    of["dense"] = of[None].on_dense_index()
    assert sum(len(one["query"]) for one in of["dense"].batches) == 9
    assert samples_of(of["dense"].batches) == samples_of(batches) == 9
    assert len(of["slim"].batches) == len(of[None].batches) == len(batches)
    queries = slim[:9]
    assert of["dense"].of(embedded(queries)) == of[None].of(embedded(slim)) != of["slim"].of(embedded(slim))
    assert torch.equal(of["dense"].agreement(embedded(queries)), of[None].agreement(embedded(slim)))
    told = of[None].ranking(embedded(slim))
    assert list(told) == ["slim_index", "dense_index"]
    assert of["dense"].ranking(embedded(queries)) == {"dense_index": told["dense_index"]}
    assert told["dense_index"]["ndcg"] == of["dense"].of(embedded(queries)).metrics["ndcg@10"]
    assert told["slim_index"]["ndcg"] == of["slim"].of(embedded(slim)).metrics["ndcg@10"]
    assert told["slim_index"]["cosine"] == pytest.approx(np.diag(cosines(slim[9:], dense[9:])).mean())
    for judge in of.values():
        perfect = judge.of(judge.dense)
        assert perfect.stability == 1
        assert judge.kept(judge.dense)[0] == 1
        assert judge.lost(judge.dense) == (0, 0)


def test_what_is_kept_and_lost_is_the_first_metric() -> None:
    batches = searches(queries=200, documents=300)
    dense, slim = vectors(500)
    judge = Judge(batches, embedded(dense), ("mrr@10", "ndcg@10"), embedding()).on_dense_index()
    found = embedded(slim[:200])
    before, after = (judge.rankings(of).mrr.numpy() for of in (judge.dense, found))  # type: ignore[union-attr]
    kept, low = judge.kept(found)
    assert kept == pytest.approx(after.mean() / before.mean())
    assert low == judge.kept_ends(found)[0] < kept < judge.kept_ends(found)[1]
    lost, most = judge.lost(found)
    assert lost == pytest.approx(before.mean() - after.mean())
    assert lost < most < lost + 4 * (before - after).std() / 200**0.5
    judgement, quality = judge.judgement(found), judge.of(found)
    assert (judgement.quality, judgement.stability) == (quality.metrics["mrr@10"], quality.stability)
    assert judgement.standard_error == pytest.approx(after.std() / 200**0.5, rel=0.25)
    assert low < replace(judge, as_of=20_000).kept(found)[1] < kept
    assert replace(judge, confidence=0.999).kept(found)[1] < low


def test_of_pairs_the_share_of_the_correlation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hies_export.evaluate.judge._RESAMPLES", 200)
    batches = pairs(200)
    dense, noise = vectors(400)
    score = torch.rand(200, generator=torch.Generator().manual_seed(2))
    # The dense model knows the scores.
    dense = torch.nn.functional.one_hot(torch.arange(400) // 2 % 8, 8).float() + 0.02 * dense
    dense[1::2] += 2 * (1 - score[:, None]) * noise[1::2]
    dense, slim = (of[column(batches, "input_ids")[:, 0]] for of in (dense, dense + 0.1 * noise))
    judge = Judge(batches, embedded(dense), ("spearman",), task=embedding())
    before, after = (judge.of(embedded(of)).metrics["spearman"] for of in (dense, slim))
    assert before > 0.5
    kept, low = judge.kept(embedded(slim))
    assert kept == pytest.approx(after / before)
    assert kept - 0.2 < low < kept < judge.kept_ends(embedded(slim))[1]
    assert judge.lost(embedded(slim))[0] == pytest.approx(before - after)
    assert judge.judgement(embedded(slim)).quality == after


def test_rows_that_cannot_be_ranked_are_refused() -> None:
    batches = searches()
    for given_batches, message in (
        (batches[:-1], "every relevant document must be a row"),
        (batches[:3], "needs queries and documents, got 9 and 0"),
        (cut_up(torch.arange(1), 1), "needs at least two, got 1"),
        (pairs()[:-1], "one row of side 0 and one of side 1"),
    ):
        with pytest.raises(DataError, match=message):
            RankedTexts.of(vectors(len(column(given_batches, "input_ids")))[0], given_batches)


def test_metrics_must_fit_the_rows() -> None:
    kinds: tuple[RowsKind, ...] = ("queries", "pairs", "texts", "graded", "groups")
    for rows in kinds:
        task = classifying("numbers") if rows in ("graded", "groups") else embedding()
        check_metrics([*task.usual_metrics(rows=rows), "own_ndcg@10"], rows=rows)
        with pytest.raises(RecipeError, match="must be among .*own_ndcg@10, got 'accuracy', which is for classes"):
            check_metrics(["accuracy"], rows=rows)
    assert embedding().usual_metrics() == ("own_ndcg@10",)
    with pytest.raises(RecipeError, match="metrics of texts alone must be among own_ndcg@10, got 'ndcg@10'"):
        check_metrics(["ndcg@10"], rows="texts")
    judge = Judge(cut_up(torch.arange(9), 4), embedded(vectors(9)[0]), ("recall@10",), task=embedding())
    with pytest.raises(RecipeError, match="got 'recall@10'"):
        judge.of(embedded(vectors(9)[1]))
