"""Compute in torch what llama.cpp computes from the tensors of a GGUF file, and compare that with the model.

This refuses, before a file is written, a decoder that has LLaMA's modules but computes something else, such as
multipliers or norms with an offset.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...equal import OTHER_PROGRAM, Difference
from ...model.copies import convert
from ...model.internals import exact_products
from ...model.modes import output_alone
from .architecture import LayerSizes, Layout, refused


def check_same_function(
    model: PreTrainedModel, layout: Layout, tensors: Iterable[tuple[str, Tensor]], ids: Tensor
) -> None:
    """Refuse, by an UnsupportedModelError, a model whose logits on tokens (1, sequence) are not those of its layout."""
    reference = convert(model, dtype=torch.float32, device="cpu").eval()
    with output_alone(reference), exact_products(), torch.no_grad():
        wanted = reference(input_ids=ids).logits[0]
        found = decoder_logits(layout, tensors, ids[0])
    difference = Difference.of(found, wanted)
    if not difference.within(OTHER_PROGRAM["float32"]):
        raise refused(
            model,
            f"logits differ by {difference.max_abs:.2g} from what llama.cpp's {layout.architecture} computes from the "
            "same weights, so the model does something more, such as a multiplier or another norm",
        )


def decoder_logits(layout: Layout, tensors: Iterable[tuple[str, Tensor]], ids: Tensor) -> Tensor:
    """Return logits, (tokens, vocabulary), of tokens (tokens,), as llama.cpp does; tensors as in `named_tensors`."""
    rotation = _rotation(layout, len(ids))
    x, embedding, layer = torch.empty(0), torch.empty(0), dict[str, Tensor]()
    number = 0
    for name, tensor in tensors:
        if name == "token_embd.weight":
            embedding, x = tensor, tensor[ids]
        elif name.startswith("blk."):
            _, index, part = name.split(".", 2)
            if int(index) != number:
                x, layer, number = _layer(x, layer, layout, layout.sizes[number], rotation), {}, int(index)
            layer[part] = tensor
        elif name == "output_norm.weight":
            x = _norm(_layer(x, layer, layout, layout.sizes[number], rotation), tensor, layout)
        elif name == "output.weight":
            embedding = tensor
    return x @ embedding.T


def _layer(x: Tensor, weights: dict[str, Tensor], layout: Layout, sizes: LayerSizes, rotation: Tensor) -> Tensor:
    """Return the residual stream, (tokens, width), after one layer."""

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    normed = _norm(x, weights["attn_norm.weight"], layout)
    counts = {"q": sizes.heads, "k": sizes.key_value_heads, "v": sizes.key_value_heads}
    heads = {}  # each (heads, tokens, head_dim)
    for name, count in counts.items():
        value = linear(f"attn_{name}", normed).reshape(len(x), count, layout.head_dim).transpose(0, 1)
        if f"attn_{name}_norm.weight" in weights:
            value = _norm(value, weights[f"attn_{name}_norm.weight"], layout)
        heads[name] = value if name == "v" else _rotate(value, rotation, layout)
    group = sizes.heads // sizes.key_value_heads
    keys, values = (heads[name].repeat_interleave(group, dim=0) for name in "kv")
    scores = heads["q"] @ keys.transpose(1, 2) * layout.head_dim**-0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ values
    x = x + linear("attn_output", mixed.transpose(0, 1).reshape(len(x), -1))
    normed = _norm(x, weights["ffn_norm.weight"], layout)
    return x + linear("ffn_down", F.silu(linear("ffn_gate", normed)) * linear("ffn_up", normed))


def _norm(x: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layout.epsilon) * weight


def _rotation(layout: Layout, tokens: int) -> Tensor:
    """Return the complex factors that rotate pairs of columns, (tokens, head_dim / 2)."""
    frequencies = layout.theta ** (-torch.arange(0, layout.head_dim, 2, dtype=torch.float64) / layout.head_dim)
    if layout.rope_factors is not None:
        frequencies = frequencies / layout.rope_factors.double()
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.full_like(angles, layout.rope_scale), angles).to(torch.complex64)


def _rotate(x: Tensor, rotation: Tensor, layout: Layout) -> Tensor:
    """Rotate queries or keys, (heads, tokens, head_dim), in pairs of neighbours or of halves."""
    shape = (*x.shape[:2], layout.head_dim // 2, 2) if layout.interleaved else (*x.shape[:2], 2, layout.head_dim // 2)
    pairs = x.reshape(shape)
    pairs = pairs if layout.interleaved else pairs.transpose(2, 3)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rotation)
    turned = turned if layout.interleaved else turned.transpose(2, 3)
    return turned.reshape(x.shape)
