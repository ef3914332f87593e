"""Run batches through a model, and return the inputs of its consumers and the gradients of the prediction there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import size_of
from ..errors import NonFiniteError
from ..model.modes import evaluating, frozen, output_alone
from ..model.tokens import real_tokens
from ..model.watch import Watched, watch
from ..tasks import task_of
from ..units import PrunableModule


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
        stack.enter_context(output_alone(model))
        seen = stack.enter_context(watch(model, consumers, outputs=True, gradients=gradients))
        stack.enter_context(torch.enable_grad() if gradients else torch.no_grad())

        more = {} if gradients else least_logits(model)  # without gradients nothing reads the prediction

        def read(batch: Mapping[str, Tensor], index: int) -> list[Reading]:
            seen.clear()
            task, given = task_of(model, batch), {**batch, **more}
            output = task.output(model, given)
            calls = [(module.name, call) for module in modules for call in range(len(seen.inputs[module.name]))]
            found: list[Tensor | None] = [None] * len(calls)
            if gradients:
                found = [*_gradients(task.effect(model, given, output, index), seen, calls, index)]
            read_by_call = []
            for (name, call), gradient in zip(calls, found, strict=True):
                x, y = (by_sample(t, size_of(batch)) for t in (seen.inputs[name][call], seen.outputs[name][call]))
                gradient = None if gradient is None else by_sample(gradient, size_of(batch))
                real = real_tokens(model, name, batch, x)
                read_by_call.append(Reading(name, x.detach(), y.detach(), gradient, real))
            return read_by_call

        yield read


def least_logits(model: PreTrainedModel) -> dict[str, Any]:
    """Return what lets a model compute the logits of one token at most, if it knows how.

    The head of a language model costs as much as many layers.
    """
    return {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}


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
