"""Find the attention modules of a model, and which features of which linear layers belong to which head.

Nothing here knows an architecture. A forward pass of the model without its weights (`Probe`) tells which modules call
the attention function, with what shapes, and how features of the linear layers in front of it end up in heads: separate
or fused projections, rotations, norms of single heads and gates are all the same to it. Then the cut is rehearsed: with
a head fewer everywhere, the model's own code must hand the attention function exactly the heads that are left.
Whatever does not fit is refused by name: a wrong cut is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..model.attention import AttentionCall, use_attention
from ..model.kernels import VisibleKeys, attend
from ..model.linear import is_linear
from ..values import AttentionSite, Projection
from .probe import Probe, head_of_columns, head_of_features
from .rehearse import SUPPORTED, _Found, _rehearsed

# Features of every head, by what they feed: for these roles the features of a head must all be its own. Keys may
# share some among the heads (the rotary part of multi-head latent attention).
_WHOLE = ("query", "value")


def find_attention(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[AttentionSite, ...]:
    """Say where the heads of a model are.

    Args:
        model: The model; not changed, and its weights neither read nor needed: it may be on the meta device.
        batch: Inputs of the model; two short samples are enough.

    Returns:
        One site per attention module, in the order the forward pass reaches them.

    Raises:
        UnsupportedModelError: Some attention module cannot be cut; the message says which and why.

    Examples:
        >>> sites = find_attention(model, batches[0])
        >>> [(site.name, site.heads) for site in sites][:1]
        [('bert.encoder.layer.0.attention.self', 6)]
    """
    label = f"{type(model).__name__} ({model.config.model_type})"
    probe = Probe(model)
    observer = _Observer(probe)
    for parameter in probe.small_parameters():
        parameter.requires_grad_(True)
    with use_attention(probe.model, observer.attention):
        probe.run(batch, before=observer.before, after=observer.after)
    for parameter in probe.small_parameters():
        parameter.requires_grad_(False)
    found = list(observer.found.values())
    if not found:
        raise UnsupportedModelError(
            f"{label} never called the attention function, so it has no attention that can be scored; "
            f"supported are {SUPPORTED}"
        )
    return _rehearsed(probe, batch, found, [_site(f, label) for f in found], label)


def tower_of(model: PreTrainedModel, site: AttentionSite) -> str:
    """The tower of a composite model that an attention module is part of.

    Returns:
        "language", or else the name of the sub-config that the module reads without its ending: "vision", "audio", ...
    """
    own = getattr(model.get_submodule(site.name), "config", None)
    own = getattr(own, "_config", own)  # a slim layer's view of the model's config
    for name in model.config.sub_configs:
        config = getattr(model.config, name, None)
        if config is not None and config is own:
            tower = name.removesuffix("_config")
            return "language" if config is model.config.get_text_config() or tower == "text" else tower
    return "language"


class _Observer:
    """Watches one run of a probe."""

    def __init__(self, probe: Probe):
        self._names = {id(module): name for name, module in probe.model.named_modules()}
        self._visible = VisibleKeys()
        self._recent: dict[str, Tensor] = {}  # layers that ran since the last attention
        self._waiting: list[_Found] = []  # their output has not been read, or others may read it still
        self.found: dict[nn.Module, _Found] = {}

    def attention(self, call: AttentionCall) -> Tensor:
        output = attend(call, self._visible)
        output = output.detach().transpose(1, 2).flatten(2).requires_grad_()  # (batch, tokens, heads * value_dim)
        if call.module not in self.found:
            roles = {"query": call.query, "key": call.key, "value": call.value}
            site = _Found(
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
        self._recent[name] = features


def _per_head(call: AttentionCall, roles: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Parameters of an attention module, but those of its linear layers, whose elements each belong to one head."""
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
                kind = "key_value" if role in ("key", "value") else "query"
                found[name] = (kind, heads.view(parameters[name].shape))
    return found


def _site(found: _Found, label: str) -> AttentionSite:
    """What was seen, as a site; refused where heads do not have features of their own."""

    def refuse(reason: str) -> UnsupportedModelError:
        where = f"{found.name or 'the model'} ({type(found.module).__name__})"
        return UnsupportedModelError(f"{label} cannot be cut: {reason} in {where}; supported are {SUPPORTED}")

    heads, key_value_heads = found.query.shape[1], found.key.shape[1]
    if heads % key_value_heads or found.value.shape[1] != key_value_heads:
        raise refuse(f"{heads} query, {key_value_heads} key and {found.value.shape[1]} value heads do not match")
    if found.head_bias:
        raise refuse("every head has an attention bias of its own")
    rows: dict[str, dict[str, list[set[int]]]] = {}
    for role, count, dim in (
        ("query", heads, found.query.shape[3]),
        ("key", key_value_heads, found.key.shape[3]),
        ("value", key_value_heads, found.value.shape[3]),
    ):
        if not found.heads_of[role]:
            raise refuse(f"no linear layer in front of it gives the {role}")
        own = [0] * count
        for layer, (head_of, used) in found.heads_of[role].items():
            kind = "query" if role == "query" else "key_value"
            per_head = rows.setdefault(layer, {}).setdefault(kind, [set() for _ in range(count)])
            for head in range(count):
                features = ((head_of == head) & used).nonzero().flatten().tolist()
                per_head[head].update(features)
                own[head] += len(features)
        if count > 1 and (len(set(own)) > 1 or not own[0] or (role in _WHOLE and own[0] != dim)):
            layers = " and ".join(sorted(found.heads_of[role]))
            raise refuse(f"the {role} heads do not have features of their own in {layers} (they are mixed or shared)")
    parameters = []
    for parameter, (kind, head_of) in found.per_head.items():
        of_row = head_of.flatten(1) if head_of.dim() > 1 else head_of[:, None]
        if (of_row != of_row[:, :1]).any():
            raise refuse(f"the parameter {parameter} has values for every head, but not in rows,")
        count = heads if kind == "query" else key_value_heads
        per_row = tuple(tuple((of_row[:, 0] == head).nonzero().flatten().tolist()) for head in range(count))
        parameters.append(Projection(f"{found.name}.{parameter}".lstrip("."), **{kind: per_row}))
    if len(found.readers) != 1:
        what = "no linear layer reads the attention output"
        raise refuse(what if not found.readers else f"{' and '.join(found.readers)} all read the attention output")
    order = torch.arange(heads * found.value.shape[3]) // found.value.shape[3]
    if not found.columns or not torch.equal(found.columns[""][0], order):
        raise refuse(f"the heads do not reach {found.readers[0]} side by side, each on its own,")
    for layer, (head_of, used) in found.columns.items():
        if not layer or (head_of[used] == -1).all():
            continue  # a gate that all heads share stays as it is
        if (head_of[used] == -1).any():
            raise refuse(f"features of {layer} gate several heads")
        per_head = rows.setdefault(layer, {}).setdefault("query", [set() for _ in range(heads)])
        for head in range(heads):
            per_head[head].update((head_of == head).nonzero().flatten().tolist())
    projections = tuple(
        Projection(layer, **{kind: tuple(tuple(sorted(h)) for h in per_head) for kind, per_head in kinds.items()})
        for layer, kinds in rows.items()
        if any(features for per_head in kinds.values() for features in per_head)
    )
    return AttentionSite(
        name=found.name,
        heads=heads,
        key_value_heads=key_value_heads,
        query_dim=found.query.shape[3],
        value_dim=found.value.shape[3],
        projections=projections,
        output=found.readers[0],
        parameters=tuple(parameters),
    )
