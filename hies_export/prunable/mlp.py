"""Find the feed-forward blocks of a model, and which features of which linear layers belong to which neuron.

Nothing here knows an architecture. A block is found where every input column of a linear layer (the consumer: `fc2`,
`down_proj`, `output.dense`) depends, token by token, on single features of the layers in front of it (the producers:
`fc1`, `gate_proj` and `up_proj`, a fused `gate_up_proj`), and where these features reach nothing else. Then the cut is
rehearsed: with fewer neurons everywhere, the model's own code must hand the consumer exactly the remaining columns, and
every other layer and the outputs what they had before.

Only blocks inside a stack of layers count, that is below an element of an `nn.ModuleList`. So poolers, classifiers, LM
heads and the projectors between towers stay alone. So do two linear layers with no activation between them, which are
one layer of low rank, and networks that see no sample, such as those that make position biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..kinds import MLP
from ..model.linear import is_linear
from ..units import Count, Kept, PrunableModule, Slice, Span
from .blocks import MIXED, Call, Reach, Read, Reader, sample, signature, tensors_in
from .probe import Probe
from .rehearse import Meanings, fewer, rehearsed, same

SUPPORTED = (
    "models whose feed-forward blocks are linear layers (nn.Linear or Conv1D, with or without gate, separate or fused) "
    "around an elementwise activation, such as BERT, ViT, LLaMA, GPT-2, Phi-3 and LLaVA"
)

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


@dataclass
class FoundBlock:
    """One feed-forward block, as observed in a run of the probe.

    Attributes:
        name: Dotted name of the innermost module with all of its layers; of the consumer if another block has it too.
        module: The module of that name in the probe's model.
        consumer: Dotted name of the layer that reads the neurons.
        units: Number of neurons.
        columns: Producer -> the neuron of each of its features, (features,).
        parameters: Parameter outside of linear layers -> the neuron of each of its elements, (elements,).
    """

    name: str
    module: nn.Module
    consumer: str
    units: int
    columns: dict[str, Tensor]
    parameters: dict[str, Tensor]


def find_mlp(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[PrunableModule, ...]:
    """Find the feed-forward neurons of a model.

    Args:
        model: The model; not changed. Its weights are not read, so it may be on the meta device.
        batch: Inputs of the model; two short samples are enough.

    Returns:
        One `PrunableModule` per block, in the order in which the forward pass reaches them.

    Raises:
        UnsupportedModelError: A feed-forward block cannot be cut, or there is none; the message says which and why.

    Examples:
        >>> [(module.name, module.units) for module in find_mlp(model, batches[0])][:1]
        [('bert.encoder.layer.0', 64)]
    """
    label = f"{type(model).__name__} ({model.config.model_type})"
    _refuse_experts(model, label)
    probe = Probe(model, positive=True)
    layers = {name: layer for name in _linear_names(probe.model) if (layer := _layer_of(probe.model, name))}
    for parameter in probe.other_parameters():
        parameter.requires_grad_(True)
    reader = Reader(probe, layers)
    outputs = reader.end(_run(probe, batch, before=reader.before, after=reader.after))
    for parameter in probe.other_parameters():
        parameter.requires_grad_(False)
    reasons: dict[str, str] = {}
    blocks = _named(probe.model, _blocks(reader, reasons), layers)
    _refuse_layers(layers, blocks, reasons, label)
    if not blocks:
        raise UnsupportedModelError(
            f"{label} has no feed-forward block in its layers whose neurons reach one linear layer, each on its own; "
            f"supported are {SUPPORTED}"
        )
    pairs = [(block, _describe(block, probe, label)) for block in blocks]

    def rehearse(described: Sequence[PrunableModule]) -> tuple[FoundBlock | None, str]:
        return _Rehearsal(probe, reader.reads, outputs, blocks, described).run(batch)

    return rehearsed(probe, pairs, _neuron_counts, rehearse, label=label, supported=SUPPORTED)


def _run(probe: Probe, batch: Mapping[str, Tensor], **hooks: Callable[[str, Tensor], None]) -> Any:
    """Run the probe; what a model draws at random is the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return probe.run(batch, **hooks)


