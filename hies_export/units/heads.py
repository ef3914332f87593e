"""Find the attention modules of a model, and which features of which linear layers belong to which head.

Nothing here knows an architecture. A forward pass without weights (`Probe`) shows which modules call the attention
function, and which features of the linear layers in front of it reach which head. Then the cut is rehearsed: with one
head fewer everywhere, the model's own code must hand the attention function exactly the remaining heads. A model that
fails is refused with the reason, because a wrong cut is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..model.attention import AttentionCall, NotOnInterfaceError, use_attention
from ..model.kernels import attend
from ..model.modes import requiring_gradients
from .own_heads import find_heads, head_counts, without_first_group, without_first_query
from .probe import Call, Probe, ReachedHeads, head_of_columns, head_of_features
from .rehearse import Rehearsal, rehearsed, same
from .units import PrunableModule, Slice, owner_of_rows


@dataclass
class FoundAttention:
    """One attention module, as observed in a run of the probe."""

    name: str
    module: nn.Module  # of the probe's model
    # "query", "key" or "value" -> what the attention function was given, (batch, heads, tokens, head_dim).
    given: dict[str, Tensor]
    mask_by_head: bool  # whether the attention mask differs between heads
    # The same roles -> linear layer -> the heads of that tensor that its features reach.
    heads_of: dict[str, dict[str, ReachedHeads]]
    # Parameter outside of linear layers whose every element belongs to one head -> whether these are key/value heads
    # (else query heads), and the head of each element, in the parameter's shape.
    per_head: dict[str, tuple[bool, Tensor]]
    sinks: Tensor | None  # (heads,)
    leaves: dict[str, Tensor]  # linear layer that ran before the attention function -> its output features
    output: Tensor  # (batch, tokens, heads * value width), a leaf of the autograd graph
    # Linear layer whose input depends on the output directly -> that input.
    readers: dict[str, Tensor] = field(default_factory=dict)
    # "" (the output) or a layer that gates it -> the heads of the reader's input that its features reach.
    columns: dict[str, ReachedHeads] = field(default_factory=dict)


class AttentionObserver:
    """Hooks for one run of a probe, which record in `found`, by module, what feeds and what reads its heads."""

    def __init__(self, probe: Probe):
        self._names = {id(module): name for name, module in probe.model.named_modules()}
        self._recent: dict[str, Tensor] = {}  # layers that ran since the last attention function
        self._waiting: list[FoundAttention] = []  # those whose output may still be read by a linear layer
        self.found: dict[nn.Module, FoundAttention] = {}

    def attention(self, call: AttentionCall) -> Tensor:
        """Record what feeds a call of the attention function, and return its output as a new leaf of the graph."""
        output = attend(call)
        output = output.detach().transpose(1, 2).flatten(2).requires_grad_()  # (batch, tokens, heads * value width)
        if call.module not in self.found:
            roles = {"query": call.query, "key": call.key, "value": call.value}
            found = FoundAttention(
                name=self._names[id(call.module)],
                module=call.module,
                given={role: tensor.detach() for role, tensor in roles.items()},
                mask_by_head=call.mask is not None and call.mask.dim() == 4 and call.mask.shape[1] > 1,
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

    def before(self, call: Call, x: Tensor) -> None:
        """Record a linear layer if its input depends on the output of an attention module."""
        # Some layers run without gradients, such as those that only choose which keys are seen.
        if not x.requires_grad or not torch.is_grad_enabled():
            return
        name = call[0]
        for found in (waiting for waiting in self._waiting if name not in waiting.readers):
            if torch.autograd.grad(x.sum(), found.output, retain_graph=True, allow_unused=True)[0] is None:
                continue
            found.readers[name] = x.detach()
            if x.shape[-1] == found.output.shape[-1]:
                width = found.given["value"].shape[3]
                found.columns = head_of_columns(x, width, {"": found.output, **found.leaves, **self._recent})
            found.leaves = {}  # frees the features, which would otherwise fill memory layer by layer

    def after(self, call: Call, features: Tensor) -> None:
        """Record the features that a linear layer returned."""
        self._recent[call[0]] = features


def _per_head(call: AttentionCall, roles: Mapping[str, Tensor]) -> dict[str, tuple[bool, Tensor]]:
    """Return `FoundAttention.per_head` of the module that made a call; `roles` has its query, key and value."""
    # Of a probe, only small parameters outside of linear layers require a gradient.
    parameters = {name: p for name, p in call.module.named_parameters() if p.requires_grad}
    sinks = {} if call.sinks is None else {"sinks": call.sinks.view(1, -1, 1, 1)}
    per_head = {}
    for role, tensor in {**roles, **sinks}.items():
        for name, (head_of, _) in head_of_features(tensor, parameters).items():
            # Every element has one head, and every head some elements.
            if tensor.shape[1] > 1 and set(head_of.tolist()) == set(range(tensor.shape[1])):
                per_head[name] = (role in ("key", "value"), head_of.view(parameters[name].shape))
    return per_head


SUPPORTED = (
    "models whose attention goes through transformers' attention interface, between linear layers (nn.Linear or "
    "Conv1D, separate or fused) with features of single heads, such as BERT, ViT, LLaMA, GPT-2, Phi-3 and LLaVA"
)

Refusal = Callable[[str], UnsupportedModelError]
# Linear layer, and whether key/value heads own its features (else query heads) -> the head of each, -1 for none.
_Owned = dict[tuple[str, bool], Tensor]


def find_attention(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[PrunableModule, ...]:
    """Find the attention modules of a model; an UnsupportedModelError says which cannot be cut, and why.

    Args:
        model: The model; not changed. Its weights are not read, so it may be on the meta device.
        batch: Inputs of the model; two short samples are enough.

    Returns:
        One `PrunableModule` per attention layer, in the order in which the forward pass reaches them.

    Examples:
        >>> modules = find_attention(model, batches[0])
        >>> [(module.name, module.units) for module in modules][:1]
        [('bert.encoder.layer.0.attention.self', 6)]
    """
    label = f"{type(model).__name__} ({model.config.model_type})"
    try:
        return _find_on_interface(model, batch, label)
    except NotOnInterfaceError as error:
        return find_heads(model, batch, label, otherwise=error)


def _find_on_interface(model: PreTrainedModel, batch: Mapping[str, Tensor], label: str) -> tuple[PrunableModule, ...]:
    """Return the modules that call the attention function; `label` names the model in errors."""
    probe = Probe(model)
    observer = AttentionObserver(probe)
    with requiring_gradients(probe.small_parameters()), use_attention(probe.model, observer.attention):
        probe.run(batch, before=observer.before, after=observer.after)
    if not observer.found:
        raise NotOnInterfaceError(
            f"{label} never called the attention function, so it has no attention that can be scored; "
            f"supported are {SUPPORTED}"
        )
    modules = [_describe(found, label) for found in observer.found.values()]
    selections = (without_first_group, without_first_query)
    rehearsals = [partial(_HeadRehearsal, observer.found, probe, keep) for keep in selections]
    return rehearsed(label, probe, modules, head_counts, rehearsals, batch, supported=SUPPORTED)


def tower_of(model: PreTrainedModel, module: PrunableModule) -> str:
    """Return the tower of a composite model that contains a module: "language", "vision", "audio", ...

    It is named after the sub-config that the module reads. A module without one reads that of the innermost around it.
    """
    config, name = None, module.name
    while config is None and name:
        config = getattr(model.get_submodule(name), "config", None)
        config = getattr(config, "_config", config)  # a slim layer's view of the model's config
        name = name.rpartition(".")[0]
    for field_name in model.config.sub_configs:
        if config is not None and getattr(model.config, field_name, None) is config:
            tower = field_name.removesuffix("_config")
            return "language" if config is model.config.get_text_config() or tower == "text" else tower
    return "language"


def _describe(found: FoundAttention, label: str) -> PrunableModule:
    """Return an observed attention module as a `PrunableModule`, still without its attributes."""

    def refuse(reason: str) -> UnsupportedModelError:
        where = f"{found.name or 'the model'} ({type(found.module).__name__})"
        return UnsupportedModelError(f"{label} cannot be cut: {reason} in {where}; supported are {SUPPORTED}")

    query, value = found.given["query"], found.given["value"]
    heads, key_value_heads = query.shape[1], found.given["key"].shape[1]
    if heads % key_value_heads or value.shape[1] != key_value_heads:
        raise refuse(f"{heads} query, {key_value_heads} key and {value.shape[1]} value heads do not match")
    if found.mask_by_head:
        raise NotOnInterfaceError(str(refuse("every head has an attention bias of its own")))
    owned = _features_by_head(found, refuse)
    parameters = _parameter_slices(found, refuse)
    consumer = _add_gates(owned, found, refuse)
    owned = {key: head_of for key, head_of in owned.items() if (head_of >= 0).any()}
    features = [Slice(layer, 0, head_of, per_group=per_group) for (layer, per_group), head_of in owned.items()]
    return PrunableModule(
        name=found.name,
        units=heads,
        unit_width=value.shape[3],
        consumer=consumer,
        slices=(*features, *parameters),
        groups=key_value_heads,
        key_width=query.shape[3],
    )


def _features_by_head(found: FoundAttention, refuse: Refusal) -> _Owned:
    """Return which features of the layers in front of the attention make the queries, keys and values of which head."""
    owned: _Owned = {}
    for role, tensor in found.given.items():
        heads, head_dim = tensor.shape[1], tensor.shape[3]
        if not found.heads_of[role]:
            raise refuse(f"no linear layer in front of it gives the {role}")
        widths = torch.zeros(heads, dtype=torch.int64)  # numbers of features that each head owns
        for layer, (head_of, _) in found.heads_of[role].items():
            _add_features(owned, layer, role != "query", head_of)
            widths += torch.bincount(head_of[head_of >= 0], minlength=heads)
        is_uneven = (widths != widths[0]).any() or not widths[0]
        # Heads may share some features of their keys (the rotary part of multi-head latent attention).
        if heads > 1 and (is_uneven or (role != "key" and widths[0] != head_dim)):
            layers = " and ".join(sorted(found.heads_of[role]))
            raise refuse(f"the {role} heads do not have features of their own in {layers} (they are mixed or shared)")
    return owned


def _add_features(owned: _Owned, layer: str, per_group: bool, head_of: Tensor) -> None:
    """Note in `owned` the features of a layer that heads own, by the head of each, -1 for none."""
    owned[layer, per_group] = head_of.where(head_of >= 0, owned.get((layer, per_group), head_of))


def _parameter_slices(found: FoundAttention, refuse: Refusal) -> list[Slice]:
    """Return the slices of parameters outside of linear layers whose rows belong to single heads."""
    slices = []
    for parameter, (per_group, head_of) in found.per_head.items():
        if (head_of_row := owner_of_rows(head_of)) is None:
            raise refuse(f"the parameter {parameter} has values for every head, but not in rows,")
        name = f"{found.name}.{parameter}".lstrip(".")
        slices.append(Slice(name, 0, head_of_row, per_group=per_group, parameter=True))
    return slices


def _add_gates(owned: _Owned, found: FoundAttention, refuse: Refusal) -> str:
    """Add to `owned` the features that gate heads; return the consumer, which alone must read these, side by side."""
    if len(found.readers) != 1:
        what = "no linear layer reads the attention output"
        raise refuse(what if not found.readers else f"{' and '.join(found.readers)} all read the attention output")
    (consumer,) = found.readers
    heads, width = found.given["query"].shape[1], found.given["value"].shape[3]
    head_of_column = torch.arange(heads * width) // width
    if not found.columns or not torch.equal(found.columns[""].head, head_of_column):
        raise refuse(f"the heads do not reach {consumer} side by side, each on its own,")
    for layer, (head_of, reaches_any) in found.columns.items():
        if not layer or (head_of[reaches_any] == -1).all():
            continue  # the output itself; or a gate that all heads share, which stays as it is
        if (head_of[reaches_any] == -1).any():
            raise refuse(f"features of {layer} gate several heads")
        _add_features(owned, layer, False, head_of)
    return consumer


class _HeadRehearsal(Rehearsal[Mapping[nn.Module, FoundAttention]]):
    """With fewer heads, the attention function gets exactly those that stay, and their outputs are joined as before."""

    def compare(self, batch: Mapping[str, Tensor]) -> None:
        # Consumer -> the modules whose heads it reads next, and its input in the dense run.
        self._read_by: dict[str, list[tuple[PrunableModule, Tensor]]] = {}
        self._called: set[nn.Module] = set()
        with use_attention(self.probe.model, self._attention):
            self.probe.run(batch, before=self._before)

    def _attention(self, call: AttentionCall) -> Tensor:
        """Compute attention, and compare its inputs with those of the kept heads in the dense run."""
        output = attend(call)
        found = self.dense.get(call.module)
        if found is None or found.name not in self.pending or call.module in self._called:
            return output  # of a module that calls it once per image, the dense run recorded the first call
        self._called.add(call.module)
        module, kept = self.pending[found.name], self.kept[found.name]
        for role, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
            heads = kept.units if role == "query" else kept.kept_groups
            if not same(tensor, found.given[role][:, list(heads)]):
                self.mismatches.append((module, f"it makes another {role} of its features"))
        if found.sinks is not None and not (call.sinks is not None and same(call.sinks, found.sinks[list(kept.units)])):
            self.mismatches.append((module, "its sinks are not those of its heads"))
        self._read_by.setdefault(module.consumer, []).append((module, found.readers[module.consumer]))
        return output

    def _before(self, call: Call, x: Tensor) -> None:
        """Compare what a consumer reads with the columns of the kept heads in the dense run."""
        for module, dense_input in self._read_by.pop(call[0], []):
            columns = module.columns(self.kept[module.name].units)
            if not same(x, dense_input[..., columns]):
                self.mismatches.append((module, "it joins the heads in another way"))
            self.pending.pop(module.name, None)
