"""Judge against loops over the samples, and the warnings it logs."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.models import bert, text_batch
from support.reading import classifying, given
from support.runs import registries_restored
from torch import Tensor

from hies_export.evaluate.interval import ratio_ends
from hies_export.evaluate.judge import (
    Judge,
    Judgement,
    Quality,
    clearly_better,
    warn_if_no_better_than_commonest,
)
from hies_export.evaluate.metrics import register_metric
from hies_export.evaluate.predict import predict
from hies_export.evaluate.promise import asked_words, stays_words
from hies_export.pipeline.options import PruneSection
from hies_export.recipe.budget import Budget, KeepBudget, Outcome
from hies_export.tasks import task_of


def batches(labels: Tensor | None, count: int) -> list[dict[str, Tensor]]:
    """Two batches; a judge reads their labels alone."""
    whole = {"input_ids": torch.zeros(count, 1)} | ({} if labels is None else {"labels": labels})
    return [{key: part[:7] for key, part in whole.items()}, {key: part[7:] for key, part in whole.items()}]


def test_classes_are_judged_by_labels_and_by_the_dense_model() -> None:
    labels, dense = torch.randint(0, 3, (20,)), torch.randn(20, 3)
    other = dense + torch.randn(20, 3)
    judge = Judge(batches(labels, 20), given(dense), ("accuracy", "matthews_correlation"), classifying())
    right = [row.argmax() == label for row, label in zip(other, labels, strict=True)]
    same = [row.argmax() == before.argmax() for row, before in zip(other, dense, strict=True)]
    found = judge.of(given(other))
    assert list(found.metrics) == ["accuracy", "matthews_correlation"]
    assert found.metrics["accuracy"] == pytest.approx(sum(right) / 20)
    assert found.stability == pytest.approx(sum(same) / 20)
    assert 0 < sum(same) < 20
    judgement, share = judge.judgement(given(other)), found.metrics["accuracy"]
    assert (judgement.quality, judgement.stability) == (share, sum(same) / 20)
    assert judgement.standard_error == pytest.approx((share * (1 - share) / 20) ** 0.5, rel=0.35)
    assert judge.of(given(dense)).stability == 1.0


def test_a_dense_model_that_is_no_better_than_the_commonest_class_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = bert(num_labels=3).eval(), text_batch(12, 30, padding=False, labels=False)
    right = model(**batch).logits.argmax(-1)
    one_class, wrong = torch.zeros_like(right), (right + 1) % 3
    wrong[0] = (right[0] + 2) % 3
    found = predict(model, [batch])
    for known in ({"labels": right}, {"labels": one_class}, {}):
        warn_if_no_better_than_commonest(task_of(model), found, [batch | known])
    # Rows of one class say nothing.
    assert not caplog.messages
    warn_if_no_better_than_commonest(task_of(model), found, [batch | {"labels": wrong}])
    most = max(int((wrong == label).sum()) for label in range(3))
    assert f"right on 0 of 12 labels, and always answering the commonest class, {wrong.mode().values}" in caplog.text
    assert f", on {most}: check that the labels are" in caplog.text


def test_a_registered_metric_says_what_a_share_of_it_is_and_how_it_is_worded() -> None:
    def terms(found: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (found == 1) & (wanted == 1), wanted == 1

    dense = torch.randn(40, 3)
    other, name = dense + torch.randn(40, 3), "own_ones"
    with registries_restored():
        register_metric(name, of="own classes", title="same ones", terms=terms, counts="ones")(
            lambda found, wanted, num_labels: float(terms(found, wanted)[0].sum() / (wanted == 1).sum())
        )
        judge = Judge(batches(None, 40), given(dense), (name,), classifying(), confidence=0.9)
        ones = [before.argmax() == 1 for before in dense]
        both = [one and row.argmax() == 1 for one, row in zip(ones, other, strict=True)]
        share, low = judge.kept(given(other))
        assert 0 < sum(both) < sum(ones) < 40
        assert share == pytest.approx(sum(both) / sum(ones)) == judge.of(given(other)).metrics[name]
        assert low == ratio_ends(torch.tensor(both), torch.tensor(ones), 0.9)[0]
        asked = PruneSection(budget={"keep": {"metric": name}}).goal
        outcome = Outcome(asked)
        assert (asked_words(outcome), stays_words(outcome)) == ("99 % of the ones", "of the ones stay")
        lost = Outcome(Budget(keep=KeepBudget(metric=name, by=0.1)))
        assert asked_words(lost) == "a loss of at most 0.1 of same ones"
        with pytest.raises(ValidationError, match="keep needs predictions, or metric and by, got metric"):
            PruneSection(budget={"keep": {"metric": "accuracy"}})


@pytest.mark.parametrize("regression", [False, True])
def test_without_labels_the_dense_models_predictions_are_the_reference(regression: bool) -> None:
    dense = torch.randn(20, 1 if regression else 3)
    other = dense + torch.randn_like(dense)
    name = "pearson" if regression else "accuracy"
    judge = Judge(batches(None, 20), given(dense), (name,), classifying("numbers" if regression else "classes"))
    assert judge.of(given(dense)) == Quality({name: pytest.approx(1.0)}, 1.0)
    found = judge.of(given(other))
    if regression:
        assert found.metrics[name] == pytest.approx(np.corrcoef(other.flatten(), dense.flatten())[0, 1], rel=1e-5)
    else:
        assert found.metrics[name] == found.stability
    assert judge.judgement(given(other)) == Judgement(None, 0.0, found.stability)


def test_an_undefined_metric_is_zero_and_logged_once_however_often_it_is_resampled(caplog: Any) -> None:
    labels = torch.tensor([0, 1, 1, 1])
    logits = torch.nn.functional.one_hot(labels, 2).float()
    draws = torch.randint(0, 4, (100, 4), generator=torch.Generator().manual_seed(0))
    values = [0.0 if len(set(labels[draw].tolist())) == 1 else 1.0 for draw in draws]
    assert 0 < sum(values) < 100
    judge = Judge(batches(labels, 4), given(logits), ("matthews_correlation",), classifying())
    assert judge.judgement(given(logits)).standard_error == pytest.approx(np.std(values, ddof=1))
    assert caplog.messages == []
    constant = torch.tensor([[1.0, 0.0]]).repeat(4, 1)
    assert judge.judgement(given(constant)) == Judgement(0.0, 0.0, 0.25)
    assert caplog.messages == ["matthews_correlation is undefined: 0.0 is returned"]


def texts_of(gained: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the agreement of two models whose tokens differ so, 1 where only the first agrees, and their texts."""
    flat = torch.tensor([token for text in gained for token in text])
    text = torch.tensor([number for number, tokens in enumerate(gained) for _ in tokens])
    return flat > 0, flat < 0, text


