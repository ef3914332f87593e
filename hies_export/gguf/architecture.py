"""Read the sizes of a decoder off its modules, and choose the architecture of llama.cpp that computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError

# Names of a layer's parameters in transformers and in GGUF, without ".weight" and ".bias". q_norm and k_norm are
# read by `qwen3` alone.
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
_QUERY_KEY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_LINEAR = tuple(name for name in LAYER_NAMES if name.endswith("_proj"))
# Rotary frequencies that do not depend on the length of the text, so that a tensor of factors can hold them.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
# Decoders whose code was read: in these, only sliding windows depend on the length of the text, which the comparison of
# logits on a short text would miss.
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3")
# The smallest relative change of a rotary frequency that is not rounding.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one layer: query heads, key/value heads, and neurons of its feed-forward block."""

    heads: int
    key_value_heads: int
    neurons: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A decoder as llama.cpp sees it.

    Attributes:
        architecture: Its name in llama.cpp: `llama`, `qwen2`, `qwen3`, or `deci` for layers of different sizes.
        sizes: Sizes of every layer.
        head_dim: Width of a head.
        epsilon: Added to the variance in the norms.
        theta: Base of the rotary frequencies.
        rope_factors: Divisors of the frequencies of `theta`, (head_dim / 2,); None for all ones.
        rope_scale: Factor of rotated queries and keys.
        positions: Longest text in tokens.
    """

    architecture: str
    sizes: tuple[LayerSizes, ...]
    head_dim: int
    epsilon: float
    theta: float
    rope_factors: Tensor | None
    rope_scale: float
    positions: int

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same sizes."""
        return len(set(self.sizes)) == 1

    @property
    def interleaved(self) -> bool:
        """Whether llama.cpp rotates neighbours (0, 1), (2, 3), ... of a head, where transformers rotates its halves."""
        return self.architecture in ("llama", "deci")


def find_layout(model: PreTrainedModel, *, uneven: bool = False) -> Layout:
    """Return the layout of a decoder in llama.cpp; raises UnsupportedModelError with the layer and the property.

    Layers of different sizes need `deci`, which reads arrays of sizes and optional biases; `uneven` says that a later
    cut will leave such layers. Layers of one size use `llama`, and Qwen's their own architectures if these read all
    that the model has.

    Source: https://github.com/ggml-org/llama.cpp, src/models/deci.cpp, llama.cpp, qwen2.cpp and qwen3.cpp
    """
    layers = _layers(model)
    problem = next(_problems(model, layers), None)
    if problem is not None:
        raise refused(model, problem)
    sizes = tuple(_sizes(layer) for layer in layers)
    frequencies, scale = _rope(model)
    head_dim = layers[0].self_attn.head_dim
    theta = float(_text_config(model).rope_parameters["rope_theta"])
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factors = plain / frequencies.double()
    scaled = bool((factors - 1).abs().max() > _ROUNDING)
    return Layout(
        architecture=_architecture(model, layers, sizes, scaled=scaled or scale != 1, uneven=uneven),
        sizes=sizes,
        head_dim=head_dim,
        epsilon=float(layers[0].input_layernorm.variance_epsilon),
        theta=theta,
        rope_factors=factors.float() if scaled else None,
        rope_scale=scale,
        positions=_text_config(model).max_position_embeddings,
    )


def refused(model: PreTrainedModel, problem: str, remedy: str = "export it to ONNX") -> UnsupportedModelError:
    """Return the error that names what llama.cpp cannot carry."""
    return UnsupportedModelError(
        f"a GGUF file needs a model that an architecture of llama.cpp computes, but {type(model).__name__} is not one: "
        f"{problem}; {remedy}"
    )


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def _layers(model: PreTrainedModel) -> list[Any]:
    """Return the layers of a decoder with LLaMA's outer modules; raises UnsupportedModelError for other models."""
    base: Any = model.base_model
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise refused(model, "it is no decoder with a language-modelling head")
    outer = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = next((name for name in outer if not hasattr(base, name)), None)
    if missing is not None:
        raise refused(model, f"the decoder has no {missing}, as LLaMA's has")
    return list(base.layers)


def _problems(model: PreTrainedModel, layers: list[Any]) -> Iterator[str]:
    """Yield what llama.cpp cannot carry, layer by layer."""
    yield from _outer_problems(model)
    known = {f"{name}.{kind}" for name in LAYER_NAMES for kind in ("weight", "bias")}
    first = layers[0]
    for number, layer in enumerate(layers):
        here = f"layer {number}"
        own = {name for name, _ in layer.named_parameters()}
        strange = sorted(own - known)
        if strange:
            yield f"{here} has {strange[0]}{_meaning(strange[0])}, which llama.cpp's llama and deci do not read"
        needed = {f"{name}.weight" for name in LAYER_NAMES if name not in _QUERY_KEY_NORMS}
        missing = sorted(needed - own)
        if missing:
            yield f"{here} lacks {missing[0]}, which llama.cpp reads"
        yield from (f"{here} {problem}" for problem in _layer_problems(model, layer, first))
    if _text_config(model).model_type not in _MODEL_TYPES:
        yield (
            f"the type {_text_config(model).model_type!r} was not compared with llama.cpp on texts of any length, as "
            f"{', '.join(_MODEL_TYPES)} were"
        )


