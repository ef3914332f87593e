"""LLM-Pruner's channel-wise mode, for attention alone: single channels of heads go, wherever they matter least.

A channel of a key/value head is one of its features: that row of k and v, and for each of its query heads that row of q
and that column of o. So as many channels as a budget of heads has features take as many weights as those heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibrate.weights import _features, has_channels
from ..errors import UnsupportedModelError
from ..model.linear import features_of, weight_of
from ..select.constraints import bundle_count, check_budget
from ..select.select import select_heads
from ..values import AttentionSite, HeadScores, PruningPlan


def check_channels(sites: Sequence[AttentionSite]) -> None:
    """Refuse attention whose heads have no channels that q, k, v and o share.

    Raises:
        UnsupportedModelError: Heads are not equally wide.
    """
    if not has_channels(sites):
        widths = sorted({(site.query_dim, site.value_dim) for site in sites})
        raise UnsupportedModelError(
            f"llm-pruner-channel needs heads that are equally wide in q, k, v and o of all layers, but their widths in "
            f"q and v are {', '.join(f'{q} and {v}' for q, v in widths)}, or their features are shared; compare with "
            "llm-pruner-block instead"
        )


def select_channels(
    scores: HeadScores,
    sites: Sequence[AttentionSite],
    *,
    heads: float,
    allocation: str = "global",
    min_heads: int = 1,
    keep_layers: Sequence[int] = (),
    seed: int = 0,
) -> PruningPlan:
    """Plan the removal of as many weights as a budget of whole key/value heads removes, channel by channel.

    Args:
        scores: Of every channel, (key/value heads * width,) per module.
        sites: The modules that may lose channels.
        heads: Share of heads whose number of weights goes, in (0, 1).
        allocation, min_heads, keep_layers, seed: As in `select_heads`.

    Returns:
        A plan whose heads are channels; for `masked_channels` only.
    """
    check_channels(sites)
    size = check_budget(sites, heads=heads, allocation=allocation, min_heads=min_heads, keep_layers=keep_layers)
    width = sites[0].value_dim
    channels = [
        replace(site, heads=site.key_value_heads * width, key_value_heads=site.key_value_heads * width)
        for site in sites
    ]
    if isinstance(size, int):
        share = size / sum(bundle_count(site, "group") for site in sites)
        groups_kept = max(-(-min_heads // site.group_size) for site in sites)
        options: dict[str, Any] = {"heads": share, "min_heads": groups_kept * width, "keep_layers": keep_layers}
    else:
        options = {"counts": [count * width for count in size]}
    return select_heads(scores, channels, **options, seed=seed)


@contextmanager
def masked_channels(model: PreTrainedModel, sites: Sequence[AttentionSite], plan: PruningPlan) -> Iterator[None]:
    """Inside the block the model computes as if the rows of q, k and v of the channels that go were zero.

    Then the columns of o read zeros, so nothing is left of a channel; but the width of a head by which scores are
    scaled, and norms over a head's features, are still those of the dense model.
    """
    handles = []
    try:
        for site in sites:
            stay = torch.zeros(site.key_value_heads * site.value_dim, dtype=torch.bool)
            stay[list(plan.kept[site.name].query)] = True
            by_group = stay.view(site.key_value_heads, site.value_dim)
            for projection in site.projections:
                layer = model.get_submodule(projection.name)
                mask = torch.ones(features_of(layer)[0])
                for group, channels in _features(site, projection):
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
