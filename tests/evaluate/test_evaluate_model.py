"""Predictions, metrics and comparisons against a hand-written loop, numpy and scikit-learn."""

import copy
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from support.models import bert
from support.reading import classifying, given

from hies_export.errors import NonFiniteError, RecipeError
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.metrics import METRICS, check_metrics
from hies_export.evaluate.predict import predict
from hies_export.progress import Silent
from hies_export.tasks import Predictions, TextGeneration, TokenClassification

WORDS = SimpleNamespace(num_labels=3, id2label={0: "O", 1: "x", 2: "y"})
KINDS = {kind: classifying(kind) for kind in ("classes", "labels", "numbers")} | {
    **{"tokens": TextGeneration(None), "choices": TextGeneration(None), "words": TokenClassification(WORDS)}
}


def stability(dense, other, task=KINDS["classes"]):
    return task.same(given(dense), given(other)).double().mean().item()


def tiny_bert():
    return bert(vocab_size=50).eval()


def batches(labels=True):
    generator = torch.Generator().manual_seed(1)
    result = []
    for size, length in ((4, 7), (3, 5)):
        batch = {
            "input_ids": torch.randint(0, 50, (size, length), generator=generator),
            "attention_mask": torch.ones(size, length, dtype=torch.int64),
        }
        batch["attention_mask"][0, 3:] = 0
        if labels:
            batch["labels"] = torch.randint(0, 3, (size,), generator=generator)
        result.append(batch)
    return result


def test_predict_equals_a_loop_in_evaluation_mode_without_labels(monkeypatch):
    model, given, seen, told = tiny_bert(), batches(), [], []
    with torch.no_grad():
        expected = [model(**{key: batch[key] for key in ("input_ids", "attention_mask")}).logits for batch in given]
    model.train().bert.encoder.eval()  # dropout would change the logits
    modes = [module.training for module in model.modules()]
    forward = model.forward

    class Noted(Silent):
        def track(self, items, name):
            told.append((name, len(items)))
            return iter(items)

    monkeypatch.setattr(model, "forward", lambda **inputs: seen.append(set(inputs)) or forward(**inputs))
    logits = predict(model, given, progress=Noted()).values
    torch.testing.assert_close(logits, torch.cat(expected))
    assert (seen, told) == ([{"input_ids", "attention_mask"}] * 2, [("predict", 2)])
    assert "labels" in given[0]
    with pytest.raises(IndexError, match="index out of range"):
        predict(model, [{"input_ids": torch.full((1, 2), 99)}])
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
    # They may take part in a backward pass.
    weight = torch.ones(3, requires_grad=True)
    (logits * weight).sum().backward()
    torch.testing.assert_close(weight.grad, logits.sum(0))
    assert predict(model.to(torch.bfloat16), given).values.dtype == torch.float32


def test_predict_names_the_batch_with_a_nan():
    model, given = tiny_bert(), batches()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[49] = float("nan")
    for batch in given:
        batch["input_ids"].clamp_(max=48)
    given[1]["input_ids"][0, 0] = 49
    with pytest.raises(NonFiniteError, match=r"batch 1 \(from 0\) of 2 has NaN"):
        predict(model, given)


def test_references_are_the_labels_in_order():
    one, two = given = batches()
    assert KINDS["classes"].references(given).tolist() == [*one["labels"], *two["labels"]]


def metrics_of(predictions, labels, *names):
    """Return the metrics that a judge of the dense model gives it on batches with these labels."""
    return Judge([{"labels": labels}], predictions, names, KINDS[predictions.kind]).of(predictions).metrics


def test_f1_takes_the_number_of_classes_from_the_logits():
    logits, zeros = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]]), torch.tensor([0, 0])
    # Of three, macro over those that occur; of two, class 1 only.
    for classes, wanted in ((3, (2 / 3 + 0) / 2), (2, 0.0)):
        assert metrics_of(given(logits[:, :classes]), zeros, "f1") == {"f1": pytest.approx(wanted)}


