"""Record the inputs of the consumers, and the gradients of the prediction with respect to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import processes
from ..data.batches import size_of
from ..errors import DataError
from ..model.linear import features_of
from ..model.threads import threads_for
from ..model.tokens import first_samples
from ..progress import SILENT, Progress
from ..tasks import task_of
from ..units import PrunableModule
from .readings import reading
from .stream import Stream, usual_limit


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
        owners: Mapping[str, int] | None = None,
        progress: Progress = SILENT,
    ):
        if not batches:
            raise DataError("scoring needs at least one sample, got none; raise calibration.samples")
        task_of(model, batches[0]).check_batches(batches)
        self._model, self._batches, self._progress = model, batches, progress
        self.samples = sum(map(size_of, batches))
        # On a GPU they stay where they are read, unless a limit is for other memory, or other processes need them.
        self._stay = limit_bytes is None and processes.world() == 1
        limit = usual_limit(model) if limit_bytes is None else limit_bytes
        super().__init__(modules, _sizes(model, batches, modules), limit, what="the effects", owners=owners)

    def _collect(self, group: Sequence[PrunableModule]) -> dict[str, LayerEffects]:
        # Of each call: the number of its batch, inputs, gradients and samples.
        parts: dict[str, list[tuple[int, Tensor, Tensor, Tensor]]] = {module.name: [] for module in group}
        first = [0, *accumulate(map(size_of, self._batches))]
        with reading(self._model, group, gradients=True) as read, threads_for(self._model, self._batches):
            for index, batch in self._progress.track(processes.share(self._batches), "effects"):
                numbers = torch.arange(first[index], first[index + 1])
                for one in read(batch, index):
                    assert one.gradients is not None
                    sample = numbers[:, None].expand(one.real.shape)[one.real.cpu()]
                    inputs, gradients = (t[one.real].float() for t in (one.inputs, one.gradients))
                    if not self._stay:
                        inputs, gradients = inputs.cpu(), gradients.cpu()
                    parts[one.name].append((index, inputs, gradients, sample))
        layers = {}
        for module in group:
            owner = self.owners[module.name]
            calls = [call for part in processes.gather(parts.pop(module.name), owner) for call in part]
            if owner == processes.rank():
                in_order = sorted(calls, key=lambda call: call[0])
                inputs, gradients, sample = (torch.cat(part) for part in [*zip(*in_order, strict=True)][1:])
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
