"""Find the feed-forward blocks of a model, and which features of which linear layers belong to which neuron.

Nothing here knows an architecture. Derivatives on a weightless copy show where the features of linear layers become the
input columns of another, one by one and token by token. Then the cut is rehearsed (`ConsumerRehearsal`).

A linear layer is the consumer of a block (`fc2`, `down_proj`, `output.dense`) if every one of its input columns
depends, token by token, on single features of the layers in front of it (the producers: `fc1`, `gate_proj` and
`up_proj`, or a fused `gate_up_proj`), and these features reach nothing else. Only blocks inside a stack of layers
count, that is below an element of an `nn.ModuleList`. This excludes poolers, classifiers, LM heads and the projectors
between towers. Also excluded are two linear layers with no activation between them, which are one layer of low rank,
and networks that see no sample, such as those that make position biases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..kinds import MLP
from ..model.linear import is_linear
from ..model.modes import requiring_gradients
from .probe import Call, Probe
from .reads import MIXED, LinearObserver, Reach, Read
from .rehearse import ConsumerRehearsal, Meanings, rehearsed
from .units import AttributeCount, Kept, PrunableModule, Slice, owner_of_rows


def layers_of_linears(model: PreTrainedModel) -> dict[str, str]:
    """Return linear layer -> the innermost element of an `nn.ModuleList` around it, for those that are in one.

    Layers outside of the base model are left out: a slim checkpoint could not name them.
    """
    base: nn.Module = model.base_model
    in_base = set(base.modules())
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    element_of = {}
    for name in (name for name, module in model.named_modules() if is_linear(module) and module in in_base):
        element = name.rpartition(".")[0]
        while element and element.rpartition(".")[0] not in lists:
            element = element.rpartition(".")[0]
        if element:
            element_of[name] = element
    return element_of


def _blocks(dense: LinearObserver, reasons: dict[str, str]) -> list[PrunableModule]:
    """Return the blocks in the order of the run, still without names; add to `reasons` why near misses are none.

    `reasons` is linear layer -> why it is not quite the consumer of a block. A layer that is called several times must
    have the same producers every time.
    """
    calls: dict[str, list[Call]] = {}
    for call in dense.reads:
        calls.setdefault(call[0], []).append(call)
    blocks = []
    for calls_of_layer in calls.values():
        first, *others = [_block(call, dense, reasons) for call in calls_of_layer]
        if first is None or any(other is None or by_tensor(other) != by_tensor(first) for other in others):
            continue
        sources = {source for call in calls_of_layer for source in dense.reads[call].sources}
        # Every call of a producer must be for this consumer.
        if all(call in sources for producer in first.producers for call in calls[producer]):
            blocks.append(first)
    return blocks


def _block(call: Call, dense: LinearObserver, reasons: dict[str, str]) -> PrunableModule | None:
    """Return the block whose consumer made a call, or None; add to `reasons` why a near miss is none.

    The owners in its slices of parameters are those of each element, in the parameter's shape.
    """
    read = dense.reads[call]
    if not read.reach or not all(reach.at_token for reach in read.reach.values()):
        return None
    if all(reach.linear for reach in read.reach.values()):
        return None  # two layers with no activation between are one of low rank
    if any(dense.reads[source].constant for source in read.reach):
        return None  # such as the network that makes position biases: it sees no sample
    exclusive = {source for source in read.reach if dense.readers[source] == {call}}
    if reason := _reason_against(read, exclusive):
        reasons[call[0]] = reason
        return None
    if exclusive != read.sources or len({name for name, _ in read.sources}) < len(read.sources):
        return None  # other layers read its sources too, or one of these was called twice
    features = (Slice(name, 0, reach.column) for (name, _), reach in read.reach.items())
    # Parameters that all neurons share stay as they are.
    owned = {name: reach.column for name, reach in read.parameters.items() if not (reach.column < 0).all()}
    slices = (*features, *(Slice(name, 0, column, parameter=True) for name, column in owned.items()))
    return PrunableModule(name="", kind=MLP, units=read.columns, unit_width=1, consumer=call[0], slices=slices)


def _reason_against(read: Read, exclusive: set[Call]) -> str:
    """Return why a layer whose inputs look like neurons is no block's consumer; "" if it may be, or is no near miss.

    `exclusive` are the examined sources whose features nothing else reads.
    """
    names = " and ".join(dict.fromkeys(name for name, _ in read.reach))
    if exclusive < read.sources:  # something else reads a source, or it was not examined
        producers = [s[0] for s in read.reach if s in exclusive and _one_each(read.reach[s], read.columns)]
        if producers:
            made = " and ".join(dict.fromkeys(producers))
            return f"the neurons that {made} makes also depend on features that are not theirs alone,"
        if read.reach.keys() == read.sources and any((reach.column >= 0).any() for reach in read.reach.values()):
            return f"the features of {names} do more than make neurons"
        return ""
    if any((reach.column == MIXED).any() for reach in read.reach.values()):
        return f"the features of {names} are mixed (by a norm, or another operation across neurons)"
    if not all(_one_each(reach, read.columns) for reach in read.reach.values()):
        return f"the features of {names} do not make one neuron each"
    for name, reach in read.parameters.items():
        if (reach.column >= 0).any() and not _one_each(reach, read.columns):
            return f"the parameter {name} has values for some of the neurons only"
    return ""


def _one_each(reach: Reach, columns: int) -> bool:
    """Return whether every feature reaches one column, and equally many features reach each column."""
    return bool((reach.column >= 0).all()) and evenly_owned(reach.column, columns)


def evenly_owned(owner: Tensor, owners: int) -> bool:
    """Return whether all owners, 0 to `owners` - 1, occur equally often in `owner`, (indices,) int64, -1 for none."""
    return bool((torch.bincount(owner[owner >= 0], minlength=owners).diff() == 0).all())


def by_tensor(module: PrunableModule) -> dict[tuple[str, bool], Slice]:
    """Return the slices of a module by tensor and `per_group`, to compare modules whatever the order."""
    return {(piece.tensor, piece.per_group): piece for piece in module.slices}


def _named(model: nn.Module, blocks: Iterable[PrunableModule], layers: Mapping[str, str]) -> list[PrunableModule]:
    """Return the blocks inside of layers with their names; the others are left out.

    `layers` is linear layer -> its element of an `nn.ModuleList`. A block is named after the innermost module with all
    of its linear layers, or after its consumer if that module has other linear layers too or two blocks share it.
    """
    named = [replace(block, name=common_module(block.layers)) for block in blocks]
    inside = [block for block in named if f"{block.name}.".startswith(f"{layers[block.consumer]}.")]
    names = [block.name for block in inside]
    for index, block in enumerate(inside):
        children = model.get_submodule(block.name).named_children()
        linear_children = {f"{block.name}.{name}" for name, child in children if is_linear(child)}
        if names.count(block.name) > 1 or linear_children - {*block.layers}:
            inside[index] = replace(block, name=block.consumer)
    return inside


def common_module(names: Iterable[str]) -> str:
    """Return the dotted name of the innermost module that holds all the named ones."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)  # each with what all names have there
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


