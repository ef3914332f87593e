"""Read the sizes of a decoder off its modules, and choose the architecture of llama.cpp that computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError

# Names of a layer's parameters in transformers and in GGUF, without ".weight" and ".bias"; `qwen3` alone reads q_norm
# and k_norm.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}

# Rotary frequencies that do not depend on the length of the text, so that a tensor of factors can hold them.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
# Decoders whose code was read. Comparing logits on a short text (`parity.py`) would miss what depends on the length of
# the text; in these it is only sliding windows.
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3")
_ROUNDING = 1e-5  # the largest relative change of a rotary frequency that is rounding


@dataclass(frozen=True)
class LayerSizes:
    """How many query heads, key/value heads and neurons one layer has."""

    heads: int
    key_value_heads: int
    neurons: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A decoder as llama.cpp sees it."""

    architecture: str  # its name in llama.cpp: `llama`, `qwen2`, `qwen3`, or `deci` for layers of different sizes
    sizes: tuple[LayerSizes, ...]  # of every layer
    head_dim: int  # width of a head
    epsilon: float  # added to the mean square in the norms
    theta: float  # base of the rotary frequencies
    rope_factors: Tensor | None  # divisors of the frequencies of `theta`, (head_dim / 2,); None for all ones
    rope_scale: float  # factor of rotated queries and keys
    positions: int  # longest text in tokens

    @property
    def interleaved(self) -> bool:
        """Whether llama.cpp rotates neighbours (0, 1), (2, 3), ... of a head, where transformers rotates its halves."""
        return self.architecture in ("llama", "deci")


def find_layout(model: PreTrainedModel, *, uneven: bool = False) -> Layout:
    """Return the layout of a decoder in llama.cpp; an UnsupportedModelError names what llama.cpp cannot compute.

    Layers of different sizes need `deci`, which reads arrays of sizes and optional biases; `uneven` says that a later
    cut may leave such layers. Layers of one size use `llama`, or Qwen's own architectures where these read all that the
    model has.

    Source: https://github.com/ggml-org/llama.cpp, src/models/deci.cpp, llama.cpp, qwen2.cpp and qwen3.cpp
    """
    problem = next(_problems(model), None)
    if problem is not None:
        raise refused(model, problem)
    base: Any = model.base_model
    layers, config = list(base.layers), model.config.get_text_config()
    sizes = tuple(_sizes(layer) for layer in layers)
    head_dim, theta = layers[0].self_attn.head_dim, float(config.rope_parameters["rope_theta"])
    unscaled = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factors = unscaled / base.rotary_emb.inv_freq.detach().cpu().double()
    rope_scale = float(getattr(base.rotary_emb, "attention_scaling", 1.0))
    has_factors = bool((factors - 1).abs().max() > _ROUNDING)
    uneven = uneven or len(set(sizes)) > 1
    return Layout(
        architecture=_architecture(model, layers, scaled=has_factors or rope_scale != 1, uneven=uneven),
        sizes=sizes,
        head_dim=head_dim,
        epsilon=float(layers[0].input_layernorm.variance_epsilon),
        theta=theta,
        rope_factors=factors.float() if has_factors else None,
        rope_scale=rope_scale,
        positions=config.max_position_embeddings,
    )


def refused(model: PreTrainedModel, problem: str, remedy: str = "export it to ONNX") -> UnsupportedModelError:
    """Return the error that says why no architecture of llama.cpp computes a model, and what to do."""
    return UnsupportedModelError(
        f"a GGUF file needs a model that an architecture of llama.cpp computes, but {type(model).__name__} is not one: "
        f"{problem}; {remedy}"
    )


def _problems(model: PreTrainedModel) -> Iterator[str]:
    """Yield reasons why llama.cpp cannot compute a model; take only the first, as each check relies on those before."""
    # They are what a comparison of logits would not show, or would stop at with another error.
    base: Any = model.base_model
    config = model.config.get_text_config()
    if not model.can_generate():
        yield "it is no decoder with a language-modelling head"
    if config.model_type not in _MODEL_TYPES:
        yield (
            f"the type {config.model_type!r} was not compared with llama.cpp on texts of any length, as "
            f"{', '.join(_MODEL_TYPES)} were"
        )
    rope = getattr(base.rotary_emb, "rope_type", None)
    if rope not in _FIXED_ROPES:
        yield (
            f"rotary frequencies are of type {rope!r}, but llama.cpp's llama and deci hold only those that do not "
            f"depend on the length of the text ({', '.join(_FIXED_ROPES)})"
        )
    known = {f"{name}.{kind}" for name in LAYER_NAMES for kind in ("weight", "bias")}
    for number, layer in enumerate(base.layers):
        here = f"layer {number}"
        for name, _ in layer.named_parameters():
            if name not in known:
                yield f"{here} has {name}, which llama.cpp's llama and deci do not read"
        window = getattr(layer.self_attn, "sliding_window", getattr(config, "sliding_window", None))
        if window is not None and window < config.max_position_embeddings:
            yield f"{here} attends within a sliding window of {window} tokens, but llama.cpp attends to all"


def _sizes(layer: Any) -> LayerSizes:
    """Return the sizes of a decoder's layer."""
    attention = layer.self_attn
    heads, key_value_heads = (x.out_features // attention.head_dim for x in (attention.q_proj, attention.k_proj))
    return LayerSizes(heads, key_value_heads, layer.mlp.gate_proj.out_features)


def _architecture(model: PreTrainedModel, layers: list[Any], *, scaled: bool, uneven: bool) -> str:
    """Return the name of the architecture that reads all parameters of the layers; refuse them if none does.

    `scaled` says whether rotary frequencies, or what is rotated, have factors, and `uneven` whether sizes may differ.
    """
    names = {name for layer in layers for name, _ in layer.named_parameters()}
    biases = {name for name in names if name.endswith(".bias")}
    attention = layers[0].self_attn
    if not names & {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}:
        if uneven:
            return "deci"
        # qwen2 takes heads that fill the width, biases of queries, keys and values, and no factors.
        fills_width = attention.o_proj.in_features == attention.o_proj.out_features
        qwen2_biases = {f"self_attn.{name}_proj.bias" for name in ("q", "k", "v")}
        return "qwen2" if fills_width and not scaled and biases == qwen2_biases else "llama"
    # Only qwen3 reads such norms, and these are what it does not read beside them.
    norm = "a norm of queries and keys (self_attn.q_norm)"
    if uneven:
        raise refused(
            model,
            f"layer 0 has {norm}, but llama.cpp's deci, which takes layers of different sizes, reads no such norm",
            "cut it uniformly (allocation: uniform, without keep_layers), or export it to ONNX",
        )
    if biases:
        raise refused(model, f"layer 0 has {norm} and {min(biases)}, but llama.cpp's qwen3 reads no biases")
    if scaled:
        raise refused(model, f"layer 0 has {norm} and scaled rotary frequencies, which llama.cpp's qwen3 does not read")
    return "qwen3"
