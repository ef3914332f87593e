"""What classifiers and regressions have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from .task import Behaviour, Prediction

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Classes(Behaviour):
    """One prediction per sample, from logits, (batch, classes): the likeliest class, or numbers of a regression.

    A batch with the key `group` is one of candidates for a reranker, whose loss is the logit itself.
    """

    of_rows: ClassVar[Mapping[str, tuple[str, ...]]] = {"graded": ("ndcg@10", "mrr@10"), "groups": ("own_ndcg@10",)}

    def replaces_labels(self, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the predicted class replaces labels: not of a reranker's candidates."""
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
        """Return the logit of each of a reranker's candidates, (batch,) float32."""
        return output.float()[:, 0]

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the margin of the predicted class over the runner-up, or the output of a regression, (batch,)."""
        from ..data.targets import is_regression

        if is_regression(model.config):
            return output.float().sum(-1)
        best, second = output.float().topk(2, dim=-1).values.unbind(-1)
        return best - second

    def prediction(self, *, regression: bool = False) -> Prediction:
        """Return "classes", or "numbers" of a regression."""
        return "numbers" if regression else "classes"

    def usual_metrics(
        self, *, regression: bool = False, answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return accuracy, or the correlations of a regression."""
        return ("pearson", "spearman") if regression else ("accuracy",)
