"""Record the inputs of the consumers, and the gradients of the prediction with respect to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.targets import check_label_tokens, is_regression, predicted_positions
from ..errors import DataError, NonFiniteError
from ..model.modes import frozen, without_cache
from ..model.tokens import real_tokens
from ..model.watch import watch
from ..progress import SILENT, Progress
from ..units import PrunableModule


@dataclass(frozen=True)
class LayerEffects:
    """The inputs of one consumer at the real tokens of all samples, and the gradients to them; on CPU.

    Attributes:
        inputs: (tokens, inputs) float32.
        gradients: (tokens, inputs) float32, gradient of the sample's prediction with respect to these inputs.
        sample: (tokens,) int64, the sample that each token belongs to.
        centred: Whether the consumer has a bias, which can absorb the mean of the removed inputs.
    """

    inputs: Tensor
    gradients: Tensor
    sample: Tensor
    centred: bool


@dataclass(frozen=True)
class Effects:
    """Inputs and gradients of all consumers on the calibration samples, for `score_compensated`.

    Attributes:
        layers: Module -> effects of its consumer.
        samples: Number of samples.
    """

    layers: Mapping[str, LayerEffects]
    samples: int


def collect_effects(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    modules: Sequence[PrunableModule],
    *,
    progress: Progress = SILENT,
) -> Effects:
    """Record the inputs of every consumer, and the gradient of the model's prediction with respect to them.

    The prediction of a regressor is its output. That of a classifier is the margin of the predicted class over the
    runner-up. That of a language model is the log-probability of the labels, summed over their positions. (The
    log-probability of the model's own choice is less useful: the model is nearly certain of it, so its gradient is
    small. Perplexity was 12.2 instead of 9.4 in dev/LOG.md.)

    Each batch takes one forward and one backward pass, with every weight frozen. Memory is 8 bytes for each real token
    and input of each consumer, e.g. 150 MB for 8,000 tokens and 6 layers of width 384.

    Args:
        model: A classifier, regressor or language model; its weights, mode and gradients are restored.
        batches: Keyword arguments of the model; padding is excluded by their `attention_mask`. Covariances of hundreds
            of inputs need about 256 samples; with fewer, use a larger ridge.
        modules: From `find_attention`.
        progress: Shows the loop over the batches.

    Returns:
        The inputs and gradients of every consumer, at all real tokens.

    Raises:
        DataError: There is no batch, or a language model's sample has no label token.
        NonFiniteError: A prediction or a gradient is NaN or infinite; the message names the batch.
    """
    if not batches:
        raise DataError("scoring needs at least one sample, got none; raise calibration.samples")
    check_label_tokens(batches)
    parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {module.name: [] for module in modules}
    samples = 0
    consumers = {module.name: module.consumer for module in modules}
    with frozen(model), without_cache(model), watch(model, consumers, gradients=True) as seen, torch.enable_grad():
        for index, batch in enumerate(progress.track(batches, "effects")):
            seen.clear()
            on_device = {key: value.to(model.device) for key, value in batch.items() if key != "labels"}
            logits = model(**on_device).logits
            if logits.dim() == 3:
                if "labels" not in batch:
                    raise DataError("labels must say which tokens of a language model count, but batches have none")
                predictions = _log_probabilities(logits, batch["labels"].to(logits.device))
            else:
                predictions = _predictions(logits, regression=is_regression(model.config))
            read = [(module.name, x) for module in modules for x in seen.inputs[module.name]]
            # Samples are independent, so the gradient of the sum holds each sample's own. An unused layer, such as the
            # last one of LLaVA's image tower, has no gradient.
            found = torch.autograd.grad(predictions.sum(), [x for _, x in read], allow_unused=True)
            gradients = [torch.zeros_like(x) if g is None else g for (_, x), g in zip(read, found, strict=True)]
            if not all(torch.isfinite(values).all() for values in (predictions, *gradients)):
                raise NonFiniteError(
                    f"every prediction and gradient must be finite, but batch {index} gave NaN or infinity; check the "
                    "rows of that batch and the model's dtype"
                )
            numbers = torch.arange(samples, samples + len(predictions))
            samples += len(predictions)
            for (name, x), gradient in zip(read, gradients, strict=True):
                real = real_tokens(model, name, on_device, x)  # (batch, tokens)
                sample = numbers[:, None].expand(real.shape)[real.cpu()]
                parts[name].append((x.detach()[real].float().cpu(), gradient[real].float().cpu(), sample))
    layers = {}
    for module in modules:
        inputs, at_inputs, sample = (torch.cat(p) for p in zip(*parts.pop(module.name), strict=True))
        centred = model.get_submodule(module.consumer).bias is not None
        layers[module.name] = LayerEffects(inputs, at_inputs, sample, centred)
    return Effects(layers=layers, samples=samples)


def _predictions(logits: Tensor, *, regression: bool) -> Tensor:
    """Return one prediction per sample, (batch,): the output, or the margin of the predicted class."""
    if regression:
        return logits.float().sum(-1)
    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    return best - second


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each sample's labels, summed over their positions, (batch,).

    Args:
        logits: (batch, tokens, vocabulary)
        labels: (batch, tokens), -100 where a position has no label.
    """
    judged = predicted_positions(labels)
    wanted = labels[:, 1:][judged][:, None]
    found = logits[:, :-1][judged].float().log_softmax(-1).gather(-1, wanted)[:, 0]  # (judged tokens,)
    sample = judged.nonzero()[:, 0]
    return torch.zeros(len(logits), device=logits.device).index_add(0, sample, found)