def test_metrics_of_one_sample_are_defined_and_in_the_order_of_their_names():
    found = metrics_of(given(torch.tensor([[0.5]])), torch.tensor([2.0]), "spearman", "pearson")
    assert list(found.items()) == [("spearman", 0.0), ("pearson", 0.0)]


def f1_of_entities(labels, classes):
    """Return the F1 where every word that is not of class 0 is an entity."""
    return sklearn.metrics.f1_score(labels.ravel(), classes.ravel(), labels=[1, 2], average="micro")


# Per metric the same number by other means, of labels and predictions as `compared` has them below.
BY_OTHER_MEANS = {
    "accuracy": lambda labels, classes: np.mean(labels == classes),
    "f1": lambda labels, classes: sklearn.metrics.f1_score(labels, classes, average="macro", zero_division=0.0),
    "matthews_correlation": sklearn.metrics.matthews_corrcoef,
    "f1_micro": lambda labels, found: sklearn.metrics.f1_score(labels, found, average="micro"),
    "subset_accuracy": sklearn.metrics.accuracy_score,
    "pearson": lambda labels, numbers: np.corrcoef(labels, numbers)[0, 1],
    "spearman": lambda labels, numbers: np.corrcoef(scipy.stats.rankdata(labels), scipy.stats.rankdata(numbers))[0, 1],
    "perplexity": lambda nll, right, characters: math.exp(nll.mean()),
    "nats_per_character": lambda nll, right, characters: nll.sum() / characters.sum(),
    "token_accuracy": lambda nll, right, characters: right.mean(),
    "exact_match": lambda nll, right, characters: right.all(-1).mean(),
    **dict.fromkeys(("entity_f1", "own_entity_f1"), f1_of_entities),
    "word_accuracy": lambda labels, classes: np.mean(labels == classes),
    "choice_accuracy": lambda right, sums, characters: np.mean(sums.argmax(-1) == right),
    "choice_accuracy_norm": lambda right, sums, characters: np.mean((sums / characters).argmax(-1) == right),
}


# Rankings are tested in test_ranking.py, answers in tests/tasks/test_question_answering.py.
OTHERS = ("ranking", "own ranking", "spans")


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.of not in OTHERS])
def test_values_and_standard_errors_are_those_of_other_means(name):
    labels, kind = torch.randint(0, 3, (30,)), METRICS[name].of
    predictions = torch.randn(30, 3) + torch.nn.functional.one_hot(labels, 3)
    compared = (labels, predictions.argmax(-1))
    if kind == "numbers":
        predictions, labels = predictions[:, :1], labels + torch.rand(30)
        compared = (labels.double(), predictions.flatten().double())
    elif kind == "labels":
        labels = (torch.rand(30, 3) < 0.5).float()
        compared = (labels, predictions.sigmoid() > 0.5)
    elif kind in ("tokens", "characters"):
        right = torch.rand(10, 3) < 0.7
        right[0] = True
        nll, sample = torch.rand(30), torch.arange(10).repeat_interleave(3)
        characters = torch.randint(1, 9, (10,)).double()
        values, kind = torch.where(right.flatten(), labels, 9), "tokens"
        predictions = Predictions("tokens", values, sample, joint=True, nll=nll, characters=characters)
        compared = (nll.double().view(10, 3), right, characters)
    elif kind.endswith("words"):
        compared = (labels.view(10, 3), compared[1].view(10, 3))
        sample, kind = torch.arange(10).repeat_interleave(3), "words"
        predictions = Predictions(kind, compared[1].flatten(), sample, joint=True)
    elif kind == "choices":
        likelihoods, characters = predictions.double(), torch.randint(1, 9, (30, 3)).double()
        predictions = Predictions("choices", likelihoods, characters=characters)
        compared = (labels, likelihoods, characters)

    def by_other_means(draw):
        return BY_OTHER_MEANS[name](*(part[draw].numpy() for part in compared))

    if isinstance(predictions, torch.Tensor):
        predictions = given(predictions, kind)
    count = len(compared[0])
    task, dense = copy.copy(KINDS[kind]), replace(predictions, values=labels) if METRICS[name].own else predictions
    task.references = lambda batches: labels
    found = Judge([{"labels": labels}], dense, (name,), task).judgement(predictions)
    assert found.quality == pytest.approx(by_other_means(torch.arange(count)), rel=1e-12)
    draws = torch.randint(0, count, (100, count), generator=torch.Generator().manual_seed(0))
    expected = np.std([by_other_means(draw) for draw in draws], ddof=1)
    assert found.standard_error == pytest.approx(expected, rel=1e-10)
    assert found.standard_error > 0


