"""Observe one run of a weightless model: which modules attend, what feeds their heads, and what reads their output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..model.attention import AttentionCall
from ..model.kernels import VisibleKeys, attend
from ..model.linear import is_linear
from .probe import Probe, head_of_columns, head_of_features

SUPPORTED = (
    "models whose attention goes through transformers' attention interface, between linear layers (nn.Linear or "
    "Conv1D, separate or fused) with features of single heads, such as BERT, ViT, LLaMA, GPT-2, Phi-3 and LLaVA"
)


@dataclass
class FoundAttention:
    """One attention module as a run of the probe showed it.

    Attributes:
        heads_of: "query", "key" or "value" -> linear layer -> the head of each feature, and whether it is used.
        per_head: Parameters outside of linear layers whose elements each belong to one head -> whether to a key/value
            head (else a query head), and the head of each element, in the parameter's shape.
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
    per_head: dict[str, tuple[bool, Tensor]]
    sinks: Tensor | None
    leaves: dict[str, Tensor]
    output: Tensor
    readers: list[str] = field(default_factory=list)
    read: Tensor | None = None
    columns: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Observer:
    """Watch one run of a probe, and note what each attention module is given and who reads its output."""

    def __init__(self, probe: Probe):
        self._names = {id(module): name for name, module in probe.model.named_modules()}
        self._visible = VisibleKeys()
        self._recent: dict[str, Tensor] = {}  # layers that ran since the last attention
        self._waiting: list[FoundAttention] = []  # their output has not been read, or others may read it still
        self.found: dict[nn.Module, FoundAttention] = {}

    def attention(self, call: AttentionCall) -> Tensor:
        """Compute a layer's attention, and cut its output off from what went before."""
        output = attend(call, self._visible)
        output = output.detach().transpose(1, 2).flatten(2).requires_grad_()  # (batch, tokens, heads * value_dim)
        if call.module not in self.found:
            roles = {"query": call.query, "key": call.key, "value": call.value}
            site = FoundAttention(
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
            self.found[call.module] = site
            self._waiting = [w for w in self._waiting if not w.readers] + [site]
        self._recent = {}
        return output.unflatten(-1, (call.query.shape[1], -1)).transpose(1, 2)

    def before(self, name: str, x: Tensor) -> None:
        """Note a linear layer that reads the output of an attention module."""
        for site in self._waiting:
            # Some layers run without gradients, such as those that only choose which keys are seen.
            if not x.requires_grad or not torch.is_grad_enabled() or name in site.readers:
                continue
            if torch.autograd.grad(x.sum(), site.output, retain_graph=True, allow_unused=True)[0] is None:
                continue
            site.readers.append(name)
            site.read = x.detach()
            if x.shape[-1] == site.output.shape[-1]:
                width = site.value.shape[3]
                site.columns = head_of_columns(x, width, {"": site.output, **site.leaves, **self._recent})
            site.leaves = {}  # the features of a whole layer; kept, they would add up

    def after(self, name: str, features: Tensor) -> None:
        """Note the features that a linear layer returned."""
        self._recent[name] = features


def _per_head(call: AttentionCall, roles: Mapping[str, Tensor]) -> dict[str, tuple[bool, Tensor]]:
    """Return the parameters of an attention module, linear layers left out, whose elements each belong to one head."""
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
