"""What is assumed of models whose class belongs to no task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..data.targets import are_tokens, predicts
from .classes import BY_PREDICTION, Classes
from .registry import output_names
from .task import Behaviour
from .tokens import Tokens

_CLASSES, _TOKENS = Classes(), Tokens()


class ByShape(Behaviour):
    """Outputs are told by their name, and logits and labels by their shape: of `Tokens`, or else of `Classes`."""

    def output(self, found: Any) -> Tensor:
        """Return the first output that is the prediction of a task, by default the logits."""
        name = next((name for name in output_names() if hasattr(found, name)), self.output_name)
        output: Tensor = getattr(found, name)
        return output

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the batch is none of candidates for a reranker, and the model no regression."""
        return _of_rows(model).replaces_labels(model, batch)

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest class or the labels of each sample, or the likeliest tokens."""
        return (_of_rows(model) if output.dim() == 2 else _TOKENS).own_labels(model, batch, output)

    def losses(self, labels: Tensor) -> Tensor:
        """Return one for each sample, or the number of its label tokens."""
        return (_TOKENS if are_tokens(labels) else _CLASSES).losses(labels)

    def unlabelled_loss(self, output: Tensor, index: int) -> Tensor:
        """Return the only logit of each sample."""
        return _CLASSES.unlabelled_loss(output, index)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the effect on tokens, or on what a classifier of this configuration predicts."""
        return (_TOKENS if output.dim() == 3 else _of_rows(model)).effect(model, batch, output, index)


def _of_rows(model: PreTrainedModel) -> Classes:
    return BY_PREDICTION.get(predicts(model.config), _CLASSES)
