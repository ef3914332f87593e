"""Compute attention and the entropy of its rows, without storing an attention map."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from .attention import AttentionCall

# Additive masks hide keys by the lowest number there is, or by this one; no weight is left at either.
_HIDDEN = -1e4

# Where torch's fused kernels cannot serve, attention maps are made for so many elements at a time.
_MAP_ELEMENTS = 2**22


class VisibleKeys:
    """Which keys each query row sees, worked out once per mask: the layers of a model share their masks.

    What was worked out for a mask goes when the mask goes, so one object may serve any number of forward passes.
    """

    def __init__(self) -> None:
        self._by_mask: MutableMapping[Tensor, dict[Any, tuple[Tensor | None, Tensor, bool]]] = WeakIdKeyDictionary()
        self._without_mask: dict[Any, tuple[Tensor | None, Tensor, bool]] = {}

    def __call__(self, call: AttentionCall) -> tuple[Tensor | None, Tensor, bool]:
        """Returns for a call.

        Returns:
            bias: Additive mask in the query's dtype, or None when every key is visible (or causal without padding).
            log_keys: log(number of keys the row sees), 0 for rows to leave out (rows that see at most one key,
                and rows of padding tokens), broadcastable to (batch, heads, query), float32.
            has_bias: Whether visible keys carry a bias of their own besides the query-key product.
        """
        query_length, key_length = call.query.shape[2], call.key.shape[2]
        seen = self._without_mask if call.mask is None else self._by_mask.setdefault(call.mask, {})
        key = (call.is_causal, query_length, key_length, call.query.dtype, call.query.device)
        if key not in seen:
            seen[key] = self._analyse(call, query_length, key_length)
        return seen[key]

    @staticmethod
    def _analyse(call: AttentionCall, query_length: int, key_length: int) -> tuple[Tensor | None, Tensor, bool]:
        device, dtype, mask = call.query.device, call.query.dtype, call.mask
        if mask is None:
            if call.is_causal:
                counts = torch.arange(1, query_length + 1, device=device).view(1, 1, -1)
            else:
                counts = torch.full((1, 1, 1), key_length, device=device)
            return None, counts.float().log(), False
        has_bias = False
        if mask.dtype == torch.bool:
            visible = mask
            bias = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -math.inf)
        else:
            visible = mask > _HIDDEN
            has_bias = bool((mask.masked_fill(~visible, 0) != 0).any())
            bias = mask.to(dtype).masked_fill(~visible, -math.inf)
        counts = visible.expand(*visible.shape[:-1], key_length).sum(-1)
        if query_length == key_length:
            # In self-attention a padding token is one that nobody sees; its own row is no real query.
            real = visible.any(-2)
            if real.shape[-1] == key_length:
                counts = counts * real  # a mask that is the same for every row has one count, of all rows
        return bias, counts.clamp(min=1).float().log(), has_bias


def attend(call: AttentionCall, visible: VisibleKeys) -> Tensor:
    """The layer's own attention, by torch's fused kernels where they know it.

    Returns:
        (batch, heads, query, value head_dim)
    """
    bias, _, _ = visible(call)
    key, value = _repeat_groups(call)
    if not call.is_plain:
        return _explicit_output(call, key, value, bias)
    return torch.nn.functional.scaled_dot_product_attention(
        call.query,
        key,
        value,
        attn_mask=bias,
        dropout_p=call.dropout,
        is_causal=call.is_causal,
        scale=call.scaling,
    )


def attend_with_entropy(call: AttentionCall, visible: VisibleKeys) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's own attention, and the length-normalised entropy of its rows, without a whole attention map.

    With s the scaled products (plus the mask) and p = softmax(s), H(p) = logsumexp(s) - E_p[s], and
    E_p[s] = scale * q . (p K): the fused kernels give the first, and p K when K is passed as the values.

    Returns:
        output: (batch, heads, query, value head_dim), differentiable.
        entropy: (batch, heads) float32, mean over the real query rows of H(row) / log(keys the row sees), in [0, 1].
        rows: (batch,) float32, how many rows that mean is over; 0 where a sample has none (its entropy is 0).
    """
    bias, log_keys, has_bias = visible(call)
    key, value = _repeat_groups(call)
    if call.is_plain:
        output, logsumexp = _output_and_logsumexp(call, key, value, bias)
    else:
        output, logsumexp = _explicit_output(call, key, value, bias), None
    with torch.no_grad():
        if logsumexp is None or has_bias:
            row_entropy = _explicit_entropy(call, key, bias)
        else:
            mean_key, _ = _output_and_logsumexp(call, key, key, bias)
            expected = torch.linalg.vecdot(call.query.float(), mean_key.float()).mul_(call.scaling)
            row_entropy = logsumexp.float() - expected  # (batch, heads, query)
        log_keys = log_keys.expand(row_entropy.shape[0], -1, row_entropy.shape[2])
        counted = log_keys > 0
        # A sink is one more place that a row may look at.
        most = log_keys if call.sinks is None else log_keys.exp().add(1).log()
        normalised = torch.where(counted, row_entropy / most.where(counted, 1.0), 0.0)
        rows = counted.sum(-1).float()  # (batch, 1 or heads)
        entropy = normalised.sum(-1) / rows.clamp(min=1)
    return output, entropy, rows.amax(-1)


