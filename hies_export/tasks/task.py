"""Define what a task is: what its models read, what they predict, and what scores and reports make of that."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..data.reader import Reader

Prediction = Literal["classes", "numbers", "tokens", "embeddings"]
# The fields of a recipe's `data` that name columns.
COLUMNS = ("text", "image", "prompt", "answer", "query", "document", "label", "group")


def column_sets(*columns: str) -> tuple[frozenset[str], ...]:
    """Return sets of `COLUMNS`, each given as words."""
    return tuple(frozenset(names.split()) for names in columns)


class Behaviour(ABC):
    """How models predict, and how their units are scored by it.

    Attributes:
        output_name: The model's output that is the prediction.
        repeats: How often every sample is scored, each time by another loss.
    """

    output_name: ClassVar[str] = "logits"
    repeats: ClassVar[int] = 1

    def output(self, found: Any) -> Tensor:
        """Return, of the outputs of a model, the one that is its prediction."""
        prediction: Tensor = getattr(found, self.output_name)
        return prediction

    def replaces_labels(self, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the loss of a batch without labels is that of what the model predicts itself: `own_labels`."""
        return True

    @abstractmethod
    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return what the model predicts for a batch, as labels of its loss."""

    @abstractmethod
    def losses(self, labels: Tensor) -> Tensor:
        """Return how many of the losses whose mean is the model's belong to each sample, (batch,)."""

    def unlabelled_loss(self, output: Tensor, index: int) -> Tensor:
        """Return the loss of each sample where no labels are and none replace them, (batch,) float32.

        `index` is the number of the batch.
        """
        raise NotImplementedError

    @abstractmethod
    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the number of each sample that greedy removal keeps, (batch,) float32.

        `output` is the prediction, and `index` the number of the batch.
        """


class Task(Behaviour):
    """A task that a recipe may name.

    Attributes:
        name: The name, which is also the Hub's.
        auto_class: Name of the Auto class of transformers that loads its models.
        ort_class: Name of the class of optimum.onnxruntime that runs its export, if there is one.
        columns: The sets of `COLUMNS` that go together.
        needs: These columns, in words.
        text_columns: How many columns `text` may name.
        text: Whether its models read text.
        images: Whether they read images.
        generative: Whether they predict text, token by token, rather than a class.
        may_regress: Whether one with one label predicts a number rather than a class.
        embeds: Whether they embed texts.
        word: A report's word for one prediction.
        of_rows: What rows that belong together are to each other -> the usual metrics of their rankings.
        usual_rows: What they are by default; None if rows stand alone.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    ort_class: ClassVar[str | None] = None
    columns: ClassVar[tuple[frozenset[str], ...]]
    needs: ClassVar[str]
    text_columns: ClassVar[int] = 1
    text: ClassVar[bool] = True
    images: ClassVar[bool] = False
    generative: ClassVar[bool] = False
    may_regress: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    word: ClassVar[str] = "prediction"
    of_rows: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    usual_rows: ClassVar[Literal["texts"] | None] = None

    @property
    def in_parts(self) -> bool:
        """Whether its models are exported in parts, so that there is no single graph to time."""
        return self.text and self.images

    @property
    @abstractmethod
    def reader_class(self) -> type[Reader]:
        """The class that turns its rows into batches."""

    def reader(self, **fields: Any) -> Reader:
        """Return the reader of its rows, with the fields it is given.

        It reads with a copy of the processor: calling a tokenizer changes how it cuts and pads, which it would be saved
        with.
        """
        return self.reader_class(task=self, **{**fields, "processor": copy.deepcopy(fields.get("processor"))})

    def refusal(self, data: Any) -> str | None:
        """Return why the columns named by the fields of `data` cannot be read; None if they can."""
        given = {name for name in COLUMNS if getattr(data, name)}
        if given in self.columns and len(data.text) <= self.text_columns:
            return None
        surplus = " or ".join(f"data.{name}" for name in sorted(given.difference(*self.columns)))
        return f"{self.name} needs {self.needs}" + (f" and no {surplus}" if surplus else "")

    @abstractmethod
    def prediction(self, *, regression: bool = False) -> Prediction:
        """Return what a model predicts: "classes", "numbers" if it is a regression, "tokens" or "embeddings"."""

    @abstractmethod
    def usual_metrics(
        self, *, regression: bool = False, answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return the names of the metrics of rows that stand alone; the first one is the quality.

        `answers` says whether they have prompts and answers, and `choices` whether the answers are chosen.
        """
