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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..model.linear import is_linear
from ..model.modes import requiring_gradients
from .neurons import by_tensor, common_module, evenly_owned, layers_of_linears
from .probe import Call, Probe, gradients_of, head_of_axes, head_of_columns, positive_weights
from .reads import LinearObserver, sample
from .rehearse import ConsumerRehearsal, Meanings, rehearsed
from .units import AttributeCount, Kept, PrunableModule, Slice


class HeadObserver(LinearObserver):
    """Hooks for one run of a probe, which record the heads that linear layers read."""

    def __init__(self, probe: Probe):
        super().__init__(probe, layers_of_linears(probe.model))
        self._model = probe.model
        # Tensor -> its maker: the first module with linear layers that returned it.
        self._makers: Any = WeakTensorKeyDictionary()
        # Name, value and maker ("" for none) of the arguments since the last layer that reads heads. A module gets a
        # copy of the value, whose gradient shows the heads it reaches.
        self._arguments: list[tuple[str, nn.Parameter, str]] = []
        self._makers_of_arguments: set[str] = set()  # of those arguments that have values for every head
        self._found: dict[Call, PrunableModule] = {}  # call of a consumer -> the heads in its input

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, inside the block, the arguments and outputs of every module that has a linear layer as a child."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if name and any(map(is_linear, module.children())):
                    replacing = module.register_forward_pre_hook(self._copy_arguments, with_kwargs=True, prepend=True)
                    hooks.enter_context(replacing)
                    hooks.enter_context(module.register_forward_hook(partial(self._record_maker, name)))
            yield

    def _copy_arguments(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the arguments that depend on no linear layer's features, such as a position bias, by copies."""
        names = [*inspect.signature(layer.forward).parameters]

        def copied(name: str, value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2):
                return value
            if not value.numel() or self._leaves_of(value)[0]:
                return value
            leaf = nn.Parameter(value.detach())
            passed = leaf.clone()  # a model may write into it, but not into a leaf
            maker = self._makers.get(value, "")
            self._makers[passed] = maker
            self._arguments.append((name, leaf, maker))
            if name in getattr(layer, "narrowed", ()):
                self._makers_of_arguments.add(maker)
            return passed

        return (
            tuple(copied(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :],
            {name: copied(name, value) for name, value in kwargs.items()},
        )

    def _record_maker(self, module: str, layer: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor):
                self._makers.setdefault(output, module)

    def _examine(self, call: Call, x: Tensor, leaves: dict[Call, Tensor], parameters: dict[str, nn.Parameter]) -> None:
        """Find the heads in a layer's input, and the arguments since the last such layer that have values for each."""
        heads = heads_in(call[0], x, leaves, parameters)
        if heads is None:
            return
        narrowed = {}
        values = {number: value for number, (_, value, _) in enumerate(self._arguments)}
        for number, by_axis in head_of_axes(x, heads.unit_width, values).items():
            name, _, maker = self._arguments[number]
            if (axis_and_heads := _axis_of_heads(by_axis, heads.units)) is None:
                continue
            axis, head_of = axis_and_heads
            if torch.equal(head_of, torch.arange(len(head_of)) % heads.units):  # the heads run fastest
                narrowed[name] = axis, heads.units
                self._makers_of_arguments.add(maker)
        self._arguments = []
        self.reads[call].rows = sample(x)
        self._found[call] = replace(heads, narrowed=narrowed)

    def modules(self) -> tuple[list[PrunableModule], list[str]]:
        """Return the modules with heads in the order of the run, and for each that cannot be cut the reason."""
        found: list[tuple[PrunableModule, type]] = []
        reasons: list[str] = []
        for call, heads in self._found.items():
            if heads.units == 1:  # features that all heads would share look like those of the only one
                slices = (piece for piece in heads.slices if piece.parameter or self._only_makes(piece.tensor, heads))
                self._found[call] = replace(heads, slices=tuple(slices))
        for call, heads in self._found.items():
            if call[1] or not heads.producers:
                continue  # a later call, with shared weights, which `_reason_against` compares; or heads of no layer
            heads = replace(heads, name=common_module(heads.producers))
            owner = self._model.get_submodule(heads.name)
            narrowed: Mapping[str, Any] = getattr(owner, "narrowed", {})  # of a slim model
            if narrowed:
                heads = replace(heads, narrowed={name: (axis, total) for name, (axis, total, _) in narrowed.items()})
            reason = self._reason_against(heads)
            if any(other.name == heads.name for other, _ in found):
                reason = "several layers read heads of one module"
            if reason:
                reasons.append(f"{reason} in {heads.name} ({type(owner).__name__})")
            else:
                found.append((heads, type(owner)))
        # A single head is one if a module of that class has several; other layers mix features of all tokens too.
        several = {module_class for heads, module_class in found if heads.units > 1}
        slim = getattr(self._model.config, "hies_export", None) is not None
        return [heads for heads, module_class in found if slim or module_class in several], reasons

    def _only_makes(self, layer: str, heads: PrunableModule) -> bool:
        """Return whether nothing but the consumer of these heads reads the features of a layer."""
        readers = {name for call in self.reads if call[0] == layer for name, _ in self.readers.get(call, ())}
        return readers <= {heads.consumer}

    def _reason_against(self, heads: PrunableModule) -> str:
        """Return why the heads of a module cannot be cut; "" if they can."""
        for call in (call for call in self.reads if call[0] == heads.consumer):
            other = self._found.get(call)
            if other is None or by_tensor(other) != by_tensor(heads):
                return f"{heads.consumer} does not read the same heads every time"
        for layer in heads.producers:
            if not self._only_makes(layer, heads):
                return f"the features of {layer} do more than make heads"
        if heads.name in self._makers_of_arguments:
            return "other layers take their bias of every head from the one that is made"
        for name, module in self._model.get_submodule(heads.name).named_modules(prefix=heads.name):
            if is_linear(module) and (name, 0) not in self.reads:
                return f"these inputs do not reach {name}"
        return ""


def heads_in(
    consumer: str, x: Tensor, leaves: Mapping[Call, Tensor], parameters: Mapping[str, nn.Parameter]
) -> PrunableModule | None:
    """Return the heads that are side by side in a linear layer's input x, (..., heads * width); None if it has none.

    Some features must reach other tokens, and some a whole block (queries and keys). If there is a single head, some
    must reach one column each (values). The module that is returned has no name yet.
    """
    columns = x.shape[-1]
    if not leaves or not _reaches_other_tokens(x, list(leaves.values())):
        return None
    single = head_of_columns(x, 1, leaves)  # every column as a head of its own
    has_values = any((column >= 0).any() for column, _ in single.values())
    divisors = [count for count in range(columns // 2, 1, -1) if columns % count == 0]
    for heads in [*divisors, *([1] if has_values else [])]:  # the most heads that have whole blocks
        width = columns // heads
        by_head = head_of_columns(x, width, leaves)
        if any(_of_whole_blocks(by_head[call].head, single[call].head, heads, width) for call in by_head):
            break
    else:
        return None
    owned: dict[str, Tensor] = {}  # linear layer -> the head of each feature, -1 for none
    key_width = 0
    for call, (head_of, _) in by_head.items():
        if not evenly_owned(head_of, heads):
            return None
        if (head_of >= 0).any():
            owned[call[0]] = head_of
        # Features of queries and keys reach a whole block each, and no single column.
        if (single[call].head < 0).all() and (head_of >= 0).all() and not key_width:
            key_width = len(head_of) // heads
    slices = [Slice(layer, 0, head_of) for layer, head_of in owned.items()]
    axes = {name: _axis_of_heads(by_axis, heads) for name, by_axis in head_of_axes(x, width, parameters).items()}
    slices += [Slice(name, *axis_and_heads, parameter=True) for name, axis_and_heads in axes.items() if axis_and_heads]
    return PrunableModule(
        name="",
        units=heads,
        unit_width=width,
        consumer=consumer,
        slices=tuple(slices),
        groups=heads if has_values else 1,  # without values of their own, all heads share one
        key_width=key_width or width,
    )


def _of_whole_blocks(head_of: Tensor, column_of: Tensor, heads: int, width: int) -> bool:
    """Return whether all heads own equally many features that reach several columns each, at least half a width.

    `head_of` and `column_of` are the head and the single column that each feature reaches, negative if there is not
    exactly one. `width` is how many columns a head has.
    """
    head_of_block = head_of.where(column_of < 0, -1)
    # Fewer are values whose columns were not told apart. Head 0 stands for all, which own equally many.
    return evenly_owned(head_of_block, heads) and 2 * int((head_of_block == 0).sum()) >= width


def _reaches_other_tokens(x: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Return whether some features reach the input of a layer at other tokens than their own.

    The inputs at every second token are tested for features of the tokens between. Features of another number of tokens
    than the input, such as those of positions, belong to none of its tokens, so they count too.
    """
    rows = x.reshape(-1, x.shape[-1])
    (gradients,) = gradients_of(rows[1::2], [positive_weights(rows[1::2].shape)], leaves)
    by_token = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients if gradient is not None]
    return any(len(gradient) != len(rows) or bool((gradient[::2] != 0).any()) for gradient in by_token)


def _axis_of_heads(by_axis: Sequence[Tensor], heads: int) -> tuple[int, Tensor] | None:
    """Return the first axis all of whose indices heads own, equally many each, and their heads; None without one."""
    for axis, head_of in enumerate(by_axis):
        if (head_of >= 0).all() and evenly_owned(head_of, heads):
            return axis, head_of
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
    modules_before = [*probe.model.modules()]
    with requiring_gradients(probe.small_parameters()), dense.watching():
        dense.end(probe.run(batch, before=dense.before, after=dense.after))
    if modules_before != [*probe.model.modules()]:
        raise UnsupportedModelError(f"{label} cannot be cut: its code replaces modules of its own while it runs")
    modules, reasons = dense.modules()
    if not modules:
        raise UnsupportedModelError(f"{label} cannot be cut: {reasons[0]}") if reasons else otherwise
    every_other = {module.name for module in modules[1::2]}

    def cut_every_other(module: PrunableModule) -> Kept:
        # Modules that share a tensor, such as a bias, must not have to keep the same heads.
        return without_first_group(module) if module.name in every_other else module.kept(range(module.units))

    rehearsals = [partial(ConsumerRehearsal, dense, probe, keep) for keep in (without_first_group, cut_every_other)]
    return rehearsed(label, probe, modules, head_counts, rehearsals, batch, supported=SUPPORTED)


def head_counts(module: PrunableModule) -> Meanings:
    """Return what the attributes of an attention module may count: heads, or features of all heads."""
    assert module.key_width is not None
    keys, values = module.key_width, module.unit_width
    factors = (("units", keys), ("groups", keys), ("groups", values), ("units", values))
    widths = [AttributeCount(counted, width) for counted, width in factors]
    by_name = {name: AttributeCount(counted) for counted, names in _NAMES.items() for name in names}
    return Meanings(by_name=by_name | {"all_head_size": widths[0]}, by_value=widths)


def without_first_group(module: PrunableModule) -> Kept:
    """Keep all groups but the first; of a module with one group, `without_first_query`."""
    if module.groups == 1:
        return without_first_query(module)
    return module.kept(range(module.group_size, module.units))


def without_first_query(module: PrunableModule) -> Kept:
    """Keep all units but the first of every group; all units if a group has only one."""
    return module.kept(u for u in range(module.units) if module.group_size == 1 or u % module.group_size != 0)
