"""Read the inputs of the consumers in batches, and the gradients of the prediction there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import size_of
from ..errors import NonFiniteError, UnsupportedModelError
from ..model.linear import features_of
from ..model.modes import Watched, evaluating, frozen, output_alone, watch
from ..model.tokens import first_samples, real_tokens, refuse_tokens_first
from ..progress import SILENT, Progress
from ..tasks import task_of
from ..units.units import PrunableModule
from .passes import Stream, run_pass


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
                x, y = (by_sample(model, name, batch, of[name][call]) for of in (seen.inputs, seen.outputs))
                gradient = None if gradient is None else by_sample(model, name, batch, gradient)
                real = real_tokens(model, name, batch, x)
                read_by_call.append(Reading(name, x.detach(), y.detach(), gradient, real))
            return read_by_call

        yield read


def least_logits(model: PreTrainedModel) -> dict[str, Any]:
    """Return what lets a model compute the logits of one token at most, if it knows how.

    The head of a language model costs as much as many layers.
    """
    return {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}


def by_sample(model: PreTrainedModel, name: str, batch: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the input or output x of a module's consumer as (batch, tokens, features).

    Some feed-forward blocks, such as OPT's, flatten the tokens of all samples into one axis. Swin's attention reads
    several windows of each sample, and ConvNeXt's blocks read rows and columns.
    """
    refuse_tokens_first(model, name, batch, x)
    samples = size_of(batch)
    if x.dim() == 3 and len(x) == samples:
        return x
    if len(x) % samples:
        raise UnsupportedModelError(
            f"every sample must be as many rows of a layer's input as any other, but an input has the shape "
            f"{tuple(x.shape)} for {samples} samples; give every sample one image of one tile, or leave the layer alone"
        )
    return x.reshape(samples, -1, x.shape[-1])


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


@dataclass(frozen=True)
class LayerEffects:
    """Inputs of one consumer at the real tokens of all samples, and the gradients there."""

    inputs: Tensor  # (tokens, inputs) float32
    gradients: Tensor  # (tokens, inputs) float32, of the sample's prediction with respect to these inputs
    sample: Tensor  # (tokens,) int64, the sample that each token belongs to
    centred: bool  # the consumer has a bias, which can absorb the mean of the removed inputs


class EffectStream(Stream[LayerEffects]):
    """Inputs of every consumer, and gradients of the prediction with respect to them, under a memory limit.

    See `Stream`, and `Task.effect`. Each pass runs every batch forward and backward, with every weight
    frozen. A module takes 8 bytes for each real token and input, e.g. 150 MB for 8,000 tokens and 6 layers of width
    384.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[dict[str, Tensor]],
        modules: Sequence[PrunableModule],
        *,
        limit_bytes: float | None = None,
        progress: Progress = SILENT,
    ):
        task_of(model, batches[0]).check_batches(batches)
        self._model, self._batches, self._progress = model, batches, progress
        self.samples = sum(map(size_of, batches))
        # On a GPU they stay where they are read, unless a limit is for other memory.
        self._stay = limit_bytes is None
        super().__init__(model, modules, _sizes(model, batches, modules), limit_bytes, what="the effects")

    def _collect(self, group: Sequence[PrunableModule]) -> dict[str, LayerEffects]:
        first = [0, *accumulate(map(size_of, self._batches))]
        with reading(self._model, group, gradients=True) as read:

            def effects(index: int, batch: Mapping[str, Tensor]) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
                numbers = torch.arange(first[index], first[index + 1])
                calls: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {module.name: [] for module in group}
                for one in read(batch, index):
                    assert one.gradients is not None
                    inputs, gradients = (t[one.real].float() for t in (one.inputs, one.gradients))
                    if not self._stay:
                        inputs, gradients = inputs.cpu(), gradients.cpu()
                    sample = numbers[:, None].expand(one.real.shape)[one.real.cpu()]
                    calls[one.name].append((inputs, gradients, sample))
                return calls

            found = run_pass(self._model, self._batches, effects, name="effects", progress=self._progress)
        layers = {}
        for module in group:
            calls = [call for of_batch in found for call in of_batch.pop(module.name)]
            inputs, gradients, sample = (torch.cat(part) for part in zip(*calls, strict=True))
            centred = self._model.get_submodule(module.consumer).bias is not None
            layers[module.name] = LayerEffects(inputs, gradients, sample, centred)
        return layers


def _sizes(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], modules: Sequence[PrunableModule]
) -> list[int]:
    """Return the bytes that each module's effects take; one forward pass shows how many tokens an image has."""
    first = first_samples(batches[0])
    with reading(model, modules) as read:
        seen = read(first, 0)
    samples = sum(map(size_of, batches))
    # If padding is excluded, or could be, tokens are those of the mask.
    mask = [batch["attention_mask"] for batch in batches if "attention_mask" in batch]
    in_text = sum(int(m.sum()) for m in mask)
    tokens = dict.fromkeys((module.name for module in modules), 0)
    for one in seen:
        reads_text = bool(mask) and one.real.shape == first["attention_mask"].shape
        tokens[one.name] += in_text if reads_text else samples * one.real.numel() // size_of(first)
    widths = [features_of(model.get_submodule(module.consumer))[1] for module in modules]
    return [8 * tokens[module.name] * (width + 1) for module, width in zip(modules, widths, strict=True)]
