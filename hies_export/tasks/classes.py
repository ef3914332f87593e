"""What classifiers and regressions have in common, and what their problem types make of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .task import Behaviour, Prediction

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Classes(Behaviour):
    """One prediction per sample, from logits, (batch, classes): the likeliest class.

    A batch with the key `group` is one of candidates for a reranker, whose loss is the logit itself.
    """

    of_rows: ClassVar[Mapping[str, tuple[str, ...]]] = {"graded": ("ndcg@10", "mrr@10"), "groups": ("own_ndcg@10",)}

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the prediction replaces labels: not of a reranker's candidates."""
        from ..data.targets import GROUP_KEY

        return GROUP_KEY not in batch

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest class of each sample, (batch,)."""
        return output.argmax(-1)

    def losses(self, labels: Tensor) -> Tensor:
        """Return one for each sample, (batch,)."""
        import torch

        return torch.ones(len(labels))

    def unlabelled_loss(self, output: Tensor, index: int) -> Tensor:
        """Return the only logit of each sample, (batch,) float32."""
        return output.float()[:, 0]

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the margin of the predicted class over the runner-up, (batch,)."""
        best, second = output.float().topk(2, dim=-1).values.unbind(-1)
        return best - second

    def prediction(self, config: Any) -> Prediction:
        """Return "classes", "labels" or "numbers", by the problem type."""
        from ..data.targets import predicts

        return predicts(config)

    def usual_metrics(
        self, *, predicts: Prediction = "classes", answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return accuracy, the F1 of label sets, or the correlations of a regression."""
        return {"labels": ("f1_micro", "subset_accuracy"), "numbers": ("pearson", "spearman")}.get(
            predicts, ("accuracy",)
        )


class Labels(Classes):
    """A set of labels per sample: those whose logits, of (batch, labels), are above 0."""

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return 1 for each label of a sample's set and 0 for all others, (batch, labels)."""
        return (output > 0).to(output.dtype)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the logits of each sample, `projected` by its own signs, (batch,): every label has its own answer."""
        from .feature_extraction import projected

        return projected(output, index)


class Numbers(Classes):
    """A number per sample, the only logit, which is its own loss without labels.

    Against its own predictions the loss of a regression has no gradient.
    """

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return False."""
        return False

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the number itself, (batch,)."""
        return output.float()[:, 0]


# How a classifier behaves whose problem type makes something else of its logits than classes.
BY_PREDICTION: Mapping[str, Classes] = {"labels": Labels(), "numbers": Numbers()}
