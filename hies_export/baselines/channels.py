"""Remove the least important channels of heads: LLM-Pruner's channel-wise mode, for attention alone.

A channel is one feature of a key/value head: a row of k and v and, for each of its query heads, a row of q and a column
of o. A head of width w has w channels, so removing w channels removes as many weights as removing the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibrate.weights import channel_rows, has_channels
from ..errors import UnsupportedModelError
from ..model.linear import features_of, weight_of
from ..select.constraints import Constraints, check_budget
from ..units import PrunableModule


def check_channels(modules: Sequence[PrunableModule]) -> None:
    """Refuse attention whose heads have no channels that q, k, v and o share.

    Raises:
        UnsupportedModelError: Heads are not equally wide.
    """
    if not has_channels(modules):
        widths = sorted({(module.key_width, module.unit_width) for module in modules})
        raise UnsupportedModelError(
            f"llm-pruner-channel needs heads that are equally wide in q, k, v and o of all layers, but their widths in "
            f"q and v are {', '.join(f'{q} and {v}' for q, v in widths)}, or their features are shared; compare with "
            "llm-pruner-block instead"
        )


def select_channels(
    scores: Mapping[str, Tensor], modules: Sequence[PrunableModule], *, heads: float, constraints: Constraints
) -> dict[str, Tensor]:
    """Select the channels that stay when as many weights go as a budget of whole key/value heads removes.

    Args:
        scores: Module -> score of every channel, (groups * unit_width,); the smallest go first.
        modules: The attention modules that may lose channels.
        heads: Share of heads, in (0, 1); channels with as many weights are removed.
        constraints: Constraints of the budget; `unit` and `multiple_of` do not apply.

    Returns:
        Module -> whether each channel stays, (groups * unit_width,) bool.

    Raises:
        UnsupportedModelError: Heads have no channels that q, k, v and o share.
        PlanError: The constraints allow fewer removals than the budget asks for.
    """
    check_channels(modules)
    constraints = replace(constraints, unit="group", multiple_of=1)
    size = check_budget(modules, heads=heads, constraints=constraints)
    width = modules[0].unit_width
    ranked = []  # the channels of each module, worst first; of equals the later one first
    for module in modules:
        values = scores[module.name].tolist()
        ranked.append(sorted(((value, -channel) for channel, value in enumerate(values))))
    if isinstance(size, int):
        kept_groups = max(-(-constraints.min_heads // module.group_size) for module in modules)
        protected = {layer % len(modules) for layer in constraints.keep_layers}
        most = [
            0 if i in protected else max(0, (module.groups - kept_groups) * width) for i, module in enumerate(modules)
        ]
        candidates = sorted(
            (value, -i, place) for i, found in enumerate(ranked) for place, (value, _) in enumerate(found[: most[i]])
        )
        gone = {(-i, place) for _, i, place in candidates[: size * width]}
    else:
        gone = {(i, place) for i, count in enumerate(size) for place in range(count * width)}
    stay = {}
    for i, module in enumerate(modules):
        stay[module.name] = torch.ones(module.groups * width, dtype=torch.bool)
        stay[module.name][[-ranked[i][place][1] for at, place in gone if at == i]] = False
    return stay


@contextmanager
def masked_channels(
    model: PreTrainedModel, modules: Sequence[PrunableModule], stay: Mapping[str, Tensor]
) -> Iterator[None]:
    """Multiply the features of removed channels in q, k and v by zero, inside the block.

    The columns of o then read zeros, so a removed channel has no effect. The head width that scales attention scores,
    and norms over the features of a head, are still those of the dense model.

    Args:
        model: The dense model; restored after the block.
        modules: The attention modules.
        stay: From `select_channels`.
    """
    handles = []
    try:
        for module in modules:
            by_group = stay[module.name].view(module.groups, module.unit_width)
            for name in module.producers:
                layer = model.get_submodule(name)
                mask = torch.ones(features_of(layer)[0])
                for group, channels in channel_rows(module, name):
                    mask[channels] = by_group[group].float()
                handles.append(layer.register_forward_hook(_multiply_by(mask.to(weight_of(layer)))))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _multiply_by(mask: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * mask

    return hook
