"""Rehearse a cut on a weightless copy of the model, and find the attributes that must follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..model.attention import AttentionCall, use_attention
from ..model.kernels import VisibleKeys, attend
from ..values import AttentionSite, KeptHeads
from .probe import Probe
from .units import head_rows, kept_features, set_attributes

SUPPORTED = (
    "models whose attention goes through transformers' attention interface, between linear layers (nn.Linear or "
    "Conv1D, separate or fused) with features of single heads, such as BERT, ViT, LLaMA, GPT-2, Phi-3 and LLaVA"
)


@dataclass
class _Found:
    """What was seen of one attention module.

    Attributes:
        heads_of: "query", "key" or "value" -> linear layer -> the head of each feature, and whether it is used.
        per_head: Parameters outside of linear layers whose elements each belong to one head -> "query" or "key_value",
            and the head of each element, in the parameter's shape.
        sinks: (heads,) or None.
        leaves: Layers that ran in front of it -> their features.
        output: (batch, tokens, heads * value_dim), a leaf.
        readers: Linear layers whose input depends on the output directly.
        columns: "" (the output) and gates -> the head each feature goes to in the reader's input.
    """

    name: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    head_bias: bool
    heads_of: dict[str, dict[str, tuple[Tensor, Tensor]]]
    per_head: dict[str, tuple[str, Tensor]]
    sinks: Tensor | None
    leaves: dict[str, Tensor]
    output: Tensor
    readers: list[str] = field(default_factory=list)
    read: Tensor | None = None
    columns: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


# What an attribute counts, by its name; whatever is called otherwise is only touched where a rehearsal asks for it.
_NAMES = {
    "heads": ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "heads"),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "group_size": ("num_key_value_groups", "n_rep"),
    "query_width": ("all_head_size",),
}
_WIDTHS = ("query_width", "key_width", "value_width", "output_width")


def _attributes(site: AttentionSite, owner: Mapping[str, Any], names: Iterable[str], *, widths: bool) -> dict[str, str]:
    """Which of an owner's attributes count heads: by name and value, and with `widths` by the value alone."""
    found = {}
    for name in names:
        value = owner.get(name)
        if type(value) is not int:
            continue
        kinds = [kind for kind, known in _NAMES.items() if name in known] + (list(_WIDTHS) if widths else [])
        for kind in kinds:
            dense = site.head_count(kind, heads=site.heads, key_value_heads=site.key_value_heads)
            if value == dense:
                found[name] = kind
                break
    return found


def _rehearsed(
    probe: Probe, batch: Mapping[str, Tensor], found: Sequence[_Found], sites: Sequence[AttentionSite], label: str
) -> tuple[AttentionSite, ...]:
    """Find the attributes that must follow the number of heads, by trying: the least that makes every cut come out."""
    reads = {f.name: set(probe.config_reads.get(f.module, ())) for f in found}
    widths: set[type] = set()  # classes of modules that need their widths changed too
    while True:
        described = []
        for f, site in zip(found, sites, strict=True):
            wide = type(f.module) in widths
            own = _attributes(site, vars(f.module), vars(f.module), widths=wide)
            config = {name: getattr(f.module.config, name, None) for name in reads[f.name]}
            own |= {f"config.{n}": k for n, k in _attributes(site, config, config, widths=wide).items()}
            described.append(replace(site, attributes=own))
        wrong, reason = None, ""
        for keep in (_without_first_group, _without_first_query):
            if wrong is None:
                wrong, reason = _rehearse(probe, batch, found, described, keep)
        if wrong is None:
            return tuple(described)
        if type(wrong.module) in widths:
            raise UnsupportedModelError(
                f"{label} cannot be cut: with fewer heads the code of {type(wrong.module).__name__} ({wrong.name}) "
                f"does not do what it did ({reason}); supported are {SUPPORTED}"
            )
        widths.add(type(wrong.module))


def _without_first_group(site: AttentionSite) -> KeptHeads:
    if site.key_value_heads == 1:
        return _without_first_query(site)
    return KeptHeads(
        tuple(range(site.group_size, site.heads)),
        tuple(range(1, site.key_value_heads)),
        site.heads,
        site.key_value_heads,
    )


def _without_first_query(site: AttentionSite) -> KeptHeads:
    """Every group loses its first query head, where it has several."""
    first = site.group_size > 1
    query = tuple(h for h in range(site.heads) if not first or h % site.group_size)
    return KeptHeads(query, tuple(range(site.key_value_heads)), site.heads, site.key_value_heads)


def _rehearse(
    probe: Probe,
    batch: Mapping[str, Tensor],
    found: Sequence[_Found],
    sites: Sequence[AttentionSite],
    keep: Callable[[AttentionSite], KeptHeads],
) -> tuple[_Found | None, str]:
    """Run the probe with fewer features, and compare what its attention gets and gives with the heads kept.

    Returns:
        The first module for which they differ, and how; None where all agree.
    """
    kept = {f.module: keep(site) for f, site in zip(found, sites, strict=True)}
    pending = {f.module: f for f in found}
    wrong: list[tuple[_Found, str]] = []
    visible = VisibleKeys()
    readers: dict[str, list[_Found]] = {}

    def attention(call: AttentionCall) -> Tensor:
        output = attend(call, visible)
        site = pending.get(call.module)
        if site is not None:
            heads = kept[call.module]
            for role, tensor, dense, index in (
                ("query", call.query, site.query, heads.query),
                ("key", call.key, site.key, heads.key_value),
                ("value", call.value, site.value, heads.key_value),
            ):
                if not _same(tensor, dense[:, list(index)]):
                    wrong.append((site, f"it makes another {role} of its features"))
            if site.sinks is not None and not (
                call.sinks is not None and _same(call.sinks, site.sinks[list(heads.query)])
            ):
                wrong.append((site, "its sinks are not those of its heads"))
            readers.setdefault(site.readers[0], []).append(site)
        return output

    def before(name: str, x: Tensor) -> None:
        for site in readers.pop(name, []):
            columns = head_rows(kept[site.module].query, site.value.shape[3])
            if site.read is None or not _same(x, site.read[..., columns]):
                wrong.append((site, "it joins the heads in another way"))
            pending.pop(site.module, None)

    probe.kept, probe.kept_rows = {}, {}
    try:
        for f, site in zip(found, sites, strict=True):
            set_attributes(f.module, site, kept[f.module])
            for projection in site.projections:
                features = probe.features(projection.name)
                probe.kept[projection.name] = kept_features(projection, kept[f.module], features)
            for parameter in site.parameters:
                rows = len(probe.model.get_parameter(parameter.name))
                probe.kept_rows[parameter.name] = kept_features(parameter, kept[f.module], rows)
        with use_attention(probe.model, attention):
            probe.run(batch, before=before)
    except Exception as error:  # whatever the model's own code raises on shapes it does not expect
        if not wrong:
            wrong.append((next(iter(pending.values())), " ".join(str(error).split())[:200]))
    finally:
        probe.kept, probe.kept_rows = {}, {}
        for f, site in zip(found, sites, strict=True):
            heads, groups = tuple(range(site.heads)), tuple(range(site.key_value_heads))
            set_attributes(f.module, site, KeptHeads(heads, groups, site.heads, site.key_value_heads))
    return wrong[0] if wrong else (None, "")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
