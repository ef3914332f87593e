"""Define what a task is: how rows are read for it, how units are scored by it, and what its models predict."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from ..errors import DataError, NonFiniteError, did_you_mean, listed, quoted
from ..late import PreTrainedModel, Tensor, datasets, np, torch
from .late import Batch, data
from .prompts import template_fields

if TYPE_CHECKING:
    from ..model.text_encoder import Similarity
    from ..recipe.sections import Columns

AnyTask = TypeVar("AnyTask", bound="Task")
Item = TypeVar("Item")

# Samples whose tokens are counted at once.
AT_ONCE = 64
# The fields of a recipe's `data` that name columns.
COLUMNS = ("text", "image", "messages", "prompt", "answer", "query", "document", "label", "group")
# What rows are read for: to score units by their labels, to judge predictions with all that metrics compare, or to time
# rows in their own order.
Use = Literal["score", "judge", "time"]


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for the samples of some batches, on the CPU.

    Attributes:
        kind: What is predicted: the `of` of the metrics that fit.
        values: What is kept of the outputs: logits or an embedding of each sample, (samples, width); log-likelihoods of
            choices, (questions, choices) float64; where an answer begins and ends, (questions, 2); or the likeliest
            token at every label token, or the class of every word, of all samples in order, (values,) int64.
        sample: The sample of each value, (values,) int64, in order; None if each has its own.
        joint: Whether all values of a sample are one prediction, as the tokens of an answer are.
        nll: The negative log-likelihood of each label token, (values,) float32, in nats.
        characters: The length of each choice, (questions, choices), or of all labels of a sample, (samples,), float64.
        contexts: The text that each question is about.
    """

    kind: str
    values: Tensor
    sample: Tensor | None = None
    joint: bool = False
    nll: Tensor | None = None
    characters: Tensor | None = None
    contexts: Sequence[str] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        if self.sample is None:
            return len(self.values)
        return int(self.sample[-1]) + 1 if len(self.sample) else 0

    def per_sample(self, values: Tensor) -> Tensor:
        """Return the sum over each sample, (samples,) float64, of numbers that belong to its values, (values,)."""
        assert self.sample is not None
        return torch.zeros(len(self), dtype=torch.float64).index_add(0, self.sample, values.double())


class Loss(NamedTuple):
    """The sum of all losses of a batch, and how many of them belong to each sample, (batch,)."""

    total: Tensor
    counts: Tensor


