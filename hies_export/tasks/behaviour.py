"""Define how models predict: which output, how units are scored by it, and when two predictions are the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..model.sentence import Similarity
    from .predictions import Predictions


class Predicted(ABC):
    """What a model predicts for the samples of some batches, on the CPU.

    Attributes:
        kind: What metrics judge in it, the `of` of those that fit.
    """

    kind: ClassVar[str]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    @abstractmethod
    def decided(self) -> Tensor:
        """What is predicted, as `Behaviour.references` gives labels."""

    @property
    def sample_of(self) -> Tensor | None:
        """The sample of every prediction, (predictions,) int64; None if each has its own."""
        return None

    @abstractmethod
    def same(self, other: Any) -> Tensor:
        """Return which predictions another model shares, (predictions,) bool."""

    def check_samples(self, one: Sequence[int], two: Sequence[int]) -> None:
        """Refuse, by a DataError, to compare predictions of other samples, told by how many each sample has."""
        if [*one] != [*two] or not one:
            raise DataError(
                f"stability compares predictions of the same samples, got {sum(one)} and {sum(two)} {self.kind} of "
                f"{len(one)} and {len(two)}"
            )

    @abstractmethod
    def table(self, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return what metrics of `kind` compare: predictions and references of (samples,)."""


class Behaviour(ABC):
    """How models predict, how their units are scored by it, and how their predictions are judged.

    By default there is one row of logits for each sample, (samples, labels).

    Attributes:
        predicts: Name of what is predicted. Metrics that are of this fit.
        metrics: Names of the usual metrics of rows that stand alone; the first one is the quality.
        of_rows: What rows that belong together are to each other -> the usual metrics of their rankings.
        word: A report's word for one prediction.
        output_names: The outputs that are the prediction; if there are several, they are stacked on axis 1.
        repeats: How often every sample is scored, each time by another loss.
        similarity: By what embeddings are compared.
    """

    predicts: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    of_rows: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    word: ClassVar[str] = "prediction"
    output_names: ClassVar[tuple[str, ...]] = ("logits",)
    repeats: ClassVar[int] = 1
    similarity: Similarity = "cosine"

    def output(self, found: Any) -> Tensor:
        """Return, of the outputs of a model, the one that is its prediction."""
        return stacked([getattr(found, name) for name in self.output_names])

    def prediction(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what a model predicts for a batch, on the model's device; its labels are left out."""
        from ..data.batches import inputs_of

        device = next(model.parameters()).device
        inputs = {key: value.to(device) if hasattr(value, "to") else value for key, value in inputs_of(batch).items()}
        return self.output(model(**inputs))

    def canonical(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch that a user gave as readers give it: what is to be predicted is in `labels`."""
        return dict(batch)

    # How units are scored.

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the loss of a batch without labels is that of what the model predicts itself: `own_labels`."""
        return True

    @abstractmethod
    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return what the model predicts for a batch, as labels of its loss."""

    def losses(self, labels: Tensor) -> Tensor:
        """Return how many of the losses whose mean is the model's belong to each sample, (batch,): by default one."""
        import torch

        return torch.ones(len(labels))

    def loss_inputs(self, labels: Tensor) -> dict[str, Tensor]:
        """Return labels by the names under which the model takes them."""
        return {"labels": labels}

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

    # How predictions are judged.

    def options(self, *, tolerance: float | None, threshold: float) -> Behaviour:
        """Return the same with the options of a recipe's `evaluation`; only numbers and label sets have any."""
        return self

    def tolerance_on(self, dense: Any) -> float | None:
        """Return how far predictions may be from the dense model's and be the same; None if they must be equal."""
        return None

    def check(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Refuse, by a DataError, batches in which there is nothing to predict; by default, every row is predicted."""
        return

    def kept(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return what is kept of the prediction of a batch; NaN in it must reach one of these tensors."""
        return (output,)

    def joined(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Mapping[str, Tensor]]) -> Predictions:
        """Return the predictions of all batches, in their order, from what was kept of each."""
        import torch

        # Outside inference mode, so that the result may take part in a backward pass.
        return torch.cat([logits for (logits,) in kept])

    def references(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the labels of batches in one tensor, by default (samples,)."""
        import torch

        return torch.cat([batch["labels"] for batch in batches]).cpu()

    # Rows of logits have no methods of their own, so a behaviour of these says what they mean.

    def decided(self, predictions: Any) -> Tensor:
        """Return what is predicted, as `references` returns labels."""
        decided: Tensor = predictions.decided
        return decided

    def same(self, dense: Any, other: Any) -> Tensor:
        """Return which predictions are the same, (predictions,) bool; DataError if they are of other samples."""
        same: Tensor = dense.same(other)
        return same

    def samples(self, predictions: Any) -> Tensor | None:
        """Return the sample of every prediction, (predictions,) int64; None if each has its own."""
        return getattr(predictions, "sample_of", None)

    def table(self, predictions: Any, references: Tensor) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Return what metrics compare, predictions and references of (samples,), and their options."""
        return *predictions.table(references), {}

    def judged_as(self, predictions: Any) -> str:
        """Return the name of what metrics judge in predictions."""
        return getattr(predictions, "kind", self.predicts)

    def usual_metrics(
        self, *, rows: str | None = None, answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return the names of the usual metrics; the first one is the quality.

        `rows` says what rows that belong together are to each other, `answers` whether the rows have prompts and
        answers, and `choices` whether the answers are chosen.
        """
        return self.metrics if rows is None else self.of_rows[rows]


def stacked(outputs: Sequence[Any]) -> Any:
    """Return the only output, or several stacked on axis 1."""
    if len(outputs) == 1:
        return outputs[0]
    import torch

    return torch.stack([torch.as_tensor(output) for output in outputs], dim=1)
