"""Compare what llama.cpp computes from the tensors of a GGUF file with the model, in torch and in llama.cpp itself.

The comparison in torch refuses, before a file is written, a decoder that has LLaMA's modules but computes something
else, such as multipliers or norms with an offset.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...equal import OTHER_PROGRAM, Difference
from ...errors import ParityError
from ...model.copies import convert, copy_with
from ...model.internals import ask_for_output_alone, configs_of, exact_products
from ...model.modes import output_alone
from ...model.tokens import longest_sequence, synthetic_batch
from ..runtimes.llamacpp import LlamaCppRuntime
from .architecture import LayerSizes, Layout, refused
from .tensors import IN_BLOCKS, OUTER, named_tensors, stored_bytes, stored_type


def check_same_function(model: PreTrainedModel, layout: Layout, ids: Tensor) -> None:
    """Refuse, by an UnsupportedModelError, a model whose logits on tokens (1, sequence) are not those of its layout."""
    reference = convert(model, dtype=torch.float32, device="cpu").eval()
    with output_alone(reference), exact_products(), torch.no_grad():
        wanted = reference(input_ids=ids).logits[0]
        found = _logits(model, layout, ids[0])
    difference = Difference.of(found, wanted)
    if not difference.within(OTHER_PROGRAM["float32"]):
        raise refused(
            model,
            f"logits differ by {difference.max_abs:.2g} from what llama.cpp's {layout.architecture} computes from the "
            "same weights, so the model does something more, such as a multiplier or another norm",
        )


def _logits(model: PreTrainedModel, layout: Layout, ids: Tensor) -> Tensor:
    """Return logits (tokens, vocabulary) of tokens (tokens,), computed as llama.cpp does from a file of the model."""
    frequencies = layout.theta ** (-torch.arange(0, layout.head_dim, 2, dtype=torch.float64) / layout.head_dim)
    if layout.rope_factors is not None:
        frequencies = frequencies / layout.rope_factors.double()
    angles = torch.arange(len(ids), dtype=torch.float64)[:, None] * frequencies
    # Complex factors that rotate pairs of columns, (tokens, head_dim / 2).
    rotation = torch.polar(torch.full_like(angles, layout.rope_scale), angles).to(torch.complex64)
    x, head = torch.empty(0), torch.empty(0)
    # Tensors come in the order of the computation; names of a layer's are `blk.NUMBER.NAME`. One layer is in memory.
    for prefix, named in itertools.groupby(named_tensors(model, layout), key=lambda item: item[0].split(".")[:2]):
        if prefix[0] == "blk":
            weights = {name.split(".", 2)[2]: tensor for name, tensor in named}
            x = _layer(x, weights, layout, layout.sizes[int(prefix[1])], rotation)
            continue
        _, weight = next(named)
        if prefix[0] == "token_embd":
            head, x = weight, weight[ids]  # a file without `output` shares the embedding
        elif prefix[0] == "output_norm":
            x = _norm(x, weight, layout)
        elif prefix[0] == "output":
            head = weight
    return x @ head.T


def _layer(x: Tensor, weights: dict[str, Tensor], layout: Layout, sizes: LayerSizes, rotation: Tensor) -> Tensor:
    """Return the residual stream after one layer, from that before it, `x`: both (tokens, width)."""

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    normed = _norm(x, weights["attn_norm.weight"], layout)
    counts = {"q": sizes.heads, "k": sizes.key_value_heads, "v": sizes.key_value_heads}
    heads = {}  # each (heads, tokens, head_dim)
    for name, count in counts.items():
        value = linear(f"attn_{name}", normed).reshape(len(x), count, layout.head_dim).transpose(0, 1)
        if f"attn_{name}_norm.weight" in weights:
            value = _norm(value, weights[f"attn_{name}_norm.weight"], layout)
        heads[name] = value if name == "v" else _rotate(value, rotation, interleaved=layout.interleaved)
    mixed = F.scaled_dot_product_attention(heads["q"], heads["k"], heads["v"], is_causal=True, enable_gqa=True)
    x = x + linear("attn_output", mixed.transpose(0, 1).flatten(1))
    normed = _norm(x, weights["ffn_norm.weight"], layout)
    return x + linear("ffn_down", F.silu(linear("ffn_gate", normed)) * linear("ffn_up", normed))


def _norm(x: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, layout.epsilon)


def _rotate(x: Tensor, rotation: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate queries or keys, (heads, tokens, head_dim), in pairs of neighbours, or without `interleaved` of halves."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rotation)
    return (rotated if interleaved else rotated.transpose(-1, -2)).flatten(-2)


# Tokens of the text on which a file in llama.cpp is compared with torch.
COMPARED_TOKENS = 64
# Texts on which tokenizers differ: spaces, contractions, digits, line breaks, marks and other scripts, code.
TEXTS = (
    "Once upon a time, there was a little girl.",
    "I'm sure they'LL say it's 3 o'clock;  we've waited 12345 days!",
    "a\n\n b\t c   d \r\n",
    "café naïve Ünïcödé — “quotes” … 日本語 🙂 кот",
    "def f(x):\n    return x**2 + 0.5e-3  # ok",
)


@dataclass(frozen=True)
class Parity:
    """How a GGUF file in llama.cpp compares with torch."""

    max_abs: float  # largest difference of a next-token probability, over all tokens of a text
    share: float  # largest difference as a share of the probability of the likeliest token; in blocks, the mean
    tokens: int  # tokens of the text
    texts: int  # number of texts whose tokens were compared
    release: str  # llama.cpp's repository and release


def check_parity(file: Path, model: PreTrainedModel, tokenizer: Any, *, dtype: str) -> Parity:
    """Compare a file in llama.cpp with torch: probabilities after each token of a text, and how texts are tokenized.

    torch computes with the weights as they are stored. With weights in blocks, llama.cpp rounds activations too, which
    changes single tokens much, so that the mean over all tokens counts. Raises ParityError where outputs differ beyond
    the tolerance.
    """
    length = min(COMPARED_TOKENS, longest_sequence(model.config) or COMPARED_TOKENS)
    batch = {"input_ids": synthetic_batch(model, batch=1, sequence=length)["input_ids"].cpu()}
    tolerance = OTHER_PROGRAM[dtype]
    with torch.no_grad():
        wanted = as_stored(model, dtype)(**batch).logits[0].softmax(-1)
    with closing(LlamaCppRuntime(file, threads=torch.get_num_threads(), exact=True)) as runtime:
        differences = (runtime.prediction(batch)[0].exp() - wanted).abs().amax(-1)
        shares = differences / wanted.amax(-1)
        share = float(shares.mean() if dtype in IN_BLOCKS else shares.max())
        if not share <= tolerance:
            raise ParityError(
                f"next-token probabilities in llama.cpp must be torch's within {tolerance:g} of the likeliest token's, "
                f"but differ by {share:.2g} of it; report the model"
            )
        for text, split in zip(TEXTS, runtime.tokenize(TEXTS), strict=True):
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            if split != expected:
                raise ParityError(
                    f"llama.cpp's tokenizer must split texts as the model's does, but splits {text!r} into "
                    f"{split[:20]} and not {expected[:20]}; report the tokenizer"
                )
        release = runtime.release
    return Parity(float(differences.max()), share, length, len(TEXTS), release)


def as_stored(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """Return a copy of a model in float32, on the CPU, with every matrix rounded as a file of `dtype` stores it."""
    import gguf

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    outer = (model.get_input_embeddings(), model.get_output_embeddings())  # `stored_type` knows them by GGUF's names
    names |= {id(module.weight): OUTER[0] for module in outer if isinstance(module, torch.nn.Module)}

    def rounded(tensor: Tensor) -> Tensor:
        plain = tensor.detach().to("cpu", torch.float32) if tensor.is_floating_point() else tensor.cpu()
        name = names.get(id(tensor))
        if name is None:  # a buffer
            return plain
        # The order of rows, which the file changes, does not matter: blocks lie within a row.
        kind = stored_type(name, plain, dtype)
        stored = stored_bytes(plain, kind, name)
        restored = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).astype(np.float32)
        return torch.nn.Parameter(torch.from_numpy(restored.reshape(plain.shape)), requires_grad=False)

    copied = copy_with(model, rounded).eval()
    ask_for_output_alone(configs_of(copied))
    return copied
