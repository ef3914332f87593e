"""The metrics of an evaluation: plain functions of numpy arrays, and those of the `evaluate` library by their name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..entry_points import Registry
from ..errors import DataError, RecipeError, did_you_mean, refusing
from ..late import datasets, evaluate, sklearn_metrics, stats
from ..progress import quiet
from .ranking import RowsKind

Compute = Callable[..., float]
# From predictions and references: a numerator and a denominator for each sample, (samples,) each; see `Metric.terms`.
Terms = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Metric:
    """A metric and what it applies to; see `register_metric`."""

    name: str  # the name recipes give it
    # What it compares: "classes", "labels" (sets of them), "numbers" (of a regression, or the similarities of pairs),
    # "tokens" (of generated text), "characters" (of the same, whose number is known), "words" (their classes), "spans"
    # (answers in a text), "choices" (among answers to a prompt) or "ranking" (of what is relevant). "own words" and
    # "own ranking" compare with the dense model's.
    of: str
    compute: Compute  # the function, of predictions and references; NaN if the metric is undefined
    higher_is_better: bool = True  # whether more is better
    title: str | None = None  # what readers know it by, if that is not its name
    # The numerator and denominator of each sample. The sum of the first over that of the second is the share that the
    # slim model keeps, which a recipe can then promise in place of a share of the predictions. For metrics of rankings,
    # and those that take the dense model's predictions as references.
    terms: Terms | None = None
    counts: str | None = None  # what that share counts, such as "entities"; None: a share of the value

    @property
    def ranks(self) -> bool:
        """Whether it is a metric of rankings."""
        return self.of in ("ranking", "own ranking")

    @property
    def own(self) -> bool:
        """Whether predictions are compared with the dense model's own, so that the dense model's value is 1."""
        return self.of.startswith("own ")


# The metrics below, and those of the `evaluate` library that were asked for in this process.
METRICS: Registry[Metric] = Registry("metrics")


def register_metric(
    name: str,
    *,
    of: str,
    higher_is_better: bool = True,
    title: str | None = None,
    terms: Terms | None = None,
    counts: str | None = None,
) -> Callable[[Compute], Compute]:
    """Return a decorator that registers a function as a metric, for recipes to name. The options are as in `Metric`.

    The function takes two arrays of one entry per sample, predictions and references, and returns a number. They are
    what `Task.table` returns, of a task that predicts what the metric is `of`; for rankings, both models'
    `Rankings.table`. A metric of "classes" also gets `num_labels`, how many classes the model knows.

    If a metric is undefined, return NaN: 0.0 is reported, and a warning is logged once.
    """

    def register(compute: Compute) -> Compute:
        METRICS[name] = Metric(name, of, compute, higher_is_better, title, terms, counts)
        return compute

    return register


def _f1(predictions: np.ndarray, references: np.ndarray, num_labels: int) -> float:
    """Return the F1 of class 1 for two classes; for more, the mean of the F1 of every class that occurs (macro)."""
    average = "binary" if num_labels <= 2 else "macro"
    return float(sklearn_metrics.f1_score(references, predictions, average=average, zero_division=0.0))


def _f1_micro(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the F1 over all labels of all samples together (micro); NaN if no label is predicted or right."""
    total = predictions.sum() + references.sum()
    return float(2 * (predictions & references).sum() / total) if total else math.nan


