"""Find the attention modules of a model and the four projections of each.

Nothing here knows an architecture. One forward pass tells which modules call the attention function and with what
shapes; the q/k/v projections are looked up among the module's own layers by the names in `PROJECTION_NAMES`, and the
output projection is the linear layer that is seen to read the attention's output. Whatever does not fit is refused
by name: a wrong cut is worse than none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import AttentionCall, VisibleKeys, attend, use_attention
from .errors import UnsupportedModelError
from .modes import evaluating
from .values import AttentionSite

# (query, key, value), as the models of transformers name them inside the attention module.
PROJECTION_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
)

SUPPORTED = (
    "models whose attention goes through transformers' attention interface and has separate nn.Linear layers for "
    "query, key and value, and one that reads the attention output, such as BERT, RoBERTa, DistilBERT, ViT and DeiT"
)


@dataclass
class _Seen:
    heads: int
    key_value_heads: int
    query_dim: int
    value_dim: int
    output: Tensor
    ran_before: set[str]
    readers: list[str]


def find_attention(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[AttentionSite, ...]:
    """Run one batch through the model and say where its heads are.

    Args:
        model: The model; left as it was found.
        batch: Inputs of the model; two short samples are enough.

    Returns:
        One site per attention module, in the order the forward pass reaches them.

    Raises:
        UnsupportedModelError: Some attention module cannot be cut; the message says which and why.
    """
    seen = _observe(model, batch)
    if not seen:
        raise UnsupportedModelError(
            f"{_label(model)} never called the attention function, so it has no attention that can be scored; "
            f"supported are {SUPPORTED}"
        )
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(_site(model, names[id(module)], module, found) for module, found in seen.items())


def _observe(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[nn.Module, _Seen]:
    seen: dict[nn.Module, _Seen] = {}
    ran: set[str] = set()
    visible = VisibleKeys()

    def observe(call: AttentionCall) -> Tensor:
        output = attend(call, visible)
        if call.module not in seen:
            seen[call.module] = _Seen(
                heads=call.query.shape[1],
                key_value_heads=call.key.shape[1],
                query_dim=call.query.shape[3],
                value_dim=call.value.shape[3],
                output=output.transpose(1, 2).flatten(2),  # (batch, query, heads * value_dim)
                ran_before=set(ran),
                readers=[],
            )
        return output

    def watch(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        ran.add(name)
        for found in seen.values():
            if isinstance(module, nn.Linear) and inputs and torch.equal(found.output, inputs[0]):
                found.readers.append(name)

    handles = [
        module.register_forward_pre_hook(functools.partial(watch, name))
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    try:
        with evaluating(model), use_attention(model, observe), torch.no_grad():
            model(**{k: v for k, v in batch.items() if k != "labels"})
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _site(model: PreTrainedModel, name: str, module: nn.Module, found: _Seen) -> AttentionSite:
    def refuse(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{_label(model)} cannot be cut: {reason} in {name or 'the model'} ({type(module).__name__}); "
            f"supported are {SUPPORTED}"
        )

    children = dict(module.named_children())
    projections = next((names for names in PROJECTION_NAMES if all(n in children for n in names)), None)
    if projections is None:
        have = ", ".join(children) or "none"
        raise refuse(f"no separate query, key and value layers (its layers are: {have})")
    widths = (
        found.heads * found.query_dim,
        found.key_value_heads * found.query_dim,
        found.key_value_heads * found.value_dim,
    )
    for projection, width in zip(projections, widths, strict=True):
        layer = children[projection]
        if type(layer) is not nn.Linear:
            raise refuse(f"{projection} is a {type(layer).__name__}, not an nn.Linear,")
        if layer.out_features != width:
            raise refuse(f"{projection} has {layer.out_features} outputs where its heads need {width}")
    readers = sorted(set(found.readers))
    if len(readers) != 1:
        reason = (
            "no nn.Linear reads the attention output" if not readers else f"{readers} all read the attention output"
        )
        raise refuse(reason)
    output = model.get_submodule(readers[0])
    if type(output) is not nn.Linear:
        raise refuse(f"{readers[0]} is a {type(output).__name__}, not an nn.Linear,")
    prefix = f"{name}." if name else ""
    known = {prefix + p for p in projections} | {readers[0]}
    for parameter_name, parameter in module.named_parameters():
        owner = (prefix + parameter_name).rpartition(".")[0]
        # What runs after the attention function sees no head: the output projection is the first to read it.
        sees_heads = owner == name or owner in found.ran_before
        if sees_heads and owner not in known and not _fits_one_head(parameter, found):
            raise refuse(
                f"{parameter_name} of shape {tuple(parameter.shape)} belongs to no projection and may depend on the "
                "heads,"
            )
    return AttentionSite(
        name=name,
        heads=found.heads,
        key_value_heads=found.key_value_heads,
        query_dim=found.query_dim,
        value_dim=found.value_dim,
        query=prefix + projections[0],
        key=prefix + projections[1],
        value=prefix + projections[2],
        output=readers[0],
    )


def _fits_one_head(parameter: Tensor, found: _Seen) -> bool:
    # A norm over one head's width (as in Qwen3) is the same for every head and stays as it is.
    return parameter.dim() == 1 and parameter.shape[0] in {1, found.query_dim, found.value_dim}


def _label(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"
