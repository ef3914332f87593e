"""The metrics against formulas written out in numpy and against scikit-learn."""

import logging
import math

import numpy as np
import pytest
import sklearn.metrics
import torch

from hies_export.errors import RecipeError
from hies_export.evaluate.judge import compute_metrics
from hies_export.evaluate.metrics import METRICS, check_metrics, default_metrics, find_metric

PREDICTIONS = [1, 0, 1, 1, 0, 1, 0, 0]
REFERENCES = [1, 0, 0, 1, 1, 1, 0, 1]


def compute(name, predictions, references, **options):
    result = METRICS[name].compute(np.array(predictions), np.array(references), **options)
    assert type(result) is float
    return result


def test_f1_of_more_than_two_classes_is_the_macro_mean():
    predictions, references = [0, 1, 2, 2, 1, 0], [0, 2, 2, 2, 1, 1]
    per_class = sklearn.metrics.f1_score(references, predictions, average=None)
    assert compute("f1", predictions, references) == pytest.approx(per_class.mean())
    assert compute("f1", [0, 0, 0], [0, 0, 0]) == 0.0
    # Of a model with three classes also where the third does not occur.
    binary, macro = (compute("f1", PREDICTIONS, REFERENCES, num_labels=number) for number in (2, 3))
    assert binary == sklearn.metrics.f1_score(REFERENCES, PREDICTIONS)
    assert macro == sklearn.metrics.f1_score(REFERENCES, PREDICTIONS, average="macro")
    assert binary != macro


@pytest.mark.parametrize("name", ["pearson", "spearman", "matthews_correlation"])
@pytest.mark.parametrize("constant", ["predictions", "references"])
def test_a_correlation_with_a_constant_is_zero_and_warns(name, constant, caplog):
    values = {"predictions": [1, 0, 2], "references": [0, 1, 1], constant: [1, 1, 1]}
    assert math.isnan(compute(name, **values))
    predictions, references = (torch.tensor(part) for part in values.values())
    regression = METRICS[name].of == "numbers"
    logits = predictions[:, None].float() if regression else torch.nn.functional.one_hot(predictions, 3).float()
    with caplog.at_level(logging.WARNING):
        assert compute_metrics(logits, references, names=[name], regression=regression) == {name: 0.0}
    assert caplog.messages == [f"{name} is undefined because all {constant} are equal: 0.0 is returned"]


def test_an_unknown_metric_is_refused_with_the_nearest_name():
    with pytest.raises(RecipeError, match=r"one of accuracy, .*, got 'pearsons'; did you mean 'pearson'\?"):
        find_metric("pearsons")
    assert "pearsons" not in METRICS


def test_check_metrics_reports_all_problems_at_once():
    with pytest.raises(RecipeError, match="2 problems") as raised:
        check_metrics(["pearson", "acuracy", "f1"], regression=False)
    first, second = raised.value.problems
    assert first == (
        "the metrics of a classifier must be among accuracy, f1, matthews_correlation, got 'pearson', "
        "which is for numbers"
    )
    assert "did you mean 'accuracy'?" in second


def test_default_metrics_fit_and_accuracy_of_a_regression_does_not():
    for regression in (True, False):
        names = default_metrics(regression=regression)
        assert names
        check_metrics(names, regression=regression)
    with pytest.raises(RecipeError, match="of a regression must be among pearson, spearman, got 'accuracy'"):
        check_metrics(["accuracy"], regression=True)