def _shared_entities(predictions: np.ndarray, references: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numerator and denominator of each sample's F1: twice the right entities, all predicted and labelled."""
    return 2 * predictions["right"], predictions["found"] + references["entities"]


def _entity_f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the F1 of all entities together (micro); one is right if its type and all its words are, as in seqeval."""
    shared, total = _shared_entities(predictions, references)
    return float(shared.sum() / total.sum()) if total.any() else math.nan


def _unless_constant(compute: Compute) -> Compute:
    """Return a correlation as a metric that is NaN, for undefined, if predictions or references are constant."""

    def correlation(predictions: np.ndarray, references: np.ndarray, **_: Any) -> float:
        constant = np.ptp(predictions) == 0 or np.ptp(references) == 0
        return math.nan if constant else compute(predictions, references)

    return correlation


def _matthews(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the Matthews correlation of two arrays of classes."""
    return float(sklearn_metrics.matthews_corrcoef(references, predictions))


def _mean_of(field: str) -> Compute:
    """Return a metric that is the mean of a field of the predictions."""
    return lambda predictions, references: predictions[field].mean()


def _terms_of(field: str) -> Terms:
    """Return `Terms` of a field of `Rankings`: the slim model's value as numerator, the dense one's as denominator."""
    return lambda predictions, references: (predictions[field], references[field])


def _share_equal(field: str) -> Compute:
    """Return a metric that is the share of samples where a field of the predictions equals the reference."""
    return lambda predictions, references: (predictions[field] == references).mean()


def _nats_per_character(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the negative log-likelihood of all labels per character, in nats; comparable between vocabularies."""
    return math.fsum(predictions["nll"]) / predictions["characters"].sum()


# The name, what it is `of`, the title and the function of a metric; messages list them in this order.
_ROWS: tuple[tuple[str, str, str | None, Compute], ...] = (
    ("accuracy", "classes", None, lambda given, wanted, **_: sklearn_metrics.accuracy_score(wanted, given)),
    ("f1", "classes", "F1", _f1),
    ("matthews_correlation", "classes", "Matthews correlation", _unless_constant(_matthews)),
    ("f1_micro", "labels", "micro F1", _f1_micro),
    ("subset_accuracy", "labels", "subset accuracy", lambda given, wanted: (given == wanted).all(-1).mean()),
    ("pearson", "numbers", "Pearson", _unless_constant(lambda *both: stats.pearsonr(*both).statistic)),
    ("spearman", "numbers", "Spearman", _unless_constant(lambda *both: stats.spearmanr(*both).statistic)),
    ("perplexity", "tokens", None, lambda given, wanted: np.exp(math.fsum(given["nll"]) / wanted.sum())),
    ("nats_per_character", "characters", "nats per character", _nats_per_character),
    ("token_accuracy", "tokens", "token accuracy", lambda given, wanted: given["right"].sum() / wanted.sum()),
    # All label tokens of a sample are predicted, so greedy decoding gives exactly the answer.
    ("exact_match", "tokens", "exact matches", _share_equal("right")),
    ("choice_accuracy", "choices", "accuracy of choices", _share_equal("likeliest")),
    ("choice_accuracy_norm", "choices", None, _share_equal("per_character")),
    ("entity_f1", "words", "entity F1", _entity_f1),
    ("word_accuracy", "words", "word accuracy", lambda given, wanted: given["words"].sum() / wanted["words"].sum()),
    # As SQuAD compares words: the F1 with the right answer that shares most, and whether all are the same.
    ("answer_f1", "spans", "answer F1", _mean_of("f1")),
    ("answer_exact", "spans", "exact answers", _mean_of("exact")),
)
for _name, _of, _title, _compute in _ROWS:
    _higher = _name not in ("perplexity", "nats_per_character")
    register_metric(_name, of=_of, title=_title, higher_is_better=_higher)(_compute)

# With the dense model's entities in place of labels, the F1 is the share of entities that both models find.
_SHARED: dict[str, Any] = {"terms": _shared_entities, "counts": "entities"}
register_metric("own_entity_f1", of="own words", title="same entities (F1)", **_SHARED)(_entity_f1)

# Means over the queries; `Rankings` says what each is.
for _name, _of, _title, _field in (
    ("ndcg@10", "ranking", "nDCG@10", "ndcg"),
    ("recall@10", "ranking", None, "recall"),
    ("mrr@10", "ranking", "MRR@10", "mrr"),
    ("own_ndcg@10", "own ranking", "nDCG@10 against the dense ranking", "own_ndcg"),
):
    register_metric(_name, of=_of, title=_title, terms=_terms_of(_field))(_mean_of(_field))


def find_metric(name: str) -> Metric:
    """Return a metric by its name: one of `METRICS`, or one that `evaluate.load` finds, which is then added to them."""
    if name not in METRICS:
        METRICS[name] = _load_from_evaluate(str(name))
    return METRICS[name]


def value_of(
    name: str,
    predictions: np.ndarray,
    references: np.ndarray,
    options: Mapping[str, Any],
    *,
    subject: str = "these predictions",
) -> float:
    """Return the value of a metric of `METRICS`, NaN if undefined; if it fails, a DataError names the `subject`."""
    with refusing(f"the metric {name!r} must give one number for {subject}", kind=DataError):
        return float(METRICS[name].compute(predictions, references, **options))


# Metrics of `evaluate`, by name or by the file name of their script, for which lower is better; it does not say.
_ERRORS = frozenset({"brier_score", "mae", "mape", "mase", "mse", "smape"})


def title_of(name: str) -> str:
    """Return the title of a metric, such as "nDCG@10" for ndcg@10; its name if it has no title or is unknown."""
    title = METRICS[name].title if name in METRICS else None
    return title or name


def counted_by(name: str | None) -> str | None:
    """Return what the kept share of a metric counts, such as "entities"; None if it is a share of its value."""
    return METRICS[name].counts if name is not None and name in METRICS else None


def higher_is_better(name: str) -> bool:
    """Return whether more of a metric is better; loads nothing, so that any finished run can be shown."""
    return METRICS[name].higher_is_better if name in METRICS else Path(name).stem not in _ERRORS


def quality_loss(metric: str, dense: float, other: float) -> float:
    """Return by how much a metric got worse, in its own unit; negative if it got better."""
    worse = dense - other if higher_is_better(metric) else other - dense
    return round(worse, 12)  # 0.88 - 0.87 is slightly more than 0.01 in floats


def _load_from_evaluate(name: str) -> Metric:
    """Load a metric of the `evaluate` library, whose script is executed; a RecipeError refuses an unknown name.

    The name is that of one of its own metrics, `owner/name` of a metric on the Hub, or a local script or its folder.
    An attribute `higher_is_better` of its class says which way is better.
    """
    near = did_you_mean(name, METRICS, cutoff=0.4)
    must = f"a metric must be one of {', '.join(METRICS)}, or one that evaluate.load finds, got {name!r}{near}"
    load = evaluate.load  # imported while it may still talk
    with refusing(must, kind=RecipeError), quiet():
        module = load(name, module_type="metric", keep_in_memory=True)
    of = _kind_of_features(module.features)
    if of is None:
        raise RecipeError(
            f"a metric must compare classes or numbers, one per sample, but {name!r} takes {module.features}"
        )

    def compute(predictions: np.ndarray, references: np.ndarray, num_labels: int | None = None) -> float:
        with quiet():
            values = module.compute(predictions=predictions, references=references)
        if module.name not in values and len(values) != 1:
            raise ValueError(f"it gives {', '.join(values) or 'nothing'}")
        # A metric whose name is not a key gives a single value.
        return float(values[module.name] if module.name in values else next(iter(values.values())))

    return Metric(name, of, compute, getattr(module, "higher_is_better", higher_is_better(name)))


def _kind_of_features(features: Any) -> str | None:
    """Return what a metric of `evaluate` with these features compares: "classes", "numbers", or None for neither."""
    if not isinstance(features, datasets.Features) or set(features) != {"predictions", "references"}:
        return None
    if not all(isinstance(value, datasets.Value) for value in features.values()):
        return None
    dtype = features["predictions"].dtype
    if dtype.startswith(("int", "uint")):
        return "classes"
    return "numbers" if dtype.startswith("float") else None


# Rows that are ranked -> what they are, in words, and what the metrics that fit are `of`.
_RANKED: dict[RowsKind, tuple[str, tuple[str, ...]]] = {
    "queries": ("queries with relevant documents", ("ranking", "own ranking")),
    "pairs": ("pairs of texts with a score", ("numbers", "own ranking")),
    "texts": ("texts alone", ("own ranking",)),
    "graded": ("graded candidates of a reranker", ("ranking", "own ranking")),
    "groups": ("candidates of a reranker without labels", ("own ranking",)),
}
# What a model predicts -> what it is, in words.
_PREDICTING = {
    "words": "classes of words",
    "spans": "answers that are parts of a text",
    "numbers": "a regression",
    "labels": "a multi-label classifier",
    "classes": "a classifier",
    "tokens": "a language model",
    "choices": "choices among answers (data.label)",
}


def check_metrics(
    names: Sequence[str],
    *,
    predicts: str = "classes",
    rows: RowsKind | None = None,
    labels: int | None = None,
    trimmed: bool = False,
) -> None:
    """Refuse, by a RecipeError, metrics that do not exist, or do not fit what the model predicts or what `rows` are.

    With `labels`, how many the model has, metrics of classes, label sets and numbers are also tried on that many.
    With `trimmed`, metrics of characters fit tokens too: models of two vocabularies can only be compared by those.
    """
    by_prediction = _PREDICTING.get(predicts, predicts), (predicts, f"own {predicts}")
    words, kinds = by_prediction if rows is None else _RANKED[rows]
    problems: list[str] = []
    for name in names:
        try:
            metric = find_metric(name)
        except RecipeError as error:
            problems += error.problems
            continue
        if metric.of not in kinds and not (trimmed and predicts == "tokens" and metric.of == "characters"):
            fitting = ", ".join(known for known, other in METRICS.items() if other.of in kinds)
            problems.append(f"the metrics of {words} must be among {fitting}, got {name!r}, which is for {metric.of}")
        elif labels is not None and (problem := _problem_of(metric, labels)):
            problems.append(problem)
    if problems:
        raise RecipeError(problems)


def _problem_of(metric: Metric, labels: int) -> str | None:
    """Return why a metric fails on made-up predictions of `labels` labels; None if it works or is not tried."""
    kind = metric.of.removeprefix("own ")
    classes, sets = np.arange(labels), np.eye(2 * labels, labels, dtype=bool)
    made_up = {
        "classes": (np.tile(classes, 2), np.concatenate([classes, np.roll(classes, 1)])),
        "labels": (sets, np.roll(sets, 1, axis=0)),
        "numbers": (np.array([0.0, 0.25, 0.5, 1.0]), np.array([0.25, 0.25, 0.75, 1.0])),
    }
    if kind not in made_up:
        return None
    options = {"num_labels": labels} if kind == "classes" else {}
    try:
        value_of(metric.name, *made_up[kind], options, subject=f"predictions of {labels} {kind}")
    except DataError as error:
        return str(error)
    return None
