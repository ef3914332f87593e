"""How classifiers and regressions behave, by their problem types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..equal import SAME_CODE
from ..errors import DataError
from .behaviour import Behaviour

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel


# How far two numbers of a regression may be apart and count as the same, as a share of the standard deviation of the
# dense model's. On STS-B, whose labels go from 0 to 5 with a standard deviation of 1.5, it is 0.25.
SHARE_OF_SPREAD = 1 / 6


class Classes(Behaviour):
    """One prediction per sample, from logits, (batch, classes): the likeliest class.

    A batch with the key `group` is one of candidates for a reranker, whose loss is the logit itself.
    """

    predicts = "classes"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    of_rows: ClassVar[Mapping[str, tuple[str, ...]]] = {"graded": ("ndcg@10", "mrr@10"), "groups": ("own_ndcg@10",)}

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the prediction replaces labels: not of a reranker's candidates."""
        from ..data.batches import GROUP_KEY

        return GROUP_KEY not in batch

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest class of each sample, (batch,)."""
        return output.argmax(-1)

    def unlabelled_loss(self, output: Tensor, index: int) -> Tensor:
        """Return the only logit of each sample, (batch,) float32."""
        return output.float()[:, 0]

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the margin of the predicted class over the runner-up, (batch,)."""
        best, second = output.float().topk(2, dim=-1).values.unbind(-1)
        return best - second

    def decided(self, predictions: Tensor) -> Tensor:
        """Return the class of the largest logit, (samples,) int64."""
        return predictions.argmax(-1)

    def same(self, dense: Tensor, other: Tensor) -> Tensor:
        """Return which samples have the same prediction, (samples,) bool."""
        if dense.shape != other.shape or len(dense) == 0:
            raise DataError(
                f"stability compares logits of the same samples, got shapes {tuple(dense.shape)} and "
                f"{tuple(other.shape)}"
            )
        return self._equal(dense, other)

    def _equal(self, dense: Tensor, other: Tensor) -> Tensor:
        return self.decided(dense) == self.decided(other)

    def table(self, predictions: Tensor, references: Tensor) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Return classes, label sets or numbers, and how many classes the model knows."""
        if len(predictions) != len(references):
            raise DataError(
                f"every sample needs a reference, got {len(predictions)} logits and {len(references)} references"
            )
        return *self._compared(self.decided(predictions), references), self._of_metrics(predictions)

    def _compared(self, decided: Tensor, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return decided.numpy(), references.numpy()

    def _of_metrics(self, predictions: Tensor) -> dict[str, Any]:
        return {"num_labels": predictions.shape[-1]}


@dataclass(frozen=True)
class Labels(Classes):
    """A set of labels per sample: those whose logits, of (batch, labels), are above that of the threshold."""

    predicts = "labels"
    metrics = ("f1_micro", "subset_accuracy")
    word = "label set"
    threshold: float = 0.5  # probability, in (0, 1)

    def options(self, *, tolerance: float | None, threshold: float) -> Labels:
        """Return the same with another threshold."""
        return replace(self, threshold=threshold)

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return 1 for each label of a sample's set and 0 for all others, (batch, labels)."""
        return self.decided(output).to(output.dtype)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the logits of each sample, `projected` by its own signs, (batch,): every label has its own answer."""
        from .feature_extraction import projected

        return projected(output, index)

    def decided(self, predictions: Tensor) -> Tensor:
        """Return which labels apply, (samples, labels) bool."""
        return predictions > math.log(self.threshold / (1 - self.threshold))

    def _equal(self, dense: Tensor, other: Tensor) -> Tensor:
        return (self.decided(dense) == self.decided(other)).all(-1)

    def _compared(self, decided: Tensor, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return decided.numpy(), references.bool().numpy()

    def _of_metrics(self, predictions: Tensor) -> dict[str, Any]:
        return {}


class YesOrNo(Labels):
    """A set of one label at most."""

    word = Classes.word


@dataclass(frozen=True)
class Numbers(Classes):
    """A number per sample, the only logit, which is its own loss without labels.

    Against its own predictions the loss of a regression has no gradient.
    """

    predicts = "numbers"
    metrics = ("pearson", "spearman")
    # Largest absolute difference, in units of the label, of two numbers that are the same; None for a share of the
    # dense model's spread.
    tolerance: float | None = None

    def options(self, *, tolerance: float | None, threshold: float) -> Numbers:
        """Return the same with another tolerance."""
        return Numbers(tolerance)

    def tolerance_on(self, dense: Tensor) -> float:
        """Return the largest difference from the dense model's numbers, (samples, 1), of numbers that are the same.

        By default it is a sixth of their standard deviation, to three digits, but no less than what rounding moves.
        """
        if self.tolerance is not None:
            return self.tolerance
        numbers = dense.double()
        spread = numbers.std(correction=0).item() * SHARE_OF_SPREAD
        return float(f"{max(spread, SAME_CODE * numbers.abs().max().item()):.3g}")

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return False."""
        return False

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the number itself, (batch,)."""
        return output.float()[:, 0]

    def decided(self, predictions: Tensor) -> Tensor:
        """Return the numbers, (samples,)."""
        return predictions.flatten()

    def _equal(self, dense: Tensor, other: Tensor) -> Tensor:
        return (self.decided(dense) - self.decided(other)).abs() <= self.tolerance_on(dense)

    def _compared(self, decided: Tensor, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return decided.double().numpy(), references.double().numpy()

    def _of_metrics(self, predictions: Tensor) -> dict[str, Any]:
        return {}


def classifier(config: Any) -> Classes:
    """Return how a classifier behaves, by the problem type of its configuration.

    Raises:
        RequestError: The configuration contradicts itself, see `data.batches.predicts`.
    """
    from ..data.batches import predicts

    kind = predicts(config)
    if kind == "labels":
        return YesOrNo() if config.num_labels == 1 else Labels()
    return Numbers() if kind == "numbers" else Classes()
