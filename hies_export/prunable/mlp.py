"""Find the feed-forward blocks of a model, and which features of which linear layers belong to which neuron.

Nothing here knows an architecture. Derivatives on a weightless copy show where the features of linear layers become the
input columns of another, one by one and token by token (`blocks`). Then the cut is rehearsed: with fewer neurons
everywhere, the model's own code must pass the consumer exactly the remaining columns, and every other layer and the
outputs must get the same as before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..kinds import MLP
from ..units import Count, Kept, PrunableModule, Slice, Span
from .blocks import FoundBlock, found_blocks, layers_of_linears
from .probe import Probe
from .reads import LinearObserver
from .rehearse import ConsumerRehearsal, Meanings, Wrong, rehearsed

SUPPORTED = (
    "models whose feed-forward blocks are linear layers (nn.Linear or Conv1D, with or without gate, separate or fused) "
    "around an elementwise activation, such as BERT, ViT, LLaMA, GPT-2, Phi-3 and LLaVA"
)

_EXPERTS = re.compile(r"((?!shared)\w+_)?experts?(_\d+)?")

# Attributes whose name says that they count neurons. Others are changed only if a rehearsal fails without it.
_NAMES = (
    "intermediate_size",
    "intermediate_dim",
    "ffn_dim",
    "ffn_hidden_size",
    "d_ff",
    "dim_feedforward",
    "n_inner",
    "inner_dim",
    "mlp_dim",
    "hidden_features",
)


def find_mlp(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[PrunableModule, ...]:
    """Find the feed-forward neurons of a model, in the order in which the forward pass reaches their blocks.

    Two short samples are enough as a batch. The model is not changed, and its weights are not read: it may be on the
    meta device.
    """
    label = f"{type(model).__name__} ({model.config.model_type})"
    _refuse_experts(model, label)
    probe = Probe(model, positive=True)
    layers = layers_of_linears(probe.model)
    for parameter in probe.other_parameters():
        parameter.requires_grad_(True)
    dense = LinearObserver(probe, layers)
    dense.end(probe.run(batch, before=dense.before, after=dense.after))
    for parameter in probe.other_parameters():
        parameter.requires_grad_(False)
    blocks, almost = found_blocks(probe.model, dense, layers)
    for consumer, reason in almost.items():
        raise _refusal(label, f"{reason} in front of {consumer}")
    if not blocks:
        raise UnsupportedModelError(
            f"{label} has no feed-forward block in its layers whose neurons reach one linear layer, each on its own; "
            f"supported are {SUPPORTED}"
        )

    def rehearse(pairs: Sequence[tuple[FoundBlock, PrunableModule]]) -> Wrong[FoundBlock] | None:
        return ConsumerRehearsal(dense, probe, pairs, _some).run(batch)

    pairs = [(block, _describe(block, probe, label)) for block in blocks]
    return rehearsed(label, probe, pairs, _neuron_counts, rehearse, supported=SUPPORTED)


def _refusal(label: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{label} cannot be cut: {reason}; supported are {SUPPORTED}")


def _refuse_experts(model: PreTrainedModel, label: str) -> None:
    """Refuse a mixture of experts: a module with such a name and with parameters."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        named = _EXPERTS.fullmatch(name.rpartition(".")[2]) or "Experts" in kind
        if named and any(True for _ in module.parameters()):
            experts = "its neurons belong to a mixture of experts, of which each token sees a few,"
            raise _refusal(label, f"{experts} in {name} ({kind})")


def _describe(block: FoundBlock, probe: Probe, label: str) -> PrunableModule:
    """Return the description of a block, still without its attributes."""
    slices = [Slice(layer, 0, _spans(column, block.units)) for layer, column in block.columns.items()]
    for name, column in block.parameters.items():
        shape = probe.model.get_parameter(name).shape
        of_row = column.view(shape).flatten(1) if len(shape) > 1 else column[:, None]
        if (of_row != of_row[:, :1]).any():
            reason = f"the parameter {name} has values for every neuron, but not in rows,"
            raise _refusal(label, f"{reason} in front of {block.consumer}")
        slices.append(Slice(name, 0, _spans(of_row[:, 0], block.units), parameter=True))
    return PrunableModule(
        name=block.name, kind=MLP, units=block.units, unit_width=1, consumer=block.consumer, slices=tuple(slices)
    )


def _spans(unit_of: Tensor, units: int) -> tuple[Span, ...]:
    """Return the spans of features that belong to units, equally many to each; `units.spans_of` is for few units.

    `unit_of` is the unit of each feature, (features,) int64.
    """
    owned = unit_of.argsort(stable=True).view(units, -1)  # (units, features per unit), ascending
    spans = []
    first = 0
    while first < owned.shape[1]:
        width = 1
        while first + width < owned.shape[1] and bool((owned[:, first + width] == owned[:, first] + width).all()):
            width += 1
        starts = owned[:, first]
        steps = starts.diff()
        begin = 0
        while begin < units:
            step = int(steps[begin]) if begin + 1 < units else width
            other = (steps[begin:] != step).nonzero()
            count = int(other[0]) + 1 if len(other) else units - begin
            spans.append(Span(begin, count, int(starts[begin]), step, width))
            begin += count
        first += width
    return tuple(sorted(spans, key=lambda span: (span.first, span.start)))


def _neuron_counts(module: PrunableModule) -> Meanings:
    """Return what the attributes of a feed-forward block may count: neurons, or the features of a fused producer."""
    widths = sorted({sum(s.tensor == name for s in module.slices) for name in module.producers} | {1})
    return Meanings(
        by_name=dict.fromkeys(_NAMES, Count("units")), by_value=tuple(Count("units", times) for times in widths)
    )


def _some(module: PrunableModule) -> Kept:
    """Return two thirds of the units: those whose number is no multiple of three; all if there is only one."""
    return module.kept(u for u in range(module.units) if u % 3 or module.units == 1)
