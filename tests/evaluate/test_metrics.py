"""The metrics against formulas written out in numpy and against scikit-learn."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path

import evaluate
import numpy as np
import pytest
import sklearn.metrics

from hies_export.errors import RecipeError
from hies_export.evaluate.metrics import METRICS, check_metrics, default_metrics, load_metric

PREDICTIONS = [1, 0, 1, 1, 0, 1, 0, 0]
REFERENCES = [1, 0, 0, 1, 1, 1, 0, 1]
SCORES = [0.1, 2.0, 1.5, 4.5, 3.5, 3.5, 0.0]
TRUE_SCORES = [0.5, 1.0, 2.5, 5.0, 3.0, 4.0, 0.0]


def compute(name, predictions, references, **options):
    result = load_metric(name).compute(predictions=predictions, references=references, **options)
    assert list(result) == [name]
    assert type(result[name]) is float
    return result[name]


def counts():
    predictions, references = np.array(PREDICTIONS), np.array(REFERENCES)
    return [int(((predictions == p) & (references == r)).sum()) for p, r in ((1, 1), (1, 0), (0, 1), (0, 0))]


def pearson(a, b):
    a, b = np.array(a, float) - np.mean(a), np.array(b, float) - np.mean(b)
    return (a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum())


def ranks(values):
    values = np.array(values)
    return [(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]


def test_classification_metrics_equal_their_formulas():
    hit, false_alarm, miss, rejection = counts()
    assert compute("accuracy", PREDICTIONS, REFERENCES) == (hit + rejection) / len(REFERENCES)
    assert compute("f1", PREDICTIONS, REFERENCES) == pytest.approx(2 * hit / (2 * hit + false_alarm + miss))
    matthews = (hit * rejection - false_alarm * miss) / math.sqrt(
        (hit + false_alarm) * (hit + miss) * (rejection + false_alarm) * (rejection + miss)
    )
    assert compute("matthews_correlation", PREDICTIONS, REFERENCES) == pytest.approx(matthews)


def test_f1_of_more_than_two_classes_is_the_macro_mean():
    predictions, references = [0, 1, 2, 2, 1, 0], [0, 2, 2, 2, 1, 1]
    per_class = sklearn.metrics.f1_score(references, predictions, average=None)
    assert compute("f1", predictions, references) == pytest.approx(per_class.mean())


def test_f1_of_a_three_class_model_is_macro_even_where_the_third_class_does_not_occur():
    binary = compute("f1", PREDICTIONS, REFERENCES, num_labels=2)
    macro = compute("f1", PREDICTIONS, REFERENCES, num_labels=3)
    assert binary == sklearn.metrics.f1_score(REFERENCES, PREDICTIONS)
    assert macro == sklearn.metrics.f1_score(REFERENCES, PREDICTIONS, average="macro")
    assert binary != macro


def test_f1_without_any_positive_is_zero():
    assert compute("f1", [0, 0, 0], [0, 0, 0]) == 0.0


def test_correlations_equal_their_formulas_with_ties():
    assert compute("pearson", SCORES, TRUE_SCORES) == pytest.approx(pearson(SCORES, TRUE_SCORES))
    by_rank = pearson(ranks(SCORES), ranks(TRUE_SCORES))
    assert compute("spearman", SCORES, TRUE_SCORES) == pytest.approx(by_rank)


@pytest.mark.parametrize("name", ["pearson", "spearman", "matthews_correlation"])
@pytest.mark.parametrize("constant", ["predictions", "references"])
def test_a_correlation_with_a_constant_is_zero_and_warns(name, constant, caplog):
    values = {"predictions": [1, 0, 2], "references": [0, 1, 1], constant: [1, 1, 1]}
    with caplog.at_level(logging.WARNING):
        assert compute(name, **values) == 0.0
    assert f"{name} is undefined because all {constant} are equal" in caplog.text


def test_metrics_combine():
    combined = evaluate.combine([load_metric(name) for name in ("accuracy", "f1", "matthews_correlation")])
    together = combined.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert together == {name: compute(name, PREDICTIONS, REFERENCES) for name in together}
    assert list(together) == ["accuracy", "f1", "matthews_correlation"]


def test_module_names_are_the_registered_names():
    assert {name: load_metric(name).name for name in METRICS} == {name: name for name in METRICS}


def test_batches_can_be_added_one_by_one():
    metric = load_metric("accuracy")
    metric.add_batch(predictions=PREDICTIONS[:3], references=REFERENCES[:3])
    metric.add_batch(predictions=PREDICTIONS[3:], references=REFERENCES[3:])
    assert metric.compute() == {"accuracy": compute("accuracy", PREDICTIONS, REFERENCES)}


def test_nothing_is_written_to_the_cache(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "cache")
    for name, metric in METRICS.items():
        tokens = [{"nll": 1.0, "right": 1}, {"nll": 0.5, "right": 0}]
        compute(name, *((tokens, [1, 2]) if metric.of == "tokens" else ([0, 1, 1], [1, 1, 0])))
    assert list(tmp_path.iterdir()) == []


def test_threads_do_not_disturb_each_other():
    results = {}

    def work(index):
        references = [index % 2] * (index + 1) + [1 - index % 2]
        results[index] = compute("accuracy", [index % 2] * (index + 2), references)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: (index + 1) / (index + 2) for index in range(8)}


def test_load_metric_names_the_nearest():
    with pytest.raises(RecipeError, match=r"one of accuracy, .*, got 'pearsons'; did you mean 'pearson'\?"):
        load_metric("pearsons")


def test_check_metrics_reports_all_problems_at_once():
    with pytest.raises(RecipeError, match="2 problems") as raised:
        check_metrics(["pearson", "acuracy", "f1"], regression=False)
    first, second = raised.value.problems
    assert first == (
        "the metrics of a classifier must be among accuracy, f1, matthews_correlation, got 'pearson', "
        "which is for numbers"
    )
    assert "did you mean 'accuracy'?" in second


def test_check_metrics_refuses_accuracy_of_a_regression():
    with pytest.raises(RecipeError, match="of a regression must be among pearson, spearman, got 'accuracy'"):
        check_metrics(["accuracy"], regression=True)


@pytest.mark.parametrize("regression", [True, False])
def test_default_metrics_fit(regression):
    names = default_metrics(regression=regression)
    assert names
    check_metrics(names, regression=regression)