def _repeat_groups(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Keys and values, one for every query head."""
    heads = call.query.shape[1]

    def repeat(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)

    return repeat(call.key), repeat(call.value)


def _output_and_logsumexp(
    call: AttentionCall, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    query = call.query
    same_width = query.shape[-1] == value.shape[-1]
    if query.device.type == "cpu" and same_width and call.dropout == 0:
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, call.is_causal, attn_mask=bias, scale=call.scaling
        )
        return output, logsumexp
    if query.device.type == "cuda" and call.dropout == 0:
        aligned = bias if bias is None else _aligned(bias.expand(*query.shape[:3], key.shape[2]))
        output, logsumexp, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, aligned, True, 0.0, call.is_causal, scale=call.scaling
        )
        # This kernel rounds the rows of its logsumexp up to a multiple of 32.
        return output, logsumexp[..., : query.shape[2]]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, bias, call.dropout, call.is_causal, scale=call.scaling
    )
    return output, None


def _aligned(bias: Tensor) -> Tensor:
    # The memory-efficient kernel reads the mask in rows of 16 bytes or more: rows are laid out padded, then narrowed.
    keys = bias.shape[-1]
    padded = torch.nn.functional.pad(bias, (0, -keys % 16))
    return padded[..., :keys]


def _row_slices(call: AttentionCall) -> list[slice]:
    """Slices of query rows whose attention maps hold no more elements than `_MAP_ELEMENTS`, where they can."""
    batch, heads, rows = call.query.shape[:3]
    step = max(1, _MAP_ELEMENTS // (batch * heads * call.key.shape[2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _log_softmax(call: AttentionCall, key: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
    """Logarithms of the attention rows, float32, (batch, heads, rows, keys); a sink is one key more, the last."""
    scores = (call.query[:, :, rows] @ key.transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is not None:
        # A row that sees no key is nobody's, but must not become NaN: the gradient would spread it.
        lowest = torch.finfo(torch.float32).min / 2
        scores = scores + (bias if bias.shape[-2] == 1 else bias[..., rows, :]).float().clamp(min=lowest)
    if call.is_causal:
        row = torch.arange(rows.start, rows.stop, device=scores.device)
        scores = scores.masked_fill(torch.arange(key.shape[2], device=scores.device) > row[:, None], -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.log_softmax(-1)


def _explicit_output(call: AttentionCall, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attention by explicit softmax, a slice of rows at a time; a backward pass computes the maps anew."""

    def some(rows: slice) -> Tensor:
        p = _log_softmax(call, key, bias, rows).exp()[..., : key.shape[2]]
        return torch.nn.functional.dropout(p, call.dropout).to(value.dtype) @ value

    slices = _row_slices(call)
    if len(slices) == 1:
        return some(slices[0])
    return torch.cat([checkpoint(some, rows, use_reentrant=False) for rows in slices], dim=2)


def _explicit_entropy(call: AttentionCall, key: Tensor, bias: Tensor | None) -> Tensor:
    """Row entropies by explicit softmax, a slice of rows at a time, for what the kernels cannot serve.

    Returns:
        (batch, heads, query) float32
    """
    out = []
    for rows in _row_slices(call):
        log_p = _log_softmax(call, key, bias, rows)
        out.append(-(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0)).sum(-1))
    return torch.cat(out, dim=-1)
