"""Find the attention heads that a linear layer reads side by side, whatever code computes the attention.

A head is a block of input columns of one linear layer, the consumer (`output.dense`, `o_proj`). `columns` finds the
number of heads, and the features of the layers in front of it that make each of them. That holds for fused projections,
for those of positions, and for parameters with values of every head. Some models hand an argument with values of every
head to their attention modules, such as a position bias: a module takes its part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..kinds import ATTENTION
from ..units import Count, Kept, PrunableModule, Slice, spans_of
from .columns import FoundHeads, HeadObserver
from .probe import Probe
from .rehearse import ConsumerRehearsal, Meanings, Wrong, rehearsed

SUPPORTED = (
    "models whose heads are read side by side by one linear layer (nn.Linear, Conv1D), and made by features of linear "
    "layers, each of one head, such as DeBERTa and MPNet"
)

# Attributes whose name says what they count. Others are changed only if a rehearsal fails without it.
_NAMES = {
    "units": ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "heads"),
    "groups": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "group_size": ("num_key_value_groups", "n_rep"),
}
_QUERY_WIDTH_NAMES = ("all_head_size",)


def find_heads(
    model: PreTrainedModel, batch: Mapping[str, Tensor], label: str, *, otherwise: UnsupportedModelError
) -> tuple[PrunableModule, ...]:
    """Return the heads that linear layers read; raise `otherwise` if there are none."""
    probe = Probe(model)
    for parameter in probe.small_parameters():
        parameter.requires_grad_(True)
    dense = HeadObserver(probe)
    modules = [*probe.model.modules()]
    with dense.watching():
        dense.end(probe.run(batch, before=dense.before, after=dense.after))
    if modules != [*probe.model.modules()]:
        raise UnsupportedModelError(f"{label} cannot be cut: its code replaces modules of its own while it runs")
    for parameter in probe.small_parameters():
        parameter.requires_grad_(False)
    found, reasons = dense.modules()
    if not found:
        raise UnsupportedModelError(f"{label} cannot be cut: {reasons[0]}") if reasons else otherwise

    def rehearse(pairs: Sequence[tuple[FoundHeads, PrunableModule]]) -> Wrong[FoundHeads] | None:
        without_group: Wrong[FoundHeads] | None = ConsumerRehearsal(dense, probe, pairs, without_first_group).run(batch)
        return without_group or ConsumerRehearsal(dense, probe, pairs, in_every_other).run(batch)

    pairs = [(f, _describe(f)) for f in found]
    others = {f.name for f in found[1::2]}

    def in_every_other(module: PrunableModule) -> Kept:
        # Modules that share a tensor, such as a bias, must not have to keep the same heads.
        if module.name not in others:
            return module.kept(range(module.units))
        return without_first_query(module) if module.group_size > 1 else without_first_group(module)

    return rehearsed(label, probe, pairs, head_counts, rehearse, supported=SUPPORTED)


def _describe(found: FoundHeads) -> PrunableModule:
    """Return the description of heads, still without their module's attributes."""
    features = (
        Slice(layer, 0, spans_of(per_head), per_group=per_group)
        for layer, kinds in found.features.items()
        for per_group, per_head in kinds.items()
    )
    parameters = (
        Slice(name, axis, spans_of(per_head), parameter=True) for name, (axis, per_head) in found.parameters.items()
    )
    return PrunableModule(
        name=found.name,
        kind=ATTENTION,
        units=found.heads,
        unit_width=found.width,
        consumer=found.consumer,
        slices=(*features, *parameters),
        groups=found.groups,
        key_width=found.key_width,
        narrowed=found.arguments,
    )


def head_counts(module: PrunableModule) -> Meanings:
    """Return what the attributes of an attention module may count."""
    assert module.key_width is not None
    query_width, output_width = Count("units", module.key_width), Count("units", module.unit_width)
    return Meanings(
        by_name={name: Count(of) for of, known in _NAMES.items() for name in known}
        | dict.fromkeys(_QUERY_WIDTH_NAMES, query_width),
        by_value=(query_width, Count("groups", module.key_width), Count("groups", module.unit_width), output_width),
    )


def without_first_group(module: PrunableModule) -> Kept:
    """Return all groups but the first, or `without_first_query` of a module with one group."""
    if module.groups == 1:
        return without_first_query(module)
    return module.kept(range(module.group_size, module.units))


def without_first_query(module: PrunableModule) -> Kept:
    """Return all units but the first of every group; all units if a group has only one."""
    first = module.group_size > 1
    return module.kept(u for u in range(module.units) if not first or u % module.group_size)
