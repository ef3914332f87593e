"""Count parameters, FLOPs and bytes of the key/value cache of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from transformers import PreTrainedModel

from ..model.copies import share_weights
from ..model.internals import keys_and_values
from ..model.modes import frozen, output_alone
from ..model.tokens import forward_inputs

T = TypeVar("T", int, float)
Shape = tuple[int, int]  # (batch, sequence)
# Bounds of numbers that are read from files: larger ones are meaningless, and may not fit a float.
Count = Annotated[int, Field(ge=0, le=10**18)]
Size = Annotated[int, Field(gt=0, le=10**18)]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=0, le=1000)]  # of times of two models


def si(number: float) -> str:
    """Return three digits of a number (all of a whole one below 1,000) and an SI prefix, to be put before a unit."""
    # Rounded first, so that 999,999 becomes 1.00 M and not 1000 k.
    rounded = float(f"{number:.3g}") if number >= 1000 else number
    power = min((len(str(int(rounded))) - 1) // 3, 4)
    scaled = rounded / 1000**power
    decimals = 0 if power == 0 and number == int(number) else max(0, 3 - len(str(int(scaled))))
    return f"{scaled:.{decimals}f} {('', 'k', 'M', 'G', 'T')[power]}"


class Record(Mapping[str, Any]):
    """Base of dataclasses that are also mappings: `report.quality.slim` and `report.quality["slim"]` are the same.

    Subclasses are dataclasses with `eq=False`, so that they equal a mapping with the same items.
    """

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # not `len([*self])`, which would ask for the length again


@dataclass(frozen=True, eq=False)
class Both(Record, Generic[T]):
    """One number for the dense model and one for the slim model."""

    dense: T
    slim: T

    @property
    def ratio(self) -> float:
        """The slim model's number as a share of the dense one's."""
        return self.slim / self.dense


@dataclass(frozen=True, eq=False)
class Counted(Both[int]):
    """A count of each model, and `backbone`, the part of it in their layers; None for models without lists of layers.

    Embeddings and task heads, from which no units go, are not in the backbone. Papers on language models give the size
    of a cut as a share of it.
    """

    dense: Size
    slim: Size
    backbone: Both[Size] | None = field(default=None, kw_only=True)

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in vars(self).items() if value is not None)  # files leave out a missing backbone


@dataclass(frozen=True, eq=False)
class FlopCount(Counted):
    """Floating-point operations of one forward pass of both models, at a (batch, sequence)."""

    shape: Shape


@dataclass(frozen=True, eq=False)
class StoredBytes(Both[int]):
    """Bytes of the weights' files of the dense and the slim checkpoint, and of the slim model's export."""

    dense: Size
    slim: Size
    onnx: Size | None  # graph and weights
    gguf: Size | None = None


# Model -> shapes of its inputs and weights -> FLOPs by module; a run asks for those of the dense model at every step.
_COUNTED: WeakKeyDictionary[PreTrainedModel, dict[Any, dict[str, int]]] = WeakKeyDictionary()


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters of a model; tied parameters count once.

    Args:
        model: Any module.

    Returns:
        Number of elements, not of bytes.

    Examples:
        >>> count_parameters(torch.nn.Linear(3, 4))
        16
    """
    return sum(parameter.numel() for parameter in model.parameters())


def count_both_parameters(dense: torch.nn.Module, slim: torch.nn.Module) -> Counted:
    """Count the parameters of two models, in all and in their layers."""
    models = (dense, slim)
    in_layers = [sum(count_parameters(model.get_submodule(layer)) for layer in layers_of(model)) for model in models]
    return Counted(*map(count_parameters, models), backbone=Both(*in_layers) if in_layers[0] else None)