SUPPORTED = (
    "models whose feed-forward blocks are linear layers (nn.Linear or Conv1D, with or without gate, separate or fused) "
    "around an elementwise activation, such as BERT, ViT, LLaMA, GPT-2, Phi-3 and LLaVA"
)

# Names of modules with the experts of a mixture; experts that every token sees are called shared.
_EXPERTS = re.compile(r"((?!shared)\w+_)?experts?(_\d+)?")

# Attributes whose name says that they count neurons. Others are changed only if a rehearsal fails without it.
_NAMES = (
    *("intermediate_size", "intermediate_dim", "ffn_dim", "ffn_hidden_size", "d_ff", "dim_feedforward", "n_inner"),
    *("inner_dim", "mlp_dim", "hidden_features"),
)


def find_mlp(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[PrunableModule, ...]:
    """Return the feed-forward blocks of a model, in the order in which the forward pass reaches them.

    Batch and model are as in `find_modules`. Raises UnsupportedModelError if no block is found, or one cannot be cut.
    """
    label = f"{type(model).__name__} ({model.config.model_type})"
    for name, module in model.named_modules():
        class_name = type(module).__name__
        has_experts = _EXPERTS.fullmatch(name.rpartition(".")[2]) or "Experts" in class_name
        if has_experts and any(True for _ in module.parameters()):
            experts = "its neurons belong to a mixture of experts, of which each token sees a few,"
            raise _refusal(label, f"{experts} in {name} ({class_name})")
    probe = Probe(model, positive=True)
    layers = layers_of_linears(probe.model)
    dense = LinearObserver(probe, layers)
    with requiring_gradients(probe.other_parameters()):
        dense.end(probe.run(batch, before=dense.before, after=dense.after))
    reasons: dict[str, str] = {}
    blocks = _named(probe.model, _blocks(dense, reasons), layers)
    with_block = {layers[block.consumer] for block in blocks}
    for consumer, reason in reasons.items():
        if layers[consumer] not in with_block:
            raise _refusal(label, f"{reason} in front of {consumer}")
    if not blocks:
        raise UnsupportedModelError(
            f"{label} has no feed-forward block in its layers whose neurons reach one linear layer, each on its own; "
            f"supported are {SUPPORTED}"
        )
    neurons = AttributeCount("units")
    meanings = Meanings(by_name=dict.fromkeys(_NAMES, neurons), by_value=[neurons])
    modules = [_by_row(block, label) for block in blocks]
    rehearsals = [partial(ConsumerRehearsal, dense, probe, _without_every_third)]
    return rehearsed(label, probe, modules, lambda _: meanings, rehearsals, batch, supported=SUPPORTED)


def _refusal(label: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{label} cannot be cut: {reason}; supported are {SUPPORTED}")


def _by_row(block: PrunableModule, label: str) -> PrunableModule:
    """Return a block of `_block` with the neuron of each row, in place of each element, in its slices."""
    slices = []
    for piece in block.slices:
        if (owner := owner_of_rows(piece.owner)) is None:
            reason = f"the parameter {piece.tensor} has values for every neuron, but not in rows,"
            raise _refusal(label, f"{reason} in front of {block.consumer}")
        slices.append(replace(piece, owner=owner))
    return replace(block, slices=tuple(slices))


def _without_every_third(module: PrunableModule) -> Kept:
    """Keep the units whose index is no multiple of three; or the only one."""
    return module.kept(u for u in range(module.units) if u % 3 or module.units == 1)
