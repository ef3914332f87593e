"""Add up weights by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.linear import weight_of
from ..values import AttentionSite, Projection


def has_channels(sites: Sequence[AttentionSite]) -> bool:
    """Whether all heads of all modules are equally wide in q, k, v and o."""
    width = sites[0].value_dim
    of_heads = [len(f) for site in sites for p in site.projections for f in (*p.query, *p.key_value)]
    return all(s.query_dim == s.value_dim == width for s in sites) and all(n % width == 0 for n in of_heads)


def sum_by_channel(site: AttentionSite, elements: Callable[[str], Tensor]) -> Tensor:
    """Add up what belongs to each channel.

    Args:
        site: The attention module.
        elements: Of a projection or the output projection, by name, a float64 number per weight, (out_features,
            in_features), on CPU.

    Returns:
        (key/value heads * width,) float64.
    """
    shape = (site.key_value_heads, site.group_size, site.value_dim)
    total = elements(site.output).sum(0).view(shape).sum(1)
    for projection in site.projections:
        rows = elements(projection.name).sum(1)
        for group, channels in _features(site, projection):
            total[group] += rows[channels].sum(0)
    return total.flatten()


def _features(site: AttentionSite, projection: Projection) -> Iterator[tuple[int, Tensor]]:
    """Per head of a layer its key/value head, and its features as rows of one per channel: (any, width)."""
    for per_head, size in ((projection.query, site.group_size), (projection.key_value, 1)):
        for head, features in enumerate(per_head):
            if features:
                yield head // size, torch.tensor(features).view(-1, site.value_dim)


def _weight_l2(model: PreTrainedModel, site: AttentionSite) -> Tensor:
    """L2 norm over a head's q, k and v rows and o columns; a shared key/value head counts for each of its queries."""

    def squares(name: str) -> Tensor:
        return weight_of(model.get_submodule(name)).detach().double().cpu().pow(2)

    return sum_by_head(site, squares).sqrt()


def sum_by_head(site: AttentionSite, elements: Callable[[str], Tensor]) -> Tensor:
    """Add up what belongs to each head; what belongs to a shared key/value head counts for each of its queries.

    Args:
        site: The attention module.
        elements: Of a projection or the output projection, by name, a float64 number per weight, (out_features,
            in_features), on CPU; asked for one at a time.

    Returns:
        (heads,) float64.
    """
    query = elements(site.output).sum(0).view(site.heads, -1).sum(1)
    key_value = torch.zeros(site.key_value_heads, dtype=torch.float64)
    for projection in site.projections:
        rows = elements(projection.name).sum(1)
        for total, per_head in ((query, projection.query), (key_value, projection.key_value)):
            for head, features in enumerate(per_head):
                total[head] += rows[list(features)].sum()
    return query + key_value.repeat_interleave(site.group_size)