def _outer_problems(model: PreTrainedModel) -> Iterator[str]:
    base: Any = model.base_model
    head: Any = model.get_output_embeddings()
    inside = {id(parameter) for parameter in base.layers.parameters()}
    inside |= {id(getattr(part, "weight", None)) for part in (base.embed_tokens, base.norm, head)}
    strange = next((name for name, parameter in model.named_parameters() if id(parameter) not in inside), None)
    if strange is not None:
        yield f"{strange} is a weight that llama.cpp's llama and deci do not read"
    config = _text_config(model)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            yield f"logits are capped ({name}: {getattr(config, name)}), which llama.cpp's llama and deci do not do"
    rope = getattr(base.rotary_emb, "rope_type", None)
    if rope not in _FIXED_ROPES:
        yield (
            f"rotary frequencies are of type {rope!r}, but llama.cpp's llama and deci hold only those that do not "
            f"depend on the length of the text ({', '.join(_FIXED_ROPES)})"
        )
    elif "rope_theta" not in config.rope_parameters:
        yield "layers have different rotary frequencies, but llama.cpp's llama and deci hold those of one layer"


def _layer_problems(model: PreTrainedModel, layer: Any, first: Any) -> Iterator[str]:
    attention, mlp = layer.self_attn, layer.mlp
    for name in _LINEAR:
        if type(layer.get_submodule(name)) is not nn.Linear:
            yield f"has a {type(layer.get_submodule(name)).__name__} as {name}, but llama.cpp reads plain matrices"
    if min(vars(_sizes(layer)).values()) < 1:
        yield "has no heads or no neurons left, which llama.cpp's deci computes differently"
    if attention.head_dim != first.self_attn.head_dim:
        yield f"has heads {attention.head_dim} wide, but layer 0 {first.self_attn.head_dim}; GGUF holds one width"
    rotated = 2 * _rope(model)[0].numel()
    if rotated != attention.head_dim:
        yield f"rotates {rotated} of {attention.head_dim} columns of a head, but llama.cpp's llama and deci rotate all"
    if abs(attention.scaling * attention.head_dim**0.5 - 1) > _ROUNDING:
        yield f"scales scores by {attention.scaling:g} and not by 1/sqrt({attention.head_dim}) as llama.cpp does"
    window = _window(model, attention)
    if window is not None and window < _text_config(model).max_position_embeddings:
        yield f"attends within a sliding window of {window} tokens, but llama.cpp's llama and deci attend to all"
    if not _is_silu(mlp.act_fn):
        yield f"has the activation {type(mlp.act_fn).__name__}, but llama.cpp's llama and deci compute SiLU"
    epsilons = [getattr(norm, "variance_epsilon", None) for norm in (layer.input_layernorm, first.input_layernorm)]
    if epsilons[0] is None or epsilons[0] != epsilons[1]:
        yield "has a norm whose epsilon is not layer 0's, but GGUF holds one for all"


def _meaning(name: str) -> str:
    """Return what a parameter is, in brackets, if its name says so."""
    words = {"norm": "a further norm", "expert": "a mixture of experts", "sinks": "attention sinks"}
    return next((f" ({meaning})" for word, meaning in words.items() if word in name), "")


def _window(model: PreTrainedModel, attention: Any) -> int | None:
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(_text_config(model), "sliding_window", None)


def _is_silu(activation: Any) -> bool:
    x = torch.linspace(-6, 6, 25)
    with torch.no_grad():
        return bool(torch.allclose(activation(x), nn.functional.silu(x), atol=1e-6))


def _sizes(layer: Any) -> LayerSizes:
    attention = layer.self_attn
    rows = [getattr(attention, name).out_features for name in ("q_proj", "k_proj")]
    return LayerSizes(rows[0] // attention.head_dim, rows[1] // attention.head_dim, layer.mlp.gate_proj.out_features)


def _rope(model: PreTrainedModel) -> tuple[Tensor, float]:
    """Return the rotary frequencies, (rotated columns / 2,), and the factor of rotated values."""
    rotary: Any = model.base_model.rotary_emb
    return rotary.inv_freq.detach().float().cpu(), float(getattr(rotary, "attention_scaling", 1.0))


def _architecture(
    model: PreTrainedModel, layers: list[Any], sizes: tuple[LayerSizes, ...], *, scaled: bool, uneven: bool
) -> str:
    """Return the name of the architecture that reads what the layers have."""
    own = {name for layer in layers for name, _ in layer.named_parameters()}
    biases = {name for name in own if name.endswith(".bias")}
    uneven = uneven or len(set(sizes)) > 1
    if any(f"{name}.weight" in own for name in _QUERY_KEY_NORMS):
        _check_norms(model, layers, biases, scaled=scaled, uneven=uneven)
        return "qwen3"
    if uneven:
        return "deci"
    # qwen2 takes heads that fill the width, biases of queries, keys and values, and no factors of frequencies.
    fills = sizes[0].heads * layers[0].self_attn.head_dim == layers[0].self_attn.o_proj.out_features
    of_qwen2 = {f"self_attn.{name}_proj.bias" for name in "qkv"}
    return "qwen2" if fills and not scaled and biases == of_qwen2 else "llama"


def _check_norms(model: PreTrainedModel, layers: list[Any], biases: set[str], *, scaled: bool, uneven: bool) -> None:
    """Refuse what `qwen3`, which norms queries and keys by head, does not support beside these norms."""
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
    if layers[0].self_attn.q_norm.weight.numel() != layers[0].self_attn.head_dim:
        raise refused(model, f"layer 0 has {norm} across heads, but llama.cpp's qwen3 norms each head")