def test_what_one_text_gains_is_no_clear_gain() -> None:
    # 30 of 500 tokens are far beyond two standard errors of independent ones, but they are of one text.
    one, other, text = texts_of([[1] * 30 + [0] * 20, *([0] * 50 for _ in range(9))])
    assert clearly_better(one, other)
    assert not clearly_better(one, other, text)
    # The same tokens, three of each text.
    one, other, text = texts_of([[1] * 3 + [0] * 47 for _ in range(10)])
    assert clearly_better(one, other, text)
    assert not clearly_better(other, one, text)
    # A single text shows nothing of others, nor does a single sample.
    one, other, text = texts_of([[1] * 50])
    assert clearly_better(one, other)
    assert not clearly_better(one, other, text)
    assert not clearly_better(one[:1], other[:1])


@pytest.mark.parametrize("seed", range(20))
def test_a_clear_gain_is_two_standard_errors_of_a_mean_over_clusters(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths, drift = generator.integers(1, 30, size=25), generator.normal(0.1, 0.3, size=25)
    gained = [
        [int(np.sign(x)) if abs(x) > 0.5 else 0 for x in generator.normal(shift, 0.5, size=length)]
        for length, shift in zip(lengths, drift, strict=True)
    ]
    tokens = sum(map(len, gained))
    mean = sum(map(sum, gained)) / tokens
    between = sum((sum(text) - mean * len(text)) ** 2 for text in gained)
    error = (len(gained) / (len(gained) - 1) * between) ** 0.5 / tokens
    one, other, text = texts_of(gained)
    assert clearly_better(one, other, text) == (mean > 2 * error)
    # Samples of one prediction each are as good as none.
    alone = torch.arange(tokens)
    paired = np.std([token for of in gained for token in of], ddof=1) / tokens**0.5
    assert clearly_better(one, other, alone) == clearly_better(one, other) == (mean > 2 * paired)
