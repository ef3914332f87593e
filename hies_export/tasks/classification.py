"""A class, a set of labels, a number or a rank: for a text, a pair of texts, or an image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, get_args

from ..equal import SAME_CODE
from ..errors import DataError, RequestError, quoted, refusing
from ..late import PreTrainedModel, Tensor, datasets, np, torch
from .labels import ClassNames, read_label_sets, read_labels
from .late import Batch, data
from .registry import register_task
from .task import Predictions, Task, Use, batched, random_projection

# What is predicted for a sample as a whole, see `problem_of`.
Classified = Literal["classes", "labels", "numbers"]
CLASSIFIED: tuple[str, ...] = get_args(Classified)
# How far two numbers of a regression may be apart and count as the same, as a share of the standard deviation of the
# dense model's. On STS-B, whose labels go from 0 to 5 with a standard deviation of 1.5, it is 0.25.
SHARE_OF_SPREAD = 1 / 6
# What the label of a candidate says.
_GRADE = "how much a candidate is wanted"


def problem_of(config: Any) -> Classified:
    """Return what a classifier's configuration makes of its logits, as the losses of transformers do.

    With "classes", the largest logit is the answer. With "labels" (multi_label_classification), each logit says by
    itself whether its label applies; there may be a single one. With "numbers", a regression, the only logit is the
    answer. Without a problem type, one label means a regression, and more mean classes. A RequestError refuses other
    types, and one that does not suit the number of labels.
    """
    problem, count = getattr(config, "problem_type", None), config.num_labels
    if problem == "multi_label_classification":
        return "labels"
    if problem == "single_label_classification" and count == 1:
        raise RequestError(
            "problem_type single_label_classification needs two labels or more, but the model has 1; set "
            "multi_label_classification for a yes or no, or regression for a number or a rank"
        )
    if problem == "regression" and count != 1:
        raise RequestError(f"a regression must have one label, but the model has {count}")
    if problem not in (None, "regression", "single_label_classification"):
        raise RequestError(
            "problem_type must be regression, single_label_classification or multi_label_classification, got "
            f"{quoted(problem)}; correct the model's config"
        )
    return "numbers" if count == 1 else "classes"


class Classification(Task):
    """One prediction per sample, from logits, (batch, labels): the likeliest class, a set of labels, or a number.

    Labels are classes, (batch,) int64, label sets, (batch, labels) float32, or numbers, (batch,) float32. A batch with
    the key `group` is one of candidates for a reranker, whose loss is the logit itself.
    """

    classifies = True
    of_rows: ClassVar = {"graded": ("ndcg@10", "mrr@10"), "groups": ("own_ndcg@10",)}

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.predicts = problem_of(config)
        if self.predicts == "labels":
            self.metrics = ("f1_micro", "subset_accuracy")
            # A set of one label at most is a yes or no.
            self.word = Task.word if config.num_labels == 1 else "label set"
        else:
            self.metrics = ("accuracy",) if self.predicts == "classes" else ("pearson", "spearman")

    @abstractmethod
    def inputs(self, samples: datasets.Dataset, rows: list[int]) -> Batch:
        """Return the model's inputs for the samples in these rows."""

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse rows without a label that the model knows."""
        if self.columns.label:
            self._labels(rows)

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of the model's inputs and `targets`."""
        targets = self.targets(samples, use)
        for rows in batched(range(len(samples)), size):
            yield self.inputs(samples, rows) | {key: values[rows] for key, values in targets.items()}

    def targets(self, samples: datasets.Dataset, use: Use) -> Batch:
        """Return what batches have of the samples beside inputs: `labels`, if there is a column of them."""
        return {"labels": self._labels(samples)} if self.columns.label else {}

    def _labels(self, rows: datasets.Dataset) -> Tensor:
        """Return the labels of all rows, in the form and dtype that the class describes."""
        column, numbers = str(self.columns.label), self.predicts == "numbers"
        if self.predicts == "labels":
            return read_label_sets(rows, column=column, config=self.config)
        labels = read_labels(rows, column=column, config=self.config, numbers=numbers)
        return torch.tensor(labels, dtype=torch.float32 if numbers else torch.int64)

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch with numbers and label sets as float32; a DataError refuses labels unfit for the model."""
        if "labels" not in batch:
            return dict(batch)
        labels, count = batch["labels"], self.config.num_labels
        if self.predicts == "labels":
            fit = labels.shape[1:] == (count,) and bool(((labels == 0) | (labels == 1)).all())
            needed = f"0 or 1 for each of {count} labels"
        else:
            fit = labels.dim() == 1
            needed = f"one {'class' if self.predicts == 'classes' else 'number'} for each sample"
        if not fit:
            raise DataError(f"labels must be {needed}, but a batch has {labels.dtype} of shape {tuple(labels.shape)}")
        if self.predicts == "classes":
            known = len(ClassNames(self.config).names)
            data.check_numbers(labels, known, "labels", "a batch", dtypes=(torch.int64,))
            return dict(batch)
        return {**batch, "labels": labels.float()}

    def own_labels(self, model: PreTrainedModel, batch: Batch, output: Tensor) -> Tensor:
        """Return the likeliest class of each sample, (batch,), or 1 or 0 for each label, (batch, labels)."""
        if self.predicts == "labels":
            return (output > 0).to(output.dtype)  # a label is likelier than not
        return super().own_labels(model, batch, output)

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return the margin of the predicted class over the runner-up, or the number itself, (batch,)."""
        if self.predicts == "classes":
            return super().effect(model, batch, output, number)
        return random_projection(output, number)  # of a label set, each logit is an answer of its own

    def decide(self, predictions: Predictions) -> Tensor:
        """Return classes, (samples,) int64, which labels apply, (samples, labels) bool, or numbers, (samples,)."""
        if self.predicts == "labels":
            return predictions.values > 0
        return predictions.values.flatten() if self.predicts == "numbers" else super().decide(predictions)

    def tolerance_on(self, dense: Predictions) -> float | None:
        """Return by how much numbers may differ from the dense model's and be the same; None for other predictions."""
        if self.predicts != "numbers":
            return None
        if self.tolerance is not None:
            return self.tolerance
        numbers = dense.values.double()
        spread = numbers.std(correction=0).item() * SHARE_OF_SPREAD
        rounding = SAME_CODE * numbers.abs().max().item()
        return float(f"{max(spread, rounding):.3g}")  # three digits are enough to tell

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return what is predicted and what is right: classes, (samples,) int64; numbers, (samples,) float64; or label
        sets, (samples, labels) bool.
        """
        decided = self.decide(predictions)
        if self.predicts == "numbers":
            decided, references = decided.double(), references.double()
        elif self.predicts == "labels":
            references = references.bool()
        return decided.numpy(), references.numpy()


@register_task
class TextClassification(Classification):
    """Classifiers and regressions of texts, and rerankers of pairs of texts.

    With a column `group`, the model is a reranker. Its batches have no labels, but `group` (batch,) int64, the number
    of each row's query; to judge, and with a column `label`, also `grades` (batch,) float32, how much each candidate is
    wanted.
    """

    name = "text-classification"
    auto_class = "AutoModelForSequenceClassification"
    ort_class = "ORTModelForSequenceClassification"
    reads = ("text", "text label", "text group", "text group label")
    needs = "data.text (one or two columns)"
    text_columns = of_item = 2

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse rows without a label that the model knows, or candidates without a query or a grade."""
        group = self.columns.group
        if group is None:
            super().check_targets(rows)
            return
        if self.config.num_labels != 1:
            raise DataError(
                f"data.group is for rerankers, whose model has one label, but this one has {self.config.num_labels}; "
                "leave data.group out"
            )
        if not data.has_one_value(rows, group):
            given = data.kind_of(rows.features[group])
            raise DataError(f"the column {group!r} must hold a text or a number per row, got {given}")
        must = f"every row must have a {group!r}"
        data.check_each(rows, group, lambda value: value is not None and str(value).strip(), must, "leave it out")
        if self.columns.label:
            data.read_numbers(rows, column=self.columns.label, what=_GRADE)

    def targets(self, samples: datasets.Dataset, use: Use) -> Batch:
        """Return `labels`; for a reranker `group` instead and, to judge or to be timed, `grades`."""
        if self.columns.group is None:
            return super().targets(samples, use)
        queries = samples[self.columns.group][:]
        number_of = {query: number for number, query in enumerate(dict.fromkeys(queries))}
        targets = {data.GROUP_KEY: torch.tensor([number_of[query] for query in queries])}
        if use in ("judge", "time") and self.columns.label:
            grades = data.read_numbers(samples, column=self.columns.label, what=_GRADE)
            targets["grades"] = torch.tensor(grades, dtype=torch.float32)
        return targets

    def inputs(self, samples: datasets.Dataset, rows: list[int]) -> Batch:
        """Return what the tokenizer gives for texts or pairs of texts, (batch, longest), int64."""
        texts = samples.select_columns(list(self.columns.text))[rows]
        columns = (texts[name] for name in self.columns.text)
        return data.encoded(self.processor, self.config, *columns, max_length=self.columns.max_length)


@register_task
class ImageClassification(Classification):
    """Classifiers of images."""

    name = "image-classification"
    auto_class = "AutoModelForImageClassification"
    ort_class = "ORTModelForImageClassification"
    reads = ("image", "image label")
    needs = "data.image (a column of images)"
    text = False
    images = True

    def inputs(self, samples: datasets.Dataset, rows: list[int]) -> Batch:
        """Return `pixel_values`, (batch, channels of the model, height, width), float32."""
        column, channels = str(self.columns.image), getattr(self.config, "num_channels", 3)
        samples = data.as_images(samples, column)
        images = [data.image_of_row(samples, column, row, channels=channels) for row in rows]
        must = f"the image processor must take images of {channels} channels, as the model does, to one size, and fails"
        with refusing(must, "give the one that the model was trained with, or set what it crops to", DataError):
            inputs = dict(self.processor(images, return_tensors="pt"))
            shape = data.image_shape(inputs)
            if shape is not None and len(shape) == 3 and shape[0] != channels:
                raise ValueError(f"it gives {shape[0]} channels")  # `refusing` makes it a DataError
        return inputs
