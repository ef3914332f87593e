"""The metrics of an evaluation: `evaluate.Metric` subclasses that work offline.

They combine with `evaluate.combine`, and their result keys are their names. Nothing is written to disk: the
predictions are kept in memory, so concurrent runs and a read-only home directory do not matter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np
import scipy.stats
import sklearn.metrics

from ..errors import RecipeError, did_you_mean
from ..tasks import TASKS

logger = logging.getLogger(__name__)


class OfflineMetric(evaluate.Metric):
    """Base of the metrics here: predictions and references in memory, no script from the Hub.

    A metric sets what it is `of` and defines `_compute(self, predictions, references, num_labels=None)`.

    Attributes:
        of: What it judges: "classes", "numbers" (of a regression) or "tokens" (of generated text).
        higher_is_better: Whether more is better.
    """

    of: ClassVar[str]
    higher_is_better: ClassVar[bool] = True

    def __init__(self, **options: Any):
        options.setdefault("keep_in_memory", options.get("num_process", 1) == 1)
        super().__init__(**options)

    def of_arrays(self, predictions: np.ndarray, references: np.ndarray, **options: Any) -> dict[str, float]:
        """What `compute` gives, without the Arrow tables it fills and reads on the way: a bootstrap calls it often."""
        return {name: float(value) for name, value in self._compute(predictions, references, **options).items()}

    def _build_data_dir(self) -> str:
        # evaluate makes this folder in the user's cache even when everything stays in memory.
        return self._data_dir_root if self.keep_in_memory else super()._build_data_dir()

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("float64" if self.of == "numbers" else "int64")
        return evaluate.MetricInfo(
            description=str(type(self).__doc__),
            citation="",
            features=datasets.Features({"predictions": value, "references": value}),
        )


METRICS: dict[str, type[OfflineMetric]] = {}


def register_metric(name: str) -> Callable[[type[OfflineMetric]], type[OfflineMetric]]:
    """Add a metric under a name: subclass `OfflineMetric`, define `_compute`, decorate, done.

    `_compute` returns `{name: value}`; `evaluate` names the module itself after the class, in snake case.
    """

    def add(metric: type[OfflineMetric]) -> type[OfflineMetric]:
        METRICS[name] = metric
        return metric

    return add


@register_metric("accuracy")
class Accuracy(OfflineMetric):
    """The share of predictions that equal the reference."""

    of = "classes"

    def _compute(self, predictions: Any, references: Any, num_labels: int | None = None) -> dict[str, float]:
        return {"accuracy": float(sklearn.metrics.accuracy_score(references, predictions))}


@register_metric("f1")
class F1(OfflineMetric):
    """F1 of class 1 for two classes; for more, the mean of the F1 of every class that occurs (macro).

    `num_labels` is the number of classes the model knows; without it, the largest label that occurs decides.
    """

    of = "classes"

    def _compute(self, predictions: Any, references: Any, num_labels: int | None = None) -> dict[str, float]:
        classes = num_labels or max(*predictions, *references) + 1
        average = "binary" if classes <= 2 else "macro"
        score = sklearn.metrics.f1_score(references, predictions, average=average, zero_division=0.0)
        return {"f1": float(score)}


@register_metric("matthews_correlation")
class MatthewsCorrelation(OfflineMetric):
    """Matthews correlation, in [-1, 1]; 0 where all predictions or all references are one class."""

    of = "classes"

    def _compute(self, predictions: Any, references: Any, num_labels: int | None = None) -> dict[str, float]:
        if _constant(predictions, references, name="matthews_correlation"):
            return {"matthews_correlation": 0.0}
        return {"matthews_correlation": float(sklearn.metrics.matthews_corrcoef(references, predictions))}


@register_metric("pearson")
class Pearson(OfflineMetric):
    """Pearson correlation, in [-1, 1]; 0, with a logged warning, where one side is constant."""

    of = "numbers"

    def _compute(self, predictions: Any, references: Any, num_labels: int | None = None) -> dict[str, float]:
        if _constant(predictions, references, name="pearson"):
            return {"pearson": 0.0}
        return {"pearson": float(scipy.stats.pearsonr(predictions, references).statistic)}


@register_metric("spearman")
class Spearman(OfflineMetric):
    """Spearman rank correlation, in [-1, 1]; 0, with a logged warning, where one side is constant."""

    of = "numbers"

    def _compute(self, predictions: Any, references: Any, num_labels: int | None = None) -> dict[str, float]:
        if _constant(predictions, references, name="spearman"):
            return {"spearman": 0.0}
        return {"spearman": float(scipy.stats.spearmanr(predictions, references).statistic)}


class TokenMetric(OfflineMetric):
    """Base of the metrics of generated text; a row is a sample, teacher-forced.

    Predictions are `nll`, the sum of the negative log-likelihoods of the sample's label tokens in nats, and `right`,
    how many of these are the likeliest token; references are how many label tokens there are. They are sums, so that
    neither memory nor a bootstrap depends on the number of tokens.
    """

    of = "tokens"

    def _info(self) -> evaluate.MetricInfo:
        predictions = {"nll": datasets.Value("float64"), "right": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description=str(type(self).__doc__),
            citation="",
            features=datasets.Features({"predictions": predictions, "references": datasets.Value("int64")}),
        )


@register_metric("perplexity")
class Perplexity(TokenMetric):
    """The exponential of the mean negative log-likelihood of all label tokens; lower is better."""

    higher_is_better = False

    def _compute(self, predictions: Any, references: Any, num_labels: int | None = None) -> dict[str, float]:
        nll = math.fsum(sample["nll"] for sample in predictions)
        return {"perplexity": float(np.exp(np.float64(nll / sum(references))))}


@register_metric("token_accuracy")
class TokenAccuracy(TokenMetric):
    """The share of label tokens that are the likeliest one after the tokens before them."""

    def _compute(self, predictions: Any, references: Any, num_labels: int | None = None) -> dict[str, float]:
        return {"token_accuracy": sum(sample["right"] for sample in predictions) / sum(references)}


@register_metric("exact_match")
class ExactMatch(TokenMetric):
    """The share of samples whose label tokens are all predicted: greedy decoding gives exactly the answer."""

    def _compute(self, predictions: Any, references: Any, num_labels: int | None = None) -> dict[str, float]:
        right = [sample["right"] == tokens for sample, tokens in zip(predictions, references, strict=True)]
        return {"exact_match": sum(right) / len(right)}


class Stability(OfflineMetric):
    """The share of predictions that equal the reference model's, which are the references.

    `tolerance` is the largest difference at which numbers count as equal; classes and tokens must be the same.
    """

    of = "numbers"

    def _compute(self, predictions: Any, references: Any, tolerance: float = 0.0) -> dict[str, float]:
        return {"stability": float(np.mean(np.abs(np.subtract(predictions, references)) <= tolerance))}


def _constant(predictions: Any, references: Any, *, name: str) -> bool:
    for what, values in (("predictions", predictions), ("references", references)):
        if np.ptp(values) == 0:
            logger.warning("%s is undefined because all %s are equal: 0.0 is returned", name, what)
            return True
    return False


def load_metric(name: str) -> OfflineMetric:
    """Make a metric by its name.

    Raises:
        RecipeError: no metric has that name; the message gives the nearest one.
    """
    if name not in METRICS:
        raise RecipeError([_unknown(name)])
    return METRICS[name]()


def default_metrics(
    *, regression: bool = False, task: str = "text-classification", answers: bool = False
) -> tuple[str, ...]:
    """Return the names of the metrics to compute when none are asked for; the first one is the quality.

    Args:
        regression: Whether the model predicts a number rather than a class.
        task: The task.
        answers: Whether text is generated in answer to a prompt.
    """
    kind = what_of(task, regression=regression)
    if kind == "tokens":
        return ("exact_match", "perplexity") if answers or TASKS[task].images else ("perplexity",)
    return ("pearson", "spearman") if kind == "numbers" else ("accuracy",)


def check_metrics(names: Sequence[str], *, regression: bool = False, task: str = "text-classification") -> None:
    """Check, before any work, that every metric exists and fits the model.

    Args:
        names: Names of metrics.
        regression: Whether the model predicts a number rather than a class.
        task: The task.

    Raises:
        RecipeError: with all the problems at once.
    """
    kind = what_of(task, regression=regression)
    fitting = ", ".join(name for name, metric in METRICS.items() if metric.of == kind)
    model = {"numbers": "a regression", "classes": "a classifier", "tokens": "generated text"}[kind]
    problems = []
    for name in names:
        if name not in METRICS:
            problems.append(_unknown(name))
        elif METRICS[name].of != kind:
            problems.append(
                f"the metrics of {model} must be among {fitting}, got {name!r}, which is for {METRICS[name].of}"
            )
    if problems:
        raise RecipeError(problems)


def what_of(task: str, *, regression: bool) -> str:
    """What a task's metrics judge: "classes", "numbers" or "tokens"."""
    return TASKS[task].prediction(regression=regression)


def _unknown(name: str) -> str:
    hint = did_you_mean(str(name), METRICS, cutoff=0.4)
    return f"a metric must be one of {', '.join(METRICS)}, got {name!r}{hint}"