def test_stability_is_the_share_of_equal_classes_or_of_numbers_within_the_tolerance():
    dense = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.2, 0.1]])
    other = torch.tensor([[0.0, 9.0], [1.0, 0.9], [1.0, 0.0], [7.0, 0.1]])
    assert stability(dense, other) == 0.75
    dense, other = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[1.25], [1.75], [3.0], [4.5]])
    for tolerance, share in ((0.25, 0.75), (0.1, 0.25), (1.0, 1.0)):
        assert stability(dense, other, classifying("numbers", tolerance=tolerance)) == share
    # By default, within a sixth of the standard deviation of the dense model's, of numbers of any size.
    for size in (1.0, 1e-3, 2e5):
        for shift, share in ((np.std([1, 2, 3, 4]) / 6 - 1e-3, 1.0), (np.std([1, 2, 3, 4]) / 6 + 1e-3, 0.0)):
            assert stability(size * dense, size * (dense + shift), KINDS["numbers"]) == share
    assert stability(size * dense, size * dense.mean().expand_as(dense), KINDS["numbers"]) == 0.0
    # A constant may move by what rounding does.
    constant = torch.full((4, 1), 7.0)
    assert stability(constant, constant + 1e-4, KINDS["numbers"]) == 1.0
    assert stability(constant, constant + 1e-3, KINDS["numbers"]) == 0.0


@pytest.mark.parametrize(
    ("name", "constant"),
    [("pearson", "predictions"), ("spearman", "references"), ("matthews_correlation", "predictions")],
)
def test_a_correlation_with_a_constant_is_zero_and_warns(name, constant, caplog):
    values = {"predictions": [1, 0, 2], "references": [0, 1, 1], constant: [1, 1, 1]}
    predictions, references = (torch.tensor(part) for part in values.values())
    kind = METRICS[name].of
    logits = predictions[:, None].float() if kind == "numbers" else torch.nn.functional.one_hot(predictions, 3).float()
    with caplog.at_level(logging.WARNING):
        assert metrics_of(given(logits), references, name) == {name: 0.0}
    assert caplog.messages == [f"{name} is undefined: 0.0 is returned"]


@pytest.mark.parametrize(
    ("names", "how", "message"),
    [
        (["accuracy"], {"predicts": "numbers"}, "of a regression must be among pearson, spearman, got 'accuracy'"),
        (["f1"], {"predicts": "labels"}, "multi-label .* among f1_micro, subset_accuracy, got 'f1', which is for cl"),
        (
            ["pearson", "acuracy", "f1"],
            {},
            r"(?s)2 problems.*must be among accuracy, f1, matthews_correlation, got 'pearson', which is for numbers"
            r".*did you mean 'accuracy'",
        ),
    ],
)
def test_metrics_that_do_not_fit_are_refused_all_at_once(names, how, message):
    with pytest.raises(RecipeError, match=message):
        check_metrics(names, **how)


def test_predictions_that_do_not_fit_are_refused():
    with pytest.raises(RecipeError, match="got 'pearson', which is for numbers"):
        metrics_of(given(torch.zeros(2, 2)), torch.tensor([0, 1]), "pearson")
