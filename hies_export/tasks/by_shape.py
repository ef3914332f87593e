"""What is assumed of models whose class belongs to no task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import are_tokens
from .behaviour import Behaviour, Predicted
from .classes import Classes, classifier
from .feature_extraction import Embeddings
from .predictions import Predictions
from .tokens import Tokens

_TOKENS, _CLASSES, _EMBEDDINGS = Tokens(), Classes(), Embeddings()


class ByShape(Behaviour):
    """Outputs are told by their name, and logits and labels by their shape: of `Tokens`, or else of a classifier."""

    predicts = _CLASSES.predicts
    metrics = _CLASSES.metrics

    def output(self, found: Any) -> Tensor:
        """Return the embeddings, or else the logits."""
        return _EMBEDDINGS.output(found) if hasattr(found, _EMBEDDINGS.output_names[0]) else super().output(found)

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the batch is none of candidates for a reranker, and the model no regression."""
        return classifier(model.config).replaces_labels(model, batch)

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest class or the labels of each sample, or the likeliest tokens."""
        return (classifier(model.config) if output.dim() == 2 else _TOKENS).own_labels(model, batch, output)

    def losses(self, labels: Tensor) -> Tensor:
        """Return one for each sample, or the number of its label tokens."""
        return _TOKENS.losses(labels) if are_tokens(labels) else super().losses(labels)

    def unlabelled_loss(self, output: Tensor, index: int) -> Tensor:
        """Return the only logit of each sample."""
        return _CLASSES.unlabelled_loss(output, index)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the effect on tokens, or on what a classifier of this configuration predicts."""
        return (_TOKENS if output.dim() == 3 else classifier(model.config)).effect(model, batch, output, index)

    def check(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Refuse samples without a label token, if labels are tokens."""
        _TOKENS.check([batch for batch in batches if _of_tokens(batch)])

    def kept(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return logits, or what is kept of tokens."""
        return _TOKENS.kept(output, batch) if _of_tokens(batch) else super().kept(output, batch)

    def joined(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Mapping[str, Tensor]]) -> Any:
        """Return logits, or predictions of tokens."""
        return _TOKENS.joined(kept, batches) if _of_tokens(batches[0]) else super().joined(kept, batches)

    def references(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return labels, or label tokens."""
        return _TOKENS.references(batches) if _of_tokens(batches[0]) else super().references(batches)

    def decided(self, predictions: Predictions) -> Tensor:
        """Return what is predicted: tokens, or classes."""
        return _of(predictions).decided(predictions)

    def same(self, dense: Predictions, other: Predictions) -> Tensor:
        """Return which predictions are the same."""
        return _of(dense).same(dense, other)

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Return what metrics compare."""
        return _of(predictions).table(predictions, references)


def _of(predictions: Predictions) -> Behaviour:
    return _TOKENS if isinstance(predictions, Predicted) else _CLASSES


def _of_tokens(batch: Mapping[str, Tensor]) -> bool:
    return "labels" in batch and are_tokens(batch["labels"])


BY_SHAPE = ByShape()