def layers_of(model: torch.nn.Module) -> list[str]:
    """Return the names of the elements of the outermost `nn.ModuleList`s: together they are the backbone."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    elements = [f"{name}.{key}" for name, module_list in lists for key, _ in module_list.named_children()]
    return [name for name in elements if not any(name.startswith(f"{other}.") for other in elements)]


def count_flops(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    """Count the floating-point operations of one forward pass, attention products included.

    A multiply-add is two operations. `torch.utils.flop_counter` counts in the modules themselves, independently of the
    config. They run on tensors without data, and with eager attention, because on the CPU the counter does not see
    inside the fused kernel. A model whose forward depends on the values of its inputs runs on real tensors instead.

    Args:
        model: Any model; it is not changed.
        batch: Inputs by name; labels are ignored.

    Returns:
        Number of operations for the whole batch.

    Examples:
        >>> count_flops(slim, batches[0]) < count_flops(model, batches[0])
        True
    """
    return flops_by_module(model, batch)[""]


def count_both_flops(
    dense: PreTrainedModel, slim: PreTrainedModel, batches: Mapping[Shape, Mapping[str, Any]]
) -> dict[Shape, FlopCount]:
    """Count the FLOPs of one forward pass of two models, and of their layers, at each (batch, sequence)."""
    counts, layers = {}, layers_of(dense)
    for shape, batch in batches.items():
        dense_flops, slim_flops = flops_by_module(dense, batch), flops_by_module(slim, batch)
        in_layers = [sum(flops.get(layer, 0) for layer in layers) for flops in (dense_flops, slim_flops)]
        backbone = Both(*in_layers) if all(in_layers) else None
        counts[shape] = FlopCount(dense_flops[""], slim_flops[""], shape, backbone=backbone)
    return counts


def innermost(name: str, modules: Iterable[str]) -> str | None:
    """Return the innermost of `modules`, dotted names, that is or holds `name` ("" holds all); None if none does."""
    holding = [module for module in modules if not module or f"{name}.".startswith(f"{module}.")]
    return max(holding, key=len, default=None)


def cache_bytes_per_token(model: PreTrainedModel) -> int | None:
    """Return the bytes that each token adds to the key/value cache of one sequence; None if the model cannot generate.

    They are those of the cache that the model itself fills, run on tensors without data in its own dtype.
    """
    if not model.can_generate():
        return None
    without_data = share_weights(model, device="meta").eval()
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")  # any number of tokens: the bytes are divided by it
    with output_alone(without_data, cache=True), torch.no_grad():
        cached = keys_and_values(without_data(input_ids=ids))
    return sum(t.numel() * t.element_size() for layer in cached.values() for t in layer) // ids.shape[1]


def flops_by_module(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, int]:
    """Return `count_flops` by dotted name of a module, those inside it included; the empty name is the whole model.

    What was counted without data is remembered as long as the model lives, by the shapes of its weights and inputs.
    """
    inputs = forward_inputs(model, batch)
    input_shapes = tuple((name, tensor.shape) for name, tensor in inputs.items())
    shapes = (input_shapes, tuple((name, weight.shape) for name, weight in model.named_parameters()))
    known = _COUNTED.setdefault(model, {})
    if shapes in known:
        return dict(known[shapes])
    # Counted without data first. A mask changes no FLOPs, so it is left out, as transformers reads its values. Without
    # one, it reads the positions of a decoder's tokens, to see whether a row holds several texts: then one is made up.
    meta = {name: tensor.to("meta") for name, tensor in inputs.items() if name != "attention_mask"}
    ids = meta.get("input_ids")
    masked = {} if ids is None else forward_inputs(model, {**meta, "attention_mask": torch.ones_like(ids)})
    # Where values are read, torch raises a RuntimeError. A model may fail in any way on a mask that is made up. If
    # both fail, it runs on the inputs themselves.
    for tensors, failures in ((meta, RuntimeError), (masked, Exception)):
        with suppress(failures):
            if tensors:
                known[shapes] = _count(share_weights(model, device="meta"), tensors)
                return dict(known[shapes])
    return _count(share_weights(model), {name: tensor.to(model.device) for name, tensor in inputs.items()})


def _count(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return `flops_by_module` of a copy, which is left in evaluation mode and with eager attention."""
    from torch.utils.flop_counter import FlopCounterMode

    model.eval().set_attn_implementation("eager")
    # Frozen: the counter follows gradients, which a view of a trainable parameter asks for even under no_grad.
    with frozen(model), output_alone(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    root = type(model).__name__
    by_module = {
        name.removeprefix(f"{root}."): sum(operators.values())
        for name, operators in counter.get_flop_counts().items()
        if name.startswith(f"{root}.")
    }
    return {**by_module, "": int(counter.get_total_flops())}
