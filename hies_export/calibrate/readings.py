"""Run batches through a model, and return the inputs of its consumers and the gradients of the prediction there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.targets import inputs_of, is_regression, predicted_positions, size_of, text_labels
from ..errors import NonFiniteError
from ..model.modes import evaluating, frozen, without_cache
from ..model.sentence import TextEncoder, predicted_output
from ..model.tokens import real_tokens
from ..model.watch import Watched, watch
from ..units import PrunableModule
from .gates import projected


@dataclass(frozen=True)
class Reading:
    """One call of a consumer, for one batch."""

    name: str  # of the module
    inputs: Tensor  # (batch, tokens, inputs)
    outputs: Tensor  # (batch, tokens, outputs)
    gradients: Tensor | None  # (batch, tokens, inputs), of each sample's prediction; None if not asked for
    real: Tensor  # (batch, tokens) bool, the tokens that are not padding


Read: TypeAlias = Callable[[Mapping[str, Tensor], int], list[Reading]]


@contextmanager
def reading(model: PreTrainedModel, modules: Sequence[PrunableModule], *, gradients: bool = False) -> Iterator[Read]:
    """Yield a function of a batch and its number, for messages, that returns one `Reading` for each call of a consumer.

    The readings are in the order of the modules. With `gradients`, each sample's prediction runs backward, with the
    weights frozen inside the block. The model is restored afterwards.
    """
    consumers = {module.name: module.consumer for module in modules}
    with ExitStack() as stack:
        stack.enter_context(frozen(model) if gradients else evaluating(model))
        stack.enter_context(without_cache(model))
        seen = stack.enter_context(watch(model, consumers, outputs=True, gradients=gradients))
        stack.enter_context(torch.enable_grad() if gradients else torch.no_grad())

        def read(batch: Mapping[str, Tensor], index: int) -> list[Reading]:
            seen.clear()
            on_device = {key: value.to(model.device) for key, value in inputs_of(batch).items()}
            output = predicted_output(model(**on_device))
            calls = [(module.name, call) for module in modules for call in range(len(seen.inputs[module.name]))]
            found: list[Tensor | None] = [None] * len(calls)
            if gradients:
                found = [*_gradients(predictions(model, batch, output, index), seen, calls, index)]
            read_by_call = []
            for (name, call), gradient in zip(calls, found, strict=True):
                x, y = (by_sample(t, size_of(batch)) for t in (seen.inputs[name][call], seen.outputs[name][call]))
                gradient = None if gradient is None else by_sample(gradient, size_of(batch))
                real = real_tokens(model, name, on_device, x)
                read_by_call.append(Reading(name, x.detach(), y.detach(), gradient, real))
            return read_by_call

        yield read


def by_sample(x: Tensor, samples: int) -> Tensor:
    """Return the input or output of a layer as (batch, tokens, features).

    Some feed-forward blocks, such as OPT's, flatten the tokens of all samples into one axis.
    """
    return x.unflatten(0, (samples, -1)) if x.dim() == 2 else x


def _gradients(predicted: Tensor, seen: Watched, calls: Sequence[tuple[str, int]], index: int) -> list[Tensor]:
    """Return the gradients of the predictions, (batch,), with respect to the inputs of every call."""
    inputs = [seen.inputs[name][call] for name, call in calls]
    # Samples are independent, so the gradient of the sum holds each sample's own. An unused layer, such as the last one
    # of LLaVA's image tower, has no gradient; if all are unused, neither has the prediction.
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if predicted.requires_grad:
        found = torch.autograd.grad(predicted.sum(), inputs, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
    if not all(torch.isfinite(values).all() for values in (predicted, *gradients)):
        raise NonFiniteError(
            f"every prediction and gradient must be finite, but batch {index} gave NaN or infinity; check the rows of "
            "that batch and the model's dtype"
        )
    return gradients


def predictions(model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
    """Return the prediction of each sample, (batch,) float32.

    That of an embedding is its `projected` value, by the number of the batch.

    The prediction of a regressor is its output. That of a classifier is the margin of the predicted class over the
    runner-up. That of a language model is the log-probability of the labels, summed over their positions; without
    labels, that of the text itself. (The log-probability of the model's own choice is less useful: the model is nearly
    certain of it, so its gradient is small. Perplexity was 12.2 instead of 9.4 in dev/LOG.md.)

    `output` is (batch, classes), (batch, tokens, vocabulary) of a language model, or (batch, dimension) of embeddings.
    """
    if isinstance(model, TextEncoder):
        return projected(output, index)
    if output.dim() == 3:
        return _log_probabilities(output, text_labels(model, batch).to(output.device))
    if is_regression(model.config):
        return output.float().sum(-1)
    best, second = output.float().topk(2, dim=-1).values.unbind(-1)
    return best - second


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each sample's labels, (batch, tokens), -100 where there is none: (batch,)."""
    judged = predicted_positions(labels)
    wanted = labels[:, 1:][judged][:, None]
    found = logits[:, :-1][judged].float().log_softmax(-1).gather(-1, wanted)[:, 0]  # (judged tokens,)
    sample = judged.nonzero()[:, 0]
    return torch.zeros(len(logits), device=logits.device).index_add(0, sample, found)
