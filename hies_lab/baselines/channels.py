"""Remove the least important channels of heads: LLM-Pruner's channel-wise mode, for attention alone.

A channel is one feature of a key/value head: a row of k and v and, for each of its query heads, a row of q and a column
of o. A head of width w has w channels, so removing w channels removes as many weights as removing the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.calibrate.statistics import slices_of
from hies_export.data.batches import Batch
from hies_export.errors import UnsupportedModelError
from hies_export.model.linear import features_of, weight_of
from hies_export.recipe.sections import Constraints, MultipleOf
from hies_export.score.criteria import Scores
from hies_export.select.constraints import check_budget, worst_first
from hies_export.select.select import select_units
from hies_export.units.units import PrunableModule, Units

from ..criteria import taylor_of_weights
from .names import CHANNELS


def has_channels(modules: Sequence[PrunableModule]) -> bool:
    """Return whether all heads of all attention modules are equally wide in q, k, v and o."""
    width = modules[0].unit_width
    runs = [torch.unique_consecutive(s.owner, return_counts=True) for m in modules for s in m.slices if not s.parameter]
    whole = all((lengths[owner >= 0] % width == 0).all() for owner, lengths in runs)
    return whole and all(m.key_width == m.unit_width == width for m in modules)


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
    for part in slices_of(module, producer):
        for owner in range(module.groups if part.per_group else module.units):
            features = part.indices([owner])
            if len(features):
                yield owner if part.per_group else owner // module.group_size, features.view(-1, module.unit_width)


def check_channels(modules: Sequence[PrunableModule]) -> None:
    """Refuse attention whose heads have no channels that q, k, v and o share."""
    if not has_channels(modules):
        widths = sorted({(module.key_width, module.unit_width) for module in modules})
        raise UnsupportedModelError(
            f"llm-pruner-channel needs heads that are equally wide in q, k, v and o of all layers, but their widths in "
            f"q and v are {', '.join(f'{q} and {v}' for q, v in widths)}, or their features are shared; compare with "
            "llm-pruner-block instead"
        )


def channel_taylor(
    model: PreTrainedModel, batches: Sequence[Batch], modules: Sequence[PrunableModule]
) -> dict[str, Tensor]:
    """Return the sum of `taylor_of_weights` over every channel's weights, (groups * unit_width,) float64 by module."""
    check_channels(modules)
    found = taylor_of_weights(model, batches, modules)
    return {module.name: sum_by_channel(module, found.__getitem__) for module in modules}


def select_channels(
    scores: Mapping[str, Tensor], modules: Sequence[PrunableModule], *, heads: float, constraints: Constraints
) -> dict[str, Tensor]:
    """Return which channels stay, (groups * unit_width,) bool by module, if as many weights go as with whole groups.

    `heads` is the share of key/value heads, and the smallest scores, (groups * unit_width,), go first. The constraints
    `unit` and `multiple_of` do not apply.
    """
    check_channels(modules)
    constraints = constraints.model_copy(update={"unit": "group", "multiple_of": MultipleOf()})
    size = check_budget(modules, heads=heads, constraints=constraints)
    width = modules[0].unit_width
    channels = [Units(name=module.name, units=module.groups * width) for module in modules]
    stay = {module.name: torch.ones(module.units, dtype=torch.bool) for module in channels}
    if isinstance(size, int):
        groups = max(-(-constraints.min_heads // module.group_size) for module in modules)
        constraints = constraints.model_copy(update={"min_heads": groups * width})
        share = size * width / sum(module.units for module in channels)
        kept = select_units(Scores(CHANNELS, {}, scores), channels, heads=share, constraints=constraints)
        for name, found in kept.items():
            stay[name][list(found.removed)] = False
    else:
        for module, count in zip(channels, size, strict=True):
            for name, units in worst_first(scores, [module], "group")[: count * width]:
                stay[name][list(units)] = False
    return stay


@contextmanager
def masked_channels(
    model: PreTrainedModel, modules: Sequence[PrunableModule], stay: Mapping[str, Tensor]
) -> Iterator[None]:
    """Multiply the features of removed channels in q, k and v by zero, inside the block.

    The columns of o then read zeros, so a removed channel has no effect. The head width that scales attention scores,
    and norms over the features of a head, are still those of the dense model.
    """
    with ExitStack() as stack:
        for module in modules:
            by_group = stay[module.name].view(module.groups, module.unit_width)
            for name in module.producers:
                layer = model.get_submodule(name)
                mask = torch.ones(features_of(layer)[0])
                for group, channels in channel_rows(module, name):
                    mask[channels] = by_group[group].float()
                mask = mask.to(weight_of(layer))
                stack.enter_context(layer.register_forward_hook(lambda _, x, y, mask=mask: y * mask))
        yield