class Task(ABC):
    """A task, bound to a model's configuration: how rows are read, how units are scored, what is predicted and judged.

    A task is a subclass with `register_task`. It must have `batches`, `name`, `auto_class`, `needs`, `predicts` and
    `metrics`. All else has a default, for one row of logits per sample, (samples, classes), of which the largest is the
    answer. Recipes are checked against the class attributes, before torch is imported.

    Args:
        config: The configuration of a model. Its labels, problem type, positions and vocabulary are read.
        tolerance: The largest difference of two numbers of a regression that are the same; None for a default.
    """

    name: ClassVar[str]  # in recipes and reports, the Hub's if it has one
    auto_class: ClassVar[str]  # name of the Auto class of transformers that loads its models
    ort_class: ClassVar[str | None] = None  # name of the class of optimum.onnxruntime that runs its export
    usage: ClassVar[str | None] = None  # Python that uses a `model` and its `tokenizer`, for the card
    # Sets of fields of a recipe's `data` that it reads, each as in "text label"; none if recipes cannot name the task.
    reads: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[str]  # the same in words
    text_columns: ClassVar[int] = 1  # how many columns `text` may name
    columns_by_type: ClassVar[bool] = True  # whether a column may be read for its type, if no other has it
    rows_together: ClassVar[bool] = False  # whether rows may belong together; then rows, not batches, are held out
    a_row_is_a_sample: ClassVar[bool] = True  # whether every row is one sample; then only the wanted rows are read
    of_item: ClassVar[int] = 0  # how many texts are an item of a list that `prune` reads; 0 if it reads no lists
    text: ClassVar[bool] = True  # whether its models read text
    images: ClassVar[bool] = False  # whether they read images
    generative: ClassVar[bool] = False  # whether they predict text, token by token, rather than a class
    embeds: ClassVar[bool] = False  # whether they embed texts
    classifies: ClassVar[bool] = False  # whether a sample has one of several classes, whose logits say how sure it is
    in_parts: ClassVar[bool] = False  # whether they are exported in parts, so that there is no single graph to time
    decodes_text: ClassVar[bool] = False  # whether llama.cpp runs them: decoders of text alone
    places_by_labels: ClassVar[bool] = False  # whether labels say where predictions are read, so every row needs them
    on_hub: ClassVar[bool] = True  # whether the Hub has pipelines of this name

    predicts: str  # name of what is predicted: metrics that are of this fit
    metrics: tuple[str, ...]  # names of the usual metrics of rows that stand alone; the first one is the quality
    # How rows belong together, such as "queries" (with their documents) or "pairs" -> the usual metrics of rankings.
    of_rows: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    word: str = "prediction"  # a report's word for one prediction
    output_names: ClassVar[tuple[str, ...]] = ("logits",)  # the outputs that are the prediction, stacked on axis 1
    shift: ClassVar[int] = 0  # how many tokens before a label its prediction stands
    repeats: ClassVar[int] = 1  # how often every sample is scored, each time by another loss
    similarity: Similarity = "cosine"  # by what embeddings are compared

    def __init__(self, config: Any, *, tolerance: float | None = None) -> None:
        from ..recipe.sections import Columns

        self.config, self.tolerance = config, tolerance
        self.columns = Columns()
        self.processor: Any = None

    @classmethod
    def refusal(cls, columns: Any) -> str | None:
        """Return why the columns named by the fields of a recipe's `data` cannot be read; None if they can."""
        given = {field for field in COLUMNS if getattr(columns, field)}
        accepted = [set(fields.split()) for fields in cls.reads]
        if given in accepted:
            too_many = len(columns.text) > cls.text_columns
            return f"{cls.name} needs {cls.needs}, got {', '.join(columns.text)}" if too_many else None
        surplus = " or ".join(f"data.{field}" for field in sorted(given.difference(*accepted)))
        return f"{cls.name} needs {cls.needs}" + (f" and no {surplus}" if surplus else "")

    @classmethod
    def usual_columns(cls, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return which columns to read, by the fields of `data`, given all features; None if names leave a choice."""
        return None

    def to_read(self: AnyTask, columns: Columns, processor: Any = None) -> AnyTask:
        """Return a copy of the task that reads these columns with a copy of a tokenizer or processor.

        Calls change how a tokenizer cuts and pads, and it is saved so. Without one, rows can only be checked.
        """
        reader = copy.copy(self)
        reader.columns, reader.processor = columns, copy.deepcopy(processor)
        return reader

    def load(self, split: str, **options: Any) -> datasets.Dataset:
        """Load a row per sample of a split, after `check_rows`; `options` are those of `data.mapped_rows` or `take`."""
        if self.a_row_is_a_sample:
            rows = data.load_rows(split=split, **options, numbered=True, together=self.columns.together)
            self.check_rows(rows)
            return rows
        source = {name: value for name, value in options.items() if name in ("name", "files", "shuffled")}
        drawn = {name: value for name, value in options.items() if name not in source}
        with data.mapped_rows(split=split, **source, numbered=True) as rows:
            self.check_rows(rows)
            return self.draw(rows, **drawn)

    @property
    def columns_of_text(self) -> list[str]:
        """The columns that texts are read from."""
        columns, in_prompt = self.columns, template_fields(self.columns.prompt or "")
        names = (*columns.text, columns.query, columns.document, *columns.messages, *in_prompt, columns.answer)
        return [name for name in dict.fromkeys(names) if name]

    def check_rows(self, rows: datasets.Dataset) -> None:
        """Refuse, by a DataError, rows that the model cannot be fed with, before anything is computed."""
        columns, present = self.columns, data.own_columns(rows)
        if refusal := self.refusal(columns):
            raise DataError(f"{refusal}; the data has {listed(present)}")
        inputs = [*columns.text, *([columns.image] if columns.image else [])]
        others = [column for column in (columns.group, columns.label) if column]
        for column in (*inputs, *self.columns_of_text, *others):
            if column not in rows.column_names:
                raise DataError(
                    f"the data must have the column {quoted(column)}, but it has {listed(present)}"
                    f"{did_you_mean(column, present)}"
                )
        for column in inputs:
            self._check_input(rows, column)
        self.check_targets(rows)

    def _check_input(self, rows: datasets.Dataset, column: str) -> None:
        """Refuse, by a DataError, a column of texts or images that holds something else, or not one in every row."""
        feature = rows.features[column]
        if column == self.columns.image and not data.holds_images(feature):
            raise DataError(
                f"the column {column!r} must hold images, but it holds {data.kind_of(feature)}; write one image in "
                "each row, its bytes and not its path or address"
            )
        if column != self.columns.image and not self.is_text(feature):
            raise DataError(
                f"the column {column!r} must hold text, but it holds {data.kind_of(feature)}; name a column of text"
            )
        # The Arrow table says what is missing without decoding every image.
        values = rows.with_format("arrow")[column][:]
        if values.null_count:
            row = values.is_valid().to_pylist().index(False)
            raise DataError(f"every row must have a {column!r}, but {data.row_name(rows, row)} has none; leave it out")

    def is_text(self, feature: Any) -> bool:
        """Return whether a column may be named in `text`."""
        return data.holds_text(feature)

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse, by a DataError, rows without a label or an answer that the model knows; by default, none."""
        return

    def draw(self, rows: datasets.Dataset, **drawn: Any) -> datasets.Dataset:
        """Turn rows, in their own order, into one row per sample, and take some of these by the options of `take`."""
        samples = rows if self.a_row_is_a_sample else self.samples(rows)
        return data.take(samples, **drawn, together=self.columns.together)

    def samples(self, rows: datasets.Dataset) -> datasets.Dataset:
        """Return one row per sample, where a row is not one; by default, each is."""
        return rows

    def read(self, samples: datasets.Dataset, *, size: int, use: Use = "score") -> list[Batch]:
        """Return samples as batches for `model(**batch)`, in their order."""
        return list(self.batches(samples, size, use)) if len(samples) else []

    def tokens(self, samples: datasets.Dataset) -> Iterator[Tensor]:
        """Yield the tokens, (tokens,) int64, that a model reads of samples or has to predict, without padding."""
        for batch in self.batches(samples, AT_ONCE, "score"):
            yield batch["input_ids"][batch["attention_mask"] != 0]

    @abstractmethod
    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of at most `size` samples, or of the parts in which they are read, in their order.

        They have tensors by the names that the model takes, and `labels` if the data has any. Tensors that say how rows
        belong together have fixed names, see `data/batches.py`.
        """

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch that a user gave as `read` gives it, with `labels`; a DataError refuses unknown ones."""
        return dict(batch)

    def parts(self, batch: Batch) -> list[Batch]:
        """Return a batch divided into batches that one forward pass may take; by default, it is not divided."""
        return [batch]

    def output(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return what a model predicts for the inputs of a batch, on the model's device."""
        device = next(model.parameters()).device
        inputs = data.inputs_of(batch).items()
        outputs = model(**{key: value.to(device) if hasattr(value, "to") else value for key, value in inputs})
        return stack([getattr(outputs, name) for name in self.output_names])

    def own_labels(self, model: PreTrainedModel, batch: Batch, output: Tensor) -> Tensor:
        """Return the labels that the output, (batch, ...), predicts for a batch, in the form that the loss takes."""
        return output.argmax(-1)

    def with_labels(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return the batch with labels: its own, else the model's predictions, if its loss needs labels."""
        # The loss of numbers, embeddings and candidates of a reranker is the output itself.
        if "labels" in batch or self.predicts in ("numbers", "embeddings") or data.GROUP_KEY in batch:
            return dict(batch)
        with torch.no_grad():
            labels = [self.own_labels(model, part, self.output(model, part)) for part in self.parts(batch)]
        return {**batch, "labels": torch.cat(labels)}

    def loss(self, model: PreTrainedModel, batch: Batch, number: int) -> Loss:
        """Return the sum of all losses of a batch, and how many each sample has; `number` is that of the batch.

        With labels, the sum is the model's own mean loss times the number of its terms. Without, a sample's loss is its
        output, projected onto random signs (`random_projection`). A NonFiniteError refuses NaN and infinity.
        """
        if "labels" in batch:
            counts = self.losses(batch["labels"])
            loss = model(**self.loss_inputs(batch["labels"]), **data.inputs_of(batch)).loss
        else:
            counts = torch.ones(data.size_of(batch))
            loss = random_projection(self.output(model, batch), number).mean()
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"the loss of every calibration batch must be finite, but batch {number} gave {loss.item()}; "
                "check the rows of that batch and the model's dtype"
            )
        return Loss(loss * counts.sum().to(loss.device), counts)

    def losses(self, labels: Tensor) -> Tensor:
        """Return how many terms of the model's mean loss belong to each sample, (batch,); by default one."""
        return torch.ones(len(labels))

    def loss_inputs(self, labels: Tensor) -> dict[str, Tensor]:
        """Return labels by the names under which the model takes them."""
        return {"labels": labels}

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return one number per sample, (batch,), whose change greedy removal keeps small.

        By default it is the margin of the largest logit over the second. `number` is that of the batch.
        """
        best, second = output.float().topk(2, dim=-1).values.unbind(-1)
        return best - second

    def next_tokens(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Return which outputs of a language model predict a token of the text, (batch, tokens - shift) bool."""
        raise NotImplementedError

    def check_batches(self, batches: Sequence[Batch]) -> None:
        """Refuse, by a DataError, batches in which there is nothing to predict; by default, none."""
        return

    def keep(self, output: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Return the tensors to keep of the output for a batch; NaN in the output must appear in one of them."""
        return (output,)

    def join(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Batch]) -> Predictions:
        """Return the predictions of all batches, in their order, from what `keep` returned for each."""
        # Outside inference mode, so that the result may take part in a backward pass.
        return Predictions(self.predicts, torch.cat([values for (values,) in kept]))

    def references(self, batches: Sequence[Batch]) -> Tensor:
        """Return the labels of batches in one tensor, by default (samples,)."""
        return torch.cat([batch["labels"] for batch in batches]).cpu()

    def decide(self, predictions: Predictions) -> Tensor:
        """Return what is predicted, in the form of `references`; by default the class of the largest logit."""
        return predictions.values.argmax(-1)

    def same(self, dense: Predictions, other: Predictions) -> Tensor:
        """Return which predictions of the same samples are the same, (predictions,) bool."""
        one, two, tolerance = self.decide(dense), self.decide(other), self.tolerance_on(dense)
        alike = one == two if tolerance is None else (one - two).abs() <= tolerance
        same = alike.reshape(len(dense.values), -1).all(-1)
        return dense.per_sample(~same) == 0 if dense.joint else same

    def tolerance_on(self, dense: Predictions) -> float | None:
        """Return how far the same predictions may be from the dense model's; by default None: they must be equal."""
        return None

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return what metrics compare, predictions and references; by default decisions and labels, (samples,) each."""
        return self.decide(predictions).numpy(), references.numpy()

    def usual_metrics(
        self, *, rows: str | None = None, answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return the names of the usual metrics; the first one is the quality.

        `rows` is a key of `of_rows`, or None; `answers`: whether rows have prompts and answers; `choices`: several.
        """
        return self.metrics if rows is None else self.of_rows[rows]


def stack(outputs: Sequence[Any]) -> Any:
    """Return the only output as it is, or a tensor of several outputs stacked on axis 1."""
    return outputs[0] if len(outputs) == 1 else torch.stack([torch.as_tensor(output) for output in outputs], dim=1)


def random_projection(outputs: Tensor, seed: int) -> Tensor:
    """Return outputs, (samples, dimension), each projected onto random signs of its own, (samples,) float32.

    Over such signs v, the mean of (v . d)^2 is |d|^2, the squared length of a change d of the output. So the gradient
    of one number measures the effect on a whole output. With a single dimension, the output itself is returned.

    Source: Hutchinson, Communications in Statistics 18 (1989), for the signs.
    """
    if outputs.shape[-1] == 1:
        return outputs.float()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, outputs.shape, generator=generator) * 2 - 1
    return (outputs.float() * signs.to(outputs.device)).sum(-1)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield `size` items at a time, at least 1, and the last time maybe fewer."""
    remaining = iter(items)
    while part := list(itertools.islice(remaining, size)):
        yield part
