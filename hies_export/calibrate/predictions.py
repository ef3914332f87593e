"""Say what a model predicts for each sample, as one number whose gradient shows what matters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.targets import IGNORED, is_regression, predicted_positions
from ..errors import DataError


def predictions(model: PreTrainedModel, batch: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Return the prediction of each sample, (batch,) float32.

    The prediction of a regressor is its output. That of a classifier is the margin of the predicted class over the
    runner-up. That of a language model is the log-probability of the labels, summed over their positions; without
    labels, that of the text itself. (The log-probability of the model's own choice is less useful: the model is nearly
    certain of it, so its gradient is small. Perplexity was 12.2 instead of 9.4 in dev/LOG.md.)

    `logits` are (batch, classes), or (batch, tokens, vocabulary) of a language model.
    """
    if logits.dim() == 3:
        return _log_probabilities(logits, text_labels(model, batch).to(logits.device))
    if is_regression(model.config):
        return logits.float().sum(-1)
    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    return best - second


def text_labels(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the labels of a language model's batch, (batch, tokens): by default its own tokens.

    Those are all real tokens that follow a real one, but none that stands for a part of an image.
    """
    if "labels" in batch:
        return batch["labels"]
    if "input_ids" not in batch:
        raise DataError(f"a language model's batch must have labels or input_ids, got {', '.join(batch)}")
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids)).bool()
    counted = real.clone()
    counted[:, 1:] &= real[:, :-1]  # with padding on the left, nothing real predicts the first token
    image = getattr(model.config, "image_token_id", None)
    if image is not None:
        counted &= ids != image
    return ids.where(counted, IGNORED)


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each sample's labels, (batch, tokens), -100 where there is none: (batch,)."""
    judged = predicted_positions(labels)
    wanted = labels[:, 1:][judged][:, None]
    found = logits[:, :-1][judged].float().log_softmax(-1).gather(-1, wanted)[:, 0]  # (judged tokens,)
    sample = judged.nonzero()[:, 0]
    return torch.zeros(len(logits), device=logits.device).index_add(0, sample, found)