def _refuse_experts(model: PreTrainedModel, label: str) -> None:
    """Refuse a mixture of experts.

    Raises:
        UnsupportedModelError: A module is called so, and has parameters.
    """
    for name, module in model.named_modules():
        last, kind = name.rpartition(".")[2].lower(), type(module).__name__
        named = ("expert" in last and "shared" not in last) or "Experts" in kind
        if named and any(True for _ in module.parameters()):
            raise UnsupportedModelError(
                f"{label} cannot be cut: its neurons belong to a mixture of experts, of which each token sees a few, "
                f"in {name} ({kind}); supported are {SUPPORTED}"
            )


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_linear(module)]


def _layer_of(model: nn.Module, name: str) -> str:
    """Return the innermost element of an `nn.ModuleList` above a module, or an empty string."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 1, -1):
        if isinstance(model.get_submodule(".".join(parts[: length - 1])), nn.ModuleList):
            return ".".join(parts[:length])
    return ""


def _blocks(reader: Reader, reasons: dict[str, str]) -> list[FoundBlock]:
    """Return the feed-forward blocks, still without names; add to `reasons` why a layer is almost the consumer of one.

    A layer that is called several times, with shared weights, must have the same producers every time.
    """
    calls: dict[str, list[Call]] = {}
    for call in reader.reads:
        calls.setdefault(call[0], []).append(call)
    blocks = []
    for of_layer in calls.values():
        found = [_block(reader.reads[call], call, reader, reasons) for call in of_layer]
        first = found[0]
        if first is None or not all(other is not None and _equal(first, other) for other in found[1:]):
            continue
        fed = {c for call in of_layer for c in reader.reads[call].sources}
        if all(call in fed for name in first.columns for call in calls[name]):
            blocks.append(first)
    return blocks


def _block(read: Read, call: Call, reader: Reader, reasons: dict[str, str]) -> FoundBlock | None:
    """Return the block whose consumer made a call, if there is one."""
    if not read.reach or not all(reach.at_token for reach in read.reach.values()):
        return None
    if all(reach.linear for reach in read.reach.values()):
        return None  # two layers with no activation between are one of low rank
    if any(reader.reads[source].constant for source in read.reach):
        return None  # such as the network that makes position biases: it sees no sample
    if reason := _reason_against(read, call, reader):
        reasons[read.layer] = reason
    alone = all(reader.readers[source] == {call} for source in read.sources)
    if (
        reason
        or not alone
        or read.reach.keys() != read.sources
        or len({name for name, _ in read.sources}) < len(read.sources)
    ):
        return None
    columns = {name: reach.column for (name, _), reach in read.reach.items()}
    # What all neurons share stays as it is.
    parameters = {n: reach.column for n, reach in read.parameters.items() if not (reach.column < 0).all()}
    return FoundBlock("", nn.Module(), read.layer, read.columns, columns, parameters)


def _reason_against(read: Read, call: Call, reader: Reader) -> str:
    """Return why a layer that reads something like neurons is not the consumer of a block; else an empty string."""
    names = " and ".join(dict.fromkeys(name for name, _ in read.reach))
    own = {source for source in read.reach if reader.readers[source] == {call}}
    if own < read.sources:
        made = " and ".join(
            dict.fromkeys(s[0] for s in read.reach if s in own and _one_each(read.reach[s], read.columns))
        )
        if made:
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
    """Return whether every feature reaches one column, and every column as many features as the others."""
    return reach.each_alone and bool((torch.bincount(reach.column, minlength=columns).diff() == 0).all())


def _equal(one: FoundBlock, other: FoundBlock) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in ((one.columns, other.columns), (one.parameters, other.parameters))
    )


def _named(model: nn.Module, blocks: Sequence[FoundBlock], layers: Mapping[str, str]) -> list[FoundBlock]:
    """Return the blocks inside of layers, named after the innermost module with all of their linear layers.

    Where that module has linear layers of its own beside them, as an attention module has, or two blocks share it, a
    block is named after its consumer.
    """
    inside = []
    for block in blocks:
        block.name = _common([block.consumer, *block.columns])
        layer = layers.get(block.consumer, "")
        if f"{block.name}.".startswith(f"{layer}.") and layer:
            inside.append(block)
    shared = [block.name for block in inside]
    for block in inside:
        children = model.get_submodule(block.name).named_children()
        own = {f"{block.name}.{name}" for name, child in children if is_linear(child)}
        if shared.count(block.name) > 1 or own - {block.consumer, *block.columns}:
            block.name = block.consumer
        block.module = model.get_submodule(block.name)
    return inside


def _common(names: Iterable[str]) -> str:
    """Return the dotted name of the innermost module above all the named ones."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _refuse_layers(
    layers: Mapping[str, str], blocks: Sequence[FoundBlock], reasons: Mapping[str, str], label: str
) -> None:
    """Refuse a model with a layer that has no block, but something very much like one.

    Raises:
        UnsupportedModelError: There is such a layer.
    """
    having = {layers[block.consumer] for block in blocks}
    for consumer, reason in reasons.items():
        if layers[consumer] not in having:
            raise UnsupportedModelError(
                f"{label} cannot be cut: {reason} in front of {consumer}; supported are {SUPPORTED}"
            )


