"""Add up weights and their gradients by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.linear import by_features, weight_of
from ..units.units import PrunableModule, Slice

STATISTICS = ("taylor", "channel_taylor")


def weight_l2(model: PreTrainedModel, module: PrunableModule) -> Tensor:
    """Return the L2 norm of every unit's weights in the producers and the consumer, (units,) float64."""

    def squares(name: str) -> Tensor:
        return weight_of(model.get_submodule(name)).detach().double().pow(2)

    return sum_by_unit(module, squares).sqrt()


def sum_by_unit(module: PrunableModule, elements: Callable[[str], Tensor]) -> Tensor:
    """Return the sum of a number per weight over every unit, (units,) float64 on CPU.

    A group's sum counts for each of its units. `elements` gives the numbers of a layer by its name, (out_features,
    in_features) float64 on any device, one layer at a time.
    """
    of_units = elements(module.consumer).sum(0).cpu().view(module.units, -1).sum(1)
    of_groups = torch.zeros(module.groups, dtype=torch.float64)
    for name in module.producers:
        rows = elements(name).sum(1).cpu()
        for part in _parts(module, name):
            total = of_groups if part.per_group else of_units
            for span in part.spans:
                owned = span.start + torch.arange(span.units)[:, None] * span.step + torch.arange(span.width)
                total[span.first : span.first + span.units] += rows[owned].sum(1)
    return of_units + of_groups.repeat_interleave(module.group_size)


def has_channels(modules: Sequence[PrunableModule]) -> bool:
    """Return whether all heads of all attention modules are equally wide in q, k, v and o."""
    width = modules[0].unit_width
    widths = [span.width for m in modules for part in m.slices if not part.parameter for span in part.spans]
    return all(m.key_width == m.unit_width == width for m in modules) and all(n % width == 0 for n in widths)


def sum_by_channel(module: PrunableModule, elements: Callable[[str], Tensor]) -> Tensor:
    """Return the sum of a number per weight over every channel, (groups * unit_width,), as `sum_by_unit` does.

    A channel is one feature of a key/value head, with the same feature of each of its query heads.
    """
    shape = (module.groups, module.group_size, module.unit_width)
    total = elements(module.consumer).sum(0).view(shape).sum(1)
    for name in module.producers:
        rows = elements(name).sum(1)
        for group, channels in channel_rows(module, name):
            total[group] += rows[channels].sum(0)
    return total.flatten()


def channel_rows(module: PrunableModule, producer: str) -> Iterator[tuple[int, Tensor]]:
    """Yield the group and the features, (blocks, unit_width), of every head of a producer; one column per channel."""
    for part in _parts(module, producer):
        for owner in range(module.groups if part.per_group else module.units):
            features = part.indices([owner])
            if len(features):
                yield owner if part.per_group else owner // module.group_size, features.view(-1, module.unit_width)


def _parts(module: PrunableModule, producer: str) -> list[Slice]:
    """Return the slices of a producer, those owned by units before those owned by groups."""
    return sorted((part for part in module.slices if part.tensor == producer), key=lambda part: part.per_group)


class WeightGradients:
    """Sums over batches of the gradients of the weights of producers and consumers.

    |w dL/dw| is the first-order Taylor importance of a weight w, with L the loss over all batches (LLM-Pruner, Ma et
    al. 2023, https://arxiv.org/abs/2305.11627, "param_first").

    taylor           its sum over the weights of a unit
    channel_taylor   its sum over the weights of a channel, if heads have channels (see `has_channels`)
    """

    def __init__(self, model: PreTrainedModel, modules: Sequence[PrunableModule]):
        self._modules = modules
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for m in modules for name in m.layers}
        self.parameters: dict[str, Any] = {name: layer.weight for name, layer in self._layers.items()}
        self._sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self.parameters.items()}

    def add(self, layer: str, gradient: Tensor, factor: float) -> None:
        """Add the gradient of a layer's weight in a batch, times a factor."""
        total = self._sums[layer]
        total += gradient.to(total.device).float() * factor

    def tensors(self) -> list[Tensor]:
        """Return what batches are added to."""
        return [*self._sums.values()]

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return statistic -> module -> (units,) or (groups * unit_width,) float64 on CPU."""
        salience = {}
        for name, gradient in self._sums.items():
            layer = self._layers[name]
            product = (layer.weight.detach().float() * gradient).abs().double().cpu()
            salience[name] = by_features(layer, product)
        found = {"taylor": {m.name: sum_by_unit(m, salience.__getitem__) for m in self._modules}}
        if has_channels(self._modules):
            found["channel_taylor"] = {m.name: sum_by_channel(m, salience.__getitem__) for m in self._modules}
        return found
