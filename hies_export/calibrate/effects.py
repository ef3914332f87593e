"""Record the inputs of the consumers, and the gradients of the prediction there."""

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
from ..values import PrunableModule


@dataclass(frozen=True)
class LayerEffects:
    """What a consumer read at the real tokens of all samples, and the gradient of the prediction there; on CPU.

    Attributes:
        inputs: (tokens, inputs) float32.
        gradients: (tokens, inputs) float32, of the sample's prediction to these inputs.
        sample: (tokens,) int64, the sample each token belongs to.
        centred: Whether the consumer has a bias, which makes up for the mean.
    """

    inputs: Tensor
    gradients: Tensor
    sample: Tensor
    centred: bool


@dataclass(frozen=True)
class Effects:
    """What `score_compensated` needs to know of a model on its calibration samples.

    Attributes:
        layers: By the name of the module.
        samples: How many samples there were.
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
    """Record what every consumer reads, and the gradient of the model's prediction to it.

    The prediction is a regressor's output, the margin of a classifier's predicted class over the runner-up, or, of a
    language model, the log-probability of its text: the sum over the label positions (of the token it would itself
    choose there it is nearly certain, and its gradient says little: perplexity 12.2 instead of 9.4 in dev/LOG.md).
    One forward and one backward pass per batch, with every weight frozen. Memory is 8 bytes for each real token and
    input of each consumer, e.g. 150 MB for 8,000 tokens and 6 layers of width 384.

    Args:
        model: A classifier, regressor or language model; its weights, mode and gradients are left as they were found.
        batches: What `model(**batch)` takes; padding is left out by their `attention_mask`. Covariances of hundreds of
            inputs want about 256 samples; with few, take a greater ridge.
        modules: From `find_attention`.
        progress: Told about the loop.

    Returns:
        By module the inputs of its consumer and the gradients there, of all real tokens.

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
            # Samples do not see each other, so the gradient of the sum holds each sample's own. What nothing uses, such
            # as the last layer of LLaVA's image tower, has none.
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
    """Return one number per sample, (batch,): the output, or the margin of the predicted class over the runner-up."""
    if regression:
        return logits.float().sum(-1)
    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    return best - second


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return per sample, (batch,), the sum over label positions of the log-probability of the label.

    Args:
        logits: (batch, tokens, vocabulary)
        labels: (batch, tokens), -100 where none.
    """
    judged = predicted_positions(labels)
    wanted = labels[:, 1:][judged][:, None]
    found = logits[:, :-1][judged].float().log_softmax(-1).gather(-1, wanted)[:, 0]  # (judged tokens,)
    sample = judged.nonzero()[:, 0]
    return torch.zeros(len(logits), device=logits.device).index_add(0, sample, found)
