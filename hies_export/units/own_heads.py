"""Find the attention heads that a linear layer reads side by side, whatever code computes the attention.

A head is a block of input columns of one linear layer, the consumer (`output.dense`, `o_proj`). One run of a weightless
model shows the number of heads, and the features of the layers in front of it that make each of them. That holds for
fused projections, for those of positions, and for parameters with values of every head. Some models hand an argument
with values of every head to their attention modules, such as a position bias: a module takes its part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..model.linear import is_linear
from ..model.modes import requiring_gradients
from .neurons import common_module, evenly_owned, layers_of_linears
from .probe import Call, Probe, gradients_of, head_of_axes, head_of_columns, positive_weights
from .reads import LinearObserver, sample
from .rehearse import ConsumerRehearsal, Meanings, rehearsed
from .units import AttributeCount, Kept, PrunableModule, Slice


@dataclass
class FoundHeads:
    """The heads in front of one consumer, as observed in a run of the probe.

    Attributes:
        name: Dotted name of the innermost module with all layers that own features.
        module: The module of that name in the probe's model.
        consumer: The linear layer that reads the heads.
        heads, groups: Numbers of query and of key/value heads.
        width, key_width: Widths of a head's output, and of its queries and keys.
        features: Layer -> whether key/value heads own the features -> the head of every feature, -1 for none.
        parameters: Parameter outside of linear layers -> axis, and the head of every index along it.
        arguments: Argument of the module with values for every head -> the axis of the heads, and their number.
    """

    consumer: str
    heads: int
    groups: int
    width: int
    key_width: int
    features: dict[str, dict[bool, list[int]]]
    parameters: dict[str, tuple[int, list[int]]]
    arguments: dict[str, tuple[int, int]] = field(default_factory=dict)
    name: str = ""
    module: nn.Module = field(default_factory=nn.Module)


class HeadObserver(LinearObserver):
    """Hooks for one run of a probe, which record the heads that linear layers read."""

    def __init__(self, probe: Probe):
        super().__init__(probe, layers_of_linears(probe.model))
        self._model = probe.model
        # Tensor -> the module that returned it first; "" if that has no linear layers.
        self._makers: Any = WeakTensorKeyDictionary()
        # Name, value and maker of the arguments since the last layer that reads heads. A module gets a copy of the
        # value, whose gradient shows the heads it reaches.
        self._arguments: list[tuple[str, nn.Parameter, str]] = []
        self._makers_of_arguments: set[str] = set()  # of those arguments that have values for every head
        self._found: dict[Call, FoundHeads] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, inside the block, the arguments and outputs of every module that has a linear layer as a child."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if name and any(map(is_linear, module.children())):
                    before = module.register_forward_pre_hook(self._given, with_kwargs=True, prepend=True)
                    hooks.enter_context(before)
                    hooks.enter_context(module.register_forward_hook(partial(self._returned, name)))
            yield

    def _given(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the arguments that depend on no linear layer's features, such as a position bias, by copies."""
        names = [*inspect.signature(layer.forward).parameters]

        def taken(name: str, value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2):
                return value
            if not value.numel() or self._leaves_of(value)[0]:
                return value
            own = nn.Parameter(value.detach())
            passed = own.clone()  # a model may write into it, but not into a leaf
            self._makers[passed] = maker = self._makers.get(value, "")
            self._arguments.append((name, own, maker))
            if name in getattr(layer, "narrowed", ()):
                self._makers_of_arguments.add(maker)
            return passed

        return (
            tuple(taken(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :],
            {name: taken(name, value) for name, value in kwargs.items()},
        )

    def _returned(self, module: str, layer: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor):
                self._makers.setdefault(output, module)

    def _examine(self, call: Call, x: Tensor, leaves: dict[Call, Tensor], parameters: dict[str, nn.Parameter]) -> None:
        """Find the heads in a layer's input, and the arguments since the last such layer that have values for each."""
        found = heads_in(x, leaves, parameters)
        if found is None:
            return
        found.consumer = call[0]
        given = {at: value for at, (_, value, _) in enumerate(self._arguments)}
        for at, by_axis in head_of_axes(x, found.width, given).items():
            name, _, maker = self._arguments[at]
            placed = _axis(by_axis, found.heads)
            if placed is not None and placed[1] == [index % found.heads for index in range(len(placed[1]))]:
                found.arguments[name] = placed[0], found.heads
                self._makers_of_arguments.add(maker)
        self._arguments = []
        self.reads[call].rows = sample(x)
        self._found[call] = found

    def modules(self) -> tuple[list[FoundHeads], list[str]]:
        """Return the modules with heads in the order of the run, and for each that cannot be cut the reason."""
        found: list[FoundHeads] = []
        reasons: list[str] = []
        for heads in self._found.values():
            if heads.heads == 1:  # features that all heads would share look like those of the only one
                heads.features = {layer: own for layer, own in heads.features.items() if self._only_makes(layer, heads)}
        for call, heads in self._found.items():
            if call[1] or not heads.features:
                continue  # a later call, with shared weights, of a layer that must read the same heads every time
            heads.name = common_module(heads.features)
            heads.module = self._model.get_submodule(heads.name)
            narrowed: Mapping[str, Any] = getattr(heads.module, "narrowed", {})  # of a slim model
            if narrowed:
                heads.arguments = {name: (axis, total) for name, (axis, total, _) in narrowed.items()}
            reason = self._reason_against(heads)
            if any(other.name == heads.name for other in found):
                reason = "several layers read heads of one module"
            if reason:
                reasons.append(f"{reason} in {heads.name} ({type(heads.module).__name__})")
            else:
                found.append(heads)
        # A single head is one if a module of that class has several; other layers mix features of all tokens too.
        several = {type(heads.module) for heads in found if heads.heads > 1}
        slim = getattr(self._model.config, "hies_export", None) is not None
        return [heads for heads in found if slim or type(heads.module) in several], reasons

    def _only_makes(self, layer: str, found: FoundHeads) -> bool:
        """Return whether nothing but the consumer of these heads reads the features of a layer."""
        readers = {name for call in self.reads if call[0] == layer for name, _ in self.readers.get(call, ())}
        return readers <= {found.consumer}

    def _reason_against(self, found: FoundHeads) -> str:
        """Return why the heads of a module cannot be cut; "" if they can."""
        calls = [call for call in self.reads if call[0] == found.consumer]
        for call in calls:
            other = self._found.get(call)
            if other is None or (other.features, other.parameters) != (found.features, found.parameters):
                return f"{found.consumer} does not read the same heads every time"
        for layer in found.features:
            if not self._only_makes(layer, found):
                return f"the features of {layer} do more than make heads"
        if found.name in self._makers_of_arguments:
            return "other layers take their bias of every head from the one that is made"
        for name, module in found.module.named_modules(prefix=found.name):
            if is_linear(module) and (name, 0) not in self.reads:
                return f"these inputs do not reach {name}"
        return ""


def heads_in(x: Tensor, leaves: Mapping[Call, Tensor], parameters: Mapping[str, nn.Parameter]) -> FoundHeads | None:
    """Return the heads that are side by side in a linear layer's input x, (..., heads * width); None if it has none.

    Some features must reach other tokens, and some a whole block (queries and keys). If there is a single head, some
    must reach one column each (values).
    """
    columns = x.shape[-1]
    if not leaves or not _reaches_other_tokens(x, list(leaves.values())):
        return None
    single = head_of_columns(x, 1, leaves)
    has_values = any((column >= 0).any() for column, _ in single.values())
    for heads in (*_divisors(columns), *([1] if has_values else [])):  # the most heads that have whole blocks
        by_head = head_of_columns(x, columns // heads, leaves)
        if any(_of_whole_blocks(by_head[call][0], single[call][0], heads, columns // heads) for call in by_head):
            break
    else:
        return None
    owned: dict[str, dict[bool, list[int]]] = {}
    key_width = groups = 0
    for call, (head_of, used) in by_head.items():
        layer = owned.setdefault(call[0], {})
        if not evenly_owned(head_of, heads):
            return None
        if (head_of >= 0).any():
            layer[False] = head_of.tolist()
        shared = used & (head_of < 0)
        for fewer in _divisors(heads) if shared.any() else ():
            group_of = head_of_columns(x, columns // fewer, {call: leaves[call]})[call][0]
            if (group_of[shared] >= 0).all():
                group_of = group_of.where(shared, -1)
                if not evenly_owned(group_of, fewer):
                    return None
                layer[True] = group_of.tolist()
                groups = fewer
                break
        if (single[call][0] < 0).all() and (head_of >= 0).all() and not key_width:
            key_width = len(head_of) // heads
    owned = {layer: kinds for layer, kinds in owned.items() if kinds}
    width = columns // heads
    axes = {name: _axis(by_axis, heads) for name, by_axis in head_of_axes(x, width, parameters).items()}
    placed = {name: axis for name, axis in axes.items() if axis is not None}
    groups = groups or (heads if has_values else 1)  # without values of their own, all heads share one
    return FoundHeads("", heads, groups, width, key_width or width, owned, placed)


def _of_whole_blocks(head_of: Tensor, column_of: Tensor, heads: int, width: int) -> bool:
    """Return whether all heads have equally many features that reach several of their columns, half a width or more."""
    of_blocks = head_of.where(column_of < 0, -1)
    # Fewer than half as many as columns are values whose columns were not told apart.
    return evenly_owned(of_blocks, heads) and 2 * int((of_blocks == 0).sum()) >= width


def _reaches_other_tokens(x: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Return whether some features reach the input of a layer at other tokens than their own.

    Every second token is tested for what is between, which attention reads. Features of another number of tokens than
    the input, such as those of positions, belong to none of its tokens, so they count too.
    """
    rows = x.reshape(-1, x.shape[-1])
    (gradients,) = gradients_of(rows[1::2], [positive_weights(rows[1::2].shape)], leaves)
    by_token = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients if gradient is not None]
    return any(len(gradient) != len(rows) or bool((gradient[::2] != 0).any()) for gradient in by_token)


def _divisors(number: int) -> list[int]:
    return [n for n in range(number // 2, 1, -1) if number % n == 0]


def _axis(by_axis: Sequence[Tensor], heads: int) -> tuple[int, list[int]] | None:
    """Return the first axis along which all heads own equally many and all indices, and the head of each index.

    `by_axis` has the head of each index of every axis, (size,) int64, -1 for none or several. None if there is no such
    axis.
    """
    for axis, head_of in enumerate(by_axis):
        if (head_of >= 0).all() and evenly_owned(head_of, heads):
            return axis, head_of.tolist()
    return None


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


def find_heads(
    model: PreTrainedModel, batch: Mapping[str, Tensor], label: str, *, otherwise: UnsupportedModelError
) -> tuple[PrunableModule, ...]:
    """Return the attention modules whose heads linear layers read; raise `otherwise` if there are none."""
    probe = Probe(model)
    dense = HeadObserver(probe)
    before = [*probe.model.modules()]
    with requiring_gradients(probe.small_parameters()), dense.watching():
        dense.end(probe.run(batch, before=dense.before, after=dense.after))
    if before != [*probe.model.modules()]:
        raise UnsupportedModelError(f"{label} cannot be cut: its code replaces modules of its own while it runs")
    found, reasons = dense.modules()
    if not found:
        raise UnsupportedModelError(f"{label} cannot be cut: {reasons[0]}") if reasons else otherwise
    others = {f.name for f in found[1::2]}

    def in_every_other(module: PrunableModule) -> Kept:
        # Modules that share a tensor, such as a bias, must not have to keep the same heads.
        if module.name not in others:
            return module.kept(range(module.units))
        return without_first_query(module) if module.group_size > 1 else without_first_group(module)

    modules = [_describe(f) for f in found]
    rehearsals = [partial(ConsumerRehearsal, dense, probe, keep) for keep in (without_first_group, in_every_other)]
    return rehearsed(label, probe, modules, head_counts, rehearsals, batch, supported=SUPPORTED)


def _describe(found: FoundHeads) -> PrunableModule:
    features = (
        Slice(layer, 0, torch.tensor(head_of), per_group=per_group)
        for layer, kinds in found.features.items()
        for per_group, head_of in kinds.items()
    )
    parameters = (
        Slice(name, axis, torch.tensor(head_of), parameter=True) for name, (axis, head_of) in found.parameters.items()
    )
    return PrunableModule(
        name=found.name,
        units=found.heads,
        unit_width=found.width,
        consumer=found.consumer,
        slices=(*features, *parameters),
        groups=found.groups,
        key_width=found.key_width,
        narrowed=found.arguments,
    )


def head_counts(module: PrunableModule) -> Meanings:
    """Return what the attributes of an attention module may count: heads, or features of all heads."""
    assert module.key_width is not None
    widths = [
        AttributeCount("units", module.key_width),
        AttributeCount("groups", module.key_width),
        AttributeCount("groups", module.unit_width),
        AttributeCount("units", module.unit_width),
    ]
    by_name = {name: AttributeCount(of) for of, known in _NAMES.items() for name in known}
    return Meanings(by_name=by_name | {"all_head_size": widths[0]}, by_value=widths)


def without_first_group(module: PrunableModule) -> Kept:
    """Keep all groups but the first; of a module with one group, `without_first_query`."""
    if module.groups == 1:
        return without_first_query(module)
    return module.kept(range(module.group_size, module.units))


def without_first_query(module: PrunableModule) -> Kept:
    """Keep all units but the first of every group; all units if a group has only one."""
    first = module.group_size > 1
    return module.kept(u for u in range(module.units) if not first or u % module.group_size)