def _describe(block: FoundBlock, probe: Probe, label: str) -> PrunableModule:
    """Return the description of a block, still without its attributes.

    Raises:
        UnsupportedModelError: A parameter has values for each neuron, but not in rows.
    """
    slices = [Slice(layer, 0, _spans(column, block.units)) for layer, column in block.columns.items()]
    for name, column in block.parameters.items():
        shape = probe.model.get_parameter(name).shape
        of_row = column.view(shape).flatten(1) if len(shape) > 1 else column[:, None]
        if (of_row != of_row[:, :1]).any():
            raise UnsupportedModelError(
                f"{label} cannot be cut: the parameter {name} has values for every neuron, but not in rows, in front "
                f"of {block.consumer}; supported are {SUPPORTED}"
            )
        slices.append(Slice(name, 0, _spans(of_row[:, 0], block.units), parameter=True))
    return PrunableModule(
        name=block.name, kind=MLP, units=block.units, unit_width=1, consumer=block.consumer, slices=tuple(slices)
    )


def _spans(unit_of: Tensor, units: int) -> tuple[Span, ...]:
    """Return the spans of features that belong to units, as many to each; `units.spans_of` is for few units.

    Args:
        unit_of: The unit of each feature, (features,) int64.
        units: Number of units.
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
    """Return two thirds of the units: those whose number is no multiple of three; all where there is one."""
    return module.kept(u for u in range(module.units) if u % 3 or module.units == 1)


class _Rehearsal:
    """A run of the probe with fewer neurons, compared with the dense run."""

    def __init__(
        self,
        probe: Probe,
        dense: Mapping[Call, Read],
        outputs: tuple[float, float],
        blocks: Sequence[FoundBlock],
        modules: Sequence[PrunableModule],
    ):
        self._probe, self._dense, self._outputs = probe, dense, outputs
        self._pairs = list(zip(blocks, modules, strict=True))
        self._kept = {block.module: _some(module) for block, module in self._pairs}
        self._columns = {
            block.consumer: module.columns(self._kept[block.module].units) for block, module in self._pairs
        }
        self._pending = {block.consumer: block for block in blocks}
        self._latest = blocks[0]
        self._calls: dict[str, int] = {}
        self._wrong: list[tuple[FoundBlock, str]] = []

    def run(self, batch: Mapping[str, Tensor]) -> tuple[FoundBlock | None, str]:
        """Return the first block for which the two runs differ, and how; (None, "") if they agree."""
        try:
            with fewer(self._probe, self._pairs, self._kept):
                returned = _run(self._probe, batch, before=self._before)
            sums = [signature(tensor) for tensor in tensors_in(returned)]
            if not _close((sum(s for s, _ in sums), sum(s for _, s in sums)), self._outputs):
                self._wrong.append((self._latest, "the model's outputs change"))
        except Exception as error:  # whatever the model's own code raises on shapes it does not expect
            reason = " ".join(str(error).split())[:200]
            self._wrong.append((next(iter(self._pending.values()), self._latest), reason))
        return self._wrong[0] if self._wrong else (None, "")

    def _before(self, name: str, x: Tensor) -> None:
        self._calls[name] = self._calls.get(name, -1) + 1
        dense = self._dense.get((name, self._calls[name]))
        columns = self._columns.get(name)
        if columns is not None:
            self._latest = self._pending.pop(name, self._latest)
            if dense is None or dense.rows is None or not same(sample(x), dense.rows[:, columns]):
                self._wrong.append((self._latest, "it computes other neurons"))
        elif dense is None or not _close(signature(x), dense.signature):
            self._wrong.append((self._latest, f"{name} reads something else"))


def _close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return all(abs(a - b) <= 1e-5 * other[1] + 1e-6 for a, b in zip(one, other, strict=True))
