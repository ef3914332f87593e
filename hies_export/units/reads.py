"""Observe one run of a weightless model: which linear layers read the features of which, and how.

Every linear layer of the probe returns leaves, so the autograd graph of a layer's input ends at the layers right in
front of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .probe import Call, Probe, features_in, gradients_of, positive_weights, ratios_of

MIXED, NOWHERE = -1, -2  # in place of a column: the feature reaches several, or none
# A block has one producer, or gate and up. An input with more sources is on the path between layers, so features that
# other layers also read need not be examined.
_FEW = 3
_SAMPLED_ROWS = 16  # rows of an input, about so many, that two runs are compared by
_DIGIT_TOLERANCE = 0.1  # how far from a whole number a digit of a column's number may be
_TOKEN_TOLERANCE = 1e-3  # how far from its token's label a ratio may be
_SLOPE_TOLERANCE = 1e-4  # how far apart a feature's slopes may be, as a share of the largest


@dataclass
class Reach:
    """The columns of a linear layer's input that features reach."""

    # (features,), or the shape of a parameter, int64: the one column that each reaches, `MIXED` or `NOWHERE`.
    column: Tensor
    at_token: bool = True  # whether every feature reaches its own token only; True for parameters
    linear: bool = False  # whether the derivative of its column to a feature is the same at every token


@dataclass
class Read:
    """One call of a linear layer, as observed."""

    columns: int  # of its input
    sources: set[Call]  # calls of the layers on whose features its input depends
    constant: bool  # whether its input depends on nothing but buffers, such as a table of coordinates
    signature: tuple[float, float]  # `signature` of its input
    # Examined source -> which column each of its features reaches.
    reach: dict[Call, Reach] = field(default_factory=dict)
    # Parameter outside of linear layers -> the same for its elements.
    parameters: dict[str, Reach] = field(default_factory=dict)
    rows: Tensor | None = None  # some rows of the input, (rows, columns), if `reach` is not empty


class LinearObserver:
    """Hooks for one run of a probe, which record what every linear layer reads."""

    def __init__(self, probe: Probe, inside: Iterable[str]):
        """Record the inputs of all layers, and examine those of the layers named in `inside`."""
        small = {id(p) for p in probe.small_parameters() if p.numel()}
        self._parameters = {id(p): name for name, p in probe.model.named_parameters() if id(p) in small}
        self._leaves: Any = WeakTensorKeyDictionary()
        self._inside = set(inside)
        self.reads: dict[Call, Read] = {}  # in the order of the calls
        # Call -> the calls whose inputs depend on its features; ("", 0) stands for the model's outputs.
        self.readers: dict[Call, set[Call]] = {}
        self.outputs = (0.0, 0.0)  # signature of the model's outputs

    def before(self, call: Call, x: Tensor) -> None:
        """Record what the input of a linear layer depends on."""
        leaves, parameters = self._leaves_of(x)
        constant = torch.is_grad_enabled() and not x.requires_grad
        self.reads[call] = Read(x.shape[-1], set(leaves), constant, signature(x))
        for leaf in leaves:
            self.readers.setdefault(leaf, set()).add(call)
        if call[0] not in self._inside or not x.numel():
            return
        with suppress(RuntimeError):  # the model wrote into what a derivative needs
            self._examine(call, x, leaves, parameters)

    def _examine(self, call: Call, x: Tensor, leaves: dict[Call, Tensor], parameters: dict[str, nn.Parameter]) -> None:
        """Find the columns that features and parameters reach, if these can be those of neurons."""
        are_few = len(leaves) <= _FEW
        examined = {leaf: features for leaf, features in leaves.items() if are_few or len(self.readers[leaf]) == 1}
        if len(examined) < len(leaves):
            parameters = {}  # those of a whole path between layers
        tokens = x.numel() // x.shape[-1]
        if not examined or any(features.numel() != tokens * features.shape[-1] for features in examined.values()):
            return
        reached = reach(x, list(examined.values()), list(parameters.values()))
        read = self.reads[call]
        read.reach = dict(zip(examined, reached[: len(examined)], strict=True))
        read.parameters = dict(zip(parameters, reached[len(examined) :], strict=True))
        read.rows = sample(x)

    def after(self, call: Call, features: Tensor) -> None:
        """Remember which call of a linear layer returned these features, to find it where a graph ends at them."""
        self._leaves[features] = call

    def end(self, outputs: Any) -> None:
        """Record which features the model's outputs depend on, and their signature."""
        tensors = list(tensors_in(outputs))
        self.outputs = signature(*tensors)
        for tensor in tensors:
            for leaf in self._leaves_of(tensor)[0]:
                self.readers.setdefault(leaf, set()).add(("", 0))

    def _leaves_of(self, x: Tensor) -> tuple[dict[Call, Tensor], dict[str, nn.Parameter]]:
        """Return what a tensor's graph ends at: features, in the order of their calls, and other parameters by name."""
        leaves: dict[Call, Tensor] = {}
        parameters: dict[str, nn.Parameter] = {}
        if not x.requires_grad or not torch.is_grad_enabled():
            return leaves, parameters
        stack, seen = [x.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)  # that of a leaf, which is where gradients would be added up
            if variable is None:
                stack += [following for following, _ in node.next_functions]
            elif variable in self._leaves:
                leaves[self._leaves[variable]] = variable
            elif id(variable) in self._parameters:
                parameters[self._parameters[id(variable)]] = variable
        return {call: leaves[call] for call in self.reads if call in leaves}, parameters


