"""Observe one run of a weightless model: which modules compute attention, what feeds their heads, what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..model.attention import AttentionCall
from ..model.kernels import VisibleKeys, attend
from ..model.linear import is_linear
from .probe import Probe, head_of_columns, head_of_features


@dataclass
class FoundAttention:
    """One attention module, as observed in a run of the probe.

    Attributes:
        module: The module of the probe's model.
        query, key, value: What the attention function was given, (batch, heads, tokens, head_dim).
        head_bias: Whether the attention mask differs between heads.
        heads_of: "query", "key" or "value" -> linear layer -> what `head_of_features` says of its features.
        per_head: Parameter outside of linear layers whose every element belongs to one head -> whether these are
            key/value heads (else query heads), and the head of each element, in the parameter's shape.
        sinks: Attention sinks, (heads,), or None.
        leaves: Linear layer that ran before the attention function -> its output features.
        output: (batch, tokens, heads * value width), a leaf of the autograd graph.
        readers: Linear layers whose input depends on the output directly.
        read: Input of the last reader; None until there is one.
        columns: "" (the output) or a layer that gates it -> what `head_of_columns` says of the reader's input.
    """

    name: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    head_bias: bool
    heads_of: dict[str, dict[str, tuple[Tensor, Tensor]]]
    per_head: dict[str, tuple[bool, Tensor]]
    sinks: Tensor | None
    leaves: dict[str, Tensor]
    output: Tensor
    readers: list[str] = field(default_factory=list)
    read: Tensor | None = None
    columns: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class AttentionObserver:
    """Hooks for one run of a probe, which record in `found`, by module, what feeds and what reads its heads."""

    def __init__(self, probe: Probe):
        self._names = {id(module): name for name, module in probe.model.named_modules()}
        self._visible = VisibleKeys()
        self._recent: dict[str, Tensor] = {}  # layers that ran since the last attention function
        self._waiting: list[FoundAttention] = []  # modules whose output may still be read
        self.found: dict[nn.Module, FoundAttention] = {}

    def attention(self, call: AttentionCall) -> Tensor:
        """Return a layer's attention output, detached from what came before it."""
        output = attend(call, self._visible)
        output = output.detach().transpose(1, 2).flatten(2).requires_grad_()  # (batch, tokens, heads * value width)
        if call.module not in self.found:
            roles = {"query": call.query, "key": call.key, "value": call.value}
            found = FoundAttention(
                name=self._names[id(call.module)],
                module=call.module,
                query=call.query.detach(),
                key=call.key.detach(),
                value=call.value.detach(),
                head_bias=call.mask is not None and call.mask.dim() == 4 and call.mask.shape[1] > 1,
                heads_of={role: head_of_features(tensor, self._recent) for role, tensor in roles.items()},
                per_head=_per_head(call, roles),
                sinks=None if call.sinks is None else call.sinks.detach(),
                leaves=self._recent,
                output=output,
            )
            self.found[call.module] = found
            self._waiting = [w for w in self._waiting if not w.readers] + [found]
        self._recent = {}
        return output.unflatten(-1, (call.query.shape[1], -1)).transpose(1, 2)

    def before(self, name: str, x: Tensor) -> None:
        """Record a linear layer if its input depends on the output of an attention module."""
        for found in self._waiting:
            # Some layers run without gradients, such as those that only choose which keys are seen.
            if not x.requires_grad or not torch.is_grad_enabled() or name in found.readers:
                continue
            if torch.autograd.grad(x.sum(), found.output, retain_graph=True, allow_unused=True)[0] is None:
                continue
            found.readers.append(name)
            found.read = x.detach()
            if x.shape[-1] == found.output.shape[-1]:
                width = found.value.shape[3]
                found.columns = head_of_columns(x, width, {"": found.output, **found.leaves, **self._recent})
            found.leaves = {}  # frees the features, which would otherwise fill memory layer by layer

    def after(self, name: str, features: Tensor) -> None:
        """Record the features that a linear layer returned."""
        self._recent[name] = features


def _per_head(call: AttentionCall, roles: Mapping[str, Tensor]) -> dict[str, tuple[bool, Tensor]]:
    """Return the parameters outside of linear layers whose every element belongs to one head; see `FoundAttention`."""
    linears = {name for name, child in call.module.named_modules() if is_linear(child)}
    parameters = {
        name: parameter
        for name, parameter in call.module.named_parameters()
        if parameter.requires_grad and name.rpartition(".")[0] not in linears
    }
    sinks = {} if call.sinks is None else {"sinks": call.sinks.view(1, -1, 1, 1)}
    found = {}
    for role, tensor in {**roles, **sinks}.items():
        for name, (heads, _) in head_of_features(tensor, parameters).items():
            if tensor.shape[1] > 1 and set(heads.tolist()) == set(range(tensor.shape[1])):
                found[name] = (role in ("key", "value"), heads.view(parameters[name].shape))
    return found
