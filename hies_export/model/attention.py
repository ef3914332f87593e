"""Replace the attention function of a model inside a block.

transformers lets a model's attention be computed by a registered function
(https://huggingface.co/docs/transformers/attention_interface). `use_attention` registers one. Such functions are made
of `kernels.attend` and `kernels.attend_with_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..progress import quiet
from .internals import (
    attention_name,
    attention_restored,
    configs_of,
    create_position_bias_mask,
    fused_attention_fits,
    register_attention,
)


class NotOnInterfaceError(UnsupportedModelError):
    """Some attention of a model does not go through transformers' interface as plain attention does."""


AttentionFunction = Callable[["AttentionCall"], Tensor]

# Those of the blocks of `use_attention`; the last one, of the innermost block, is called. transformers looks masks up
# by name in a global table, so names are registered for good.
_FUNCTIONS: list[AttentionFunction] = []


@dataclass(frozen=True)
class AttentionCall:
    """The inputs of one call of the attention function."""

    module: torch.nn.Module  # the attention module that called
    query: Tensor  # (batch, heads, query, head_dim)
    key: Tensor  # (batch, key/value heads, keys, head_dim)
    value: Tensor  # (batch, key/value heads, keys, value head_dim)
    mask: Tensor | None  # None, boolean (True = visible) or additive, broadcastable to (batch, heads, query, keys)
    scaling: float  # factor on the query-key products
    is_causal: bool  # whether row i sees no key after i; True only if `mask` is None
    # Bound c of the scores, which become c * tanh(score / c) before the mask is added (Gemma 2).
    softcap: float | None = None
    sinks: Tensor | None = None  # (heads,) score of one more key per head, which has no value (GPT-OSS)


@contextmanager
def use_attention(model: PreTrainedModel, function: AttentionFunction) -> Iterator[None]:
    """Route every attention layer of `model` through `function` inside the block.

    The function takes an `AttentionCall` and returns the head outputs, (batch, heads, query, value head_dim).
    """
    # A model that only knows eager attention expects a mask in every call, and an additive one; it gets another name.
    fused = fused_attention_fits(model)
    name = "hies_export" if fused else "hies_export_eager"
    register_attention(name, _attention_forward, additive_mask=not fused)
    _FUNCTIONS.append(function)
    try:
        with attention_restored(configs_of(model)):
            failure = None
            try:
                with quiet():  # transformers warns of submodels that compute attention themselves
                    model.set_attn_implementation(name)
            except ValueError as error:
                failure = error
            if failure or attention_name(model.config) != name:
                raise NotOnInterfaceError(
                    f"the attention of a model must go through transformers' attention interface, but "
                    f"{type(model).__name__} ({model.config.model_type}) computes its own; it cannot be scored or cut"
                ) from failure
            yield
    finally:
        _FUNCTIONS.pop()


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention by the function of `use_attention`; return (batch, query, heads, width), and None for a map."""
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1  # a single query sees all keys
    position_bias = kwargs.get("position_bias")
    if position_bias is not None:
        attention_mask = create_position_bias_mask(position_bias, attention_mask, is_causal, query, key)
    call = AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        is_causal=is_causal and attention_mask is None,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    return _FUNCTIONS[-1](call).transpose(1, 2).contiguous(), None


def on_interface(model: PreTrainedModel) -> bool:
    """Return whether `use_attention` reaches the attention of a model."""
    encoder: Any = model.base_model  # of a `TextEncoder`, transformers' model inside, which alone can select a function
    try:
        with use_attention(encoder, lambda call: call.value):  # nothing runs here, so nothing calls this function
            return True
    except NotOnInterfaceError:
        return False
