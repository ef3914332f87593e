"""Read the sizes of a decoder off its modules, and choose the architecture of llama.cpp that computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError

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
# logits on a short text (`parity.py`) would miss.
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
    """A decoder as llama.cpp sees it."""

    architecture: str  # its name in llama.cpp: `llama`, `qwen2`, `qwen3`, or `deci` for layers of different sizes
    sizes: tuple[LayerSizes, ...]  # sizes of every layer
    head_dim: int  # width of a head
    epsilon: float  # added to the variance in the norms
    theta: float  # base of the rotary frequencies
    rope_factors: Tensor | None  # divisors of the frequencies of `theta`, (head_dim / 2,); None for all ones
    rope_scale: float  # factor of rotated queries and keys
    positions: int  # longest text in tokens

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
    problem = next(_problems(model), None)
    if problem is not None:
        raise refused(model, problem)
    layers = _layers(model)
    sizes = tuple(_sizes(layer) for layer in layers)
    frequencies, scale = _rope(model)
    head_dim = layers[0].self_attn.head_dim
    theta = float(model.config.get_text_config().rope_parameters["rope_theta"])
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
        positions=model.config.get_text_config().max_position_embeddings,
    )


def refused(model: PreTrainedModel, problem: str, remedy: str = "export it to ONNX") -> UnsupportedModelError:
    """Return the error that names what llama.cpp cannot carry."""
    return UnsupportedModelError(
        f"a GGUF file needs a model that an architecture of llama.cpp computes, but {type(model).__name__} is not one: "
        f"{problem}; {remedy}"
    )


def _problems(model: PreTrainedModel) -> Iterator[str]:
    """Yield why llama.cpp cannot run a model: reasons on which the comparison of logits would fail, or not see them.

    Take the first alone: checks count on those before them.
    """
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
    elif "rope_theta" not in config.rope_parameters:
        yield "layers have different rotary frequencies, but llama.cpp's llama and deci hold those of one layer"
    known = {f"{name}.{kind}" for name in LAYER_NAMES for kind in ("weight", "bias")}
    rotated = 2 * _rope(model)[0].numel()
    for number, layer in enumerate(_layers(model)):
        here, attention = f"layer {number}", layer.self_attn
        for name, _ in layer.named_parameters():
            if name not in known:
                yield f"{here} has {name}, which llama.cpp's llama and deci do not read"
        if min(vars(_sizes(layer)).values()) < 1:
            yield f"{here} has no heads or no neurons left, which llama.cpp's deci computes differently"
        for name in _LINEAR:
            if type(layer.get_submodule(name)) is not nn.Linear:
                kind = type(layer.get_submodule(name)).__name__
                yield f"{here} has a {kind} as {name}, but llama.cpp reads plain matrices"
        if rotated != attention.head_dim:
            yield f"{here} rotates {rotated} of {attention.head_dim} columns of a head, but llama.cpp rotates all"
        window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        if window is not None and window < config.max_position_embeddings:
            yield f"{here} attends within a sliding window of {window} tokens, but llama.cpp attends to all"


def _layers(model: PreTrainedModel) -> list[Any]:
    base: Any = model.base_model
    return list(base.layers)


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