def reach(x: Tensor, leaves: list[Tensor], parameters: list[nn.Parameter]) -> list[Reach]:
    """Return which columns of a linear layer's input each feature of the leaves and the parameters reaches.

    Here x_tj is column j of the input at token t; c_j is a label of column j. With random positive weights w, take the
    gradients of sum_tj w_tj x_tj and of sum_tj w_tj c_j x_tj to a feature. If the feature reaches column j alone, their
    ratio is c_j at every token. If it reaches several columns, the ratio varies from token to token. The columns are
    numbered by two digits, so that the ratios of any number of columns are told apart in float32. A third such ratio,
    with one label per token, is the token's own only if the feature reaches no other token. Then the first gradient,
    divided by w_tj, is the derivative of x_tj; `Reach.linear` says whether it is the same at every token.
    """
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    weights = positive_weights(rows.shape)
    base = math.isqrt(columns - 1) + 1  # the least in which two digits are enough
    number = torch.arange(columns)
    token_labels = 1 + torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(1))
    labels = (1.0, 1 + (number // base) / base, 1 + (number % base) / base, token_labels)
    sources = [*leaves, *parameters]
    results = []
    for source, *gradients in zip(sources, *gradients_of(rows, (weights * c for c in labels), sources), strict=True):
        plain, high, low, by_token = (
            (torch.zeros_like(source) if g is None else g).reshape(-1, features_in(source)) for g in gradients
        )  # each (tokens, features)
        column = _column_of(plain, high, low, base)
        column[column >= columns] = MIXED
        if isinstance(source, nn.Parameter):
            results.append(Reach(column.view(source.shape)))
            continue
        at_token = bool(((ratios_of(by_token, plain) - token_labels).abs().nan_to_num(0.0) < _TOKEN_TOLERANCE).all())
        # The gradient of a feature that reaches several tokens is a sum, which no single weight can be divided out of.
        slope = plain / weights[:, column.clamp(min=0)] if at_token else plain
        results.append(Reach(column, at_token, _is_linear(slope)))
    return results


def _column_of(plain: Tensor, high: Tensor, low: Tensor, base: int) -> Tensor:
    """Return the column that each feature reaches, (features,), from its gradients in `reach`, (tokens, features)."""
    digits = [(ratios_of(labelled, plain) - 1) * base for labelled in (high, low)]
    rounded = [digit.nanmean(0).round() for digit in digits]
    is_single = ~digits[0].isnan().all(0)
    for digit, whole in zip(digits, rounded, strict=True):
        is_single &= ((digit - whole).abs().nan_to_num(0.0) < _DIGIT_TOLERANCE).all(0)
    column = torch.where(is_single, rounded[0] * base + rounded[1], MIXED).long()
    # Weights are random, so sums over several columns do not cancel out at every token: such a feature reaches none.
    column[((plain == 0) & (high == 0)).all(0)] = NOWHERE
    return column


def _is_linear(slope: Tensor) -> bool:
    """Return whether each feature's slope, (tokens, features), is the same at every token; False for a single token."""
    spread = slope.amax(0) - slope.amin(0)
    return len(slope) > 1 and bool((spread <= _SLOPE_TOLERANCE * slope.abs().amax(0)).all())


def sample(x: Tensor) -> Tensor:
    """Return some rows of a layer's input, evenly spaced, (rows, columns)."""
    rows = x.detach().reshape(-1, x.shape[-1])
    return rows[:: max(1, len(rows) // _SAMPLED_ROWS)].clone()


def signature(*tensors: Tensor) -> tuple[float, float]:
    """Return the sum of all finite elements and the sum of their absolute values, which reveal a change."""
    values = [tensor.detach().nan_to_num(posinf=0.0, neginf=0.0) for tensor in tensors]  # masked logits are infinite
    return (
        sum(v.sum(dtype=torch.float64).item() for v in values),
        sum(torch.linalg.vector_norm(v.flatten(), 1, dtype=torch.float64).item() for v in values),
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
