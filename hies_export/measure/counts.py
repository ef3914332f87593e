"""Count what a model is made of and what it computes: parameters, bytes, FLOPs, cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model.copies import share_weights
from ..model.tokens import forward_inputs
from ..values import PrunableModule


def count_parameters(model: torch.nn.Module) -> int:
    """Number of parameters, tied ones once.

    Args:
        model: Any module.

    Returns:
        Elements, not bytes.

    Examples:
        >>> count_parameters(torch.nn.Linear(3, 4))
        16
    """
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    """Floating-point operations of one forward pass (a multiply-add is two), attention products included.

    Counted by `torch.utils.flop_counter` on the modules themselves, whatever their config says, on tensors
    without data and with eager attention: on the CPU the counter does not see inside the fused kernel.
    A model whose forward looks at the values of its inputs is run for real instead.

    Args:
        model: Any model; it is not run and not changed.
        batch: Inputs by name; labels are ignored, values do not matter.

    Returns:
        Operations for the whole batch.

    Source: https://docs.pytorch.org/docs/stable/torch.utils.flop_counter.html

    Examples:
        >>> count_flops(slim, batches[0]) < count_flops(model, batches[0])
        True
    """
    return _flops(model, batch)[""]


def flops_per_layer(
    model: PreTrainedModel, batch: Mapping[str, Any], sites: Sequence[PrunableModule]
) -> list[dict[str, Any]]:
    """Where the FLOPs of one forward pass are; the parts add up to `count_flops`.

    Args:
        model: Dense or slim; it is not run and not changed.
        batch: As for `count_flops`.
        sites: The attention modules, of the dense model or of this one: only their names are read.

    Returns:
        A row per layer, `layer` its dotted name: `projections` (the linear layers in front of the attention and
        behind it), `products` (queries by keys, weights by values) and `other` (the rest of the layer, such as the
        MLP). The last row, `layer` empty, is what lies outside of the layers with attention: embeddings and heads.
    """
    found = _flops(model, batch)
    rows: dict[str, dict[str, Any]] = {}
    for site in sites:
        # The innermost numbered module around the attention, such as model.layers.3; else the attention itself.
        match = re.match(r"(.*\.\d+)(?:\.|$)", site.name)
        layer = match[1] if match else site.name
        row = rows.setdefault(layer, {"layer": layer, "projections": 0, "products": 0, "other": 0})
        children = [f"{site.name}.{name}" for name, _ in model.get_submodule(site.name).named_children()]
        row["products"] += found.get(site.name, 0) - sum(found.get(name, 0) for name in children)
        row["projections"] += sum(found.get(name, 0) for name in {*site.producers, site.consumer})
    for layer, row in rows.items():
        row["other"] = found.get(layer, 0) - row["projections"] - row["products"]
    outside = found[""] - sum(found.get(layer, 0) for layer in rows)
    return [*rows.values(), {"layer": "", "projections": 0, "products": 0, "other": outside}]


def cache_bytes_per_token(model: PreTrainedModel) -> int | None:
    """Bytes that every further token adds to the key/value cache of one sequence, in the model's dtype.

    Asked of the cache that the model itself fills, on tensors without data.

    Args:
        model: Any model; it is not run and not changed.

    Returns:
        None for a model that does not generate from a cache.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        return None
    twin = share_weights(model, device="meta").eval()
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    with torch.no_grad():
        cache = twin(input_ids=ids, use_cache=True).past_key_values
    tensors = [t for layer in getattr(cache, "layers", ()) for t in (layer.keys, layer.values) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors) // ids.shape[1]


def _flops(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, int]:
    """FLOPs by dotted module name, the whole model's under the empty one."""
    inputs = forward_inputs(model, batch)
    try:
        # transformers looks into a padding mask, which meta tensors forbid; it changes no product's shape.
        meta = {name: tensor.to("meta") for name, tensor in inputs.items() if name != "attention_mask"}
        return _count(share_weights(model, device="meta"), meta)
    except (RuntimeError, NotImplementedError):
        return _count(share_weights(model), {name: tensor.to(model.device) for name, tensor in inputs.items()})


def _count(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Count on a model that may be changed."""
    from torch.utils.flop_counter import FlopCounterMode

    model.eval().set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    root = type(model).__name__
    by_module = {
        name.removeprefix(f"{root}."): sum(operators.values())
        for name, operators in counter.get_flop_counts().items()
        if name.startswith(f"{root}.")
    }
    return {**by_module, "": int(counter.get_total_flops())}
