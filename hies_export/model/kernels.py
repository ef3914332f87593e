"""Compute attention by torch's fused kernels, and the entropy of its rows without storing an attention map."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention import AttentionCall

# Additive masks hide keys by this number or a lower one; the softmax leaves no weight at either.
_HIDDEN = -1e4

# Entropies are computed for a slice of rows at a time, with at most this many attention weights.
_MAP_ELEMENTS = 2**19


def attend(call: AttentionCall) -> Tensor:
    """Compute the layer's own attention, (batch, heads, query, value head_dim)."""
    key, value = (_repeat_groups(call, tensor) for tensor in (call.key, call.value))
    mask = call.mask if call.mask is None or call.mask.dtype == torch.bool else call.mask.to(call.query.dtype)
    if call.softcap is None and call.sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            call.query, key, value, attn_mask=mask, is_causal=call.is_causal, scale=call.scaling
        )
    # The fused kernels know neither.
    weights = _softmax(call, key, slice(0, call.query.shape[2]))[..., : key.shape[2]]  # without that of a sink
    return weights.to(value.dtype) @ value


def attend_with_entropy(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the layer's own attention and the length-normalised entropy of its rows, without a whole attention map.

    Returns:
        output: (batch, heads, query, value head_dim), differentiable.
        entropy: (batch, heads) float32, mean over rows of H(row) / log(keys the row sees, with a sink), in [0, 1].
        rows: (batch,) float32, number of rows in that mean, see `_log_keys`; if it is 0, the entropy is 0 too.
    """
    with torch.no_grad():
        key = _repeat_groups(call, call.key)
        entropies = (torch.special.entr(_softmax(call, key, rows)).sum(-1) for rows in _row_slices(call))
        row_entropy = torch.cat([*entropies], dim=-1)  # (batch, heads, query)
        log_keys = _log_keys(call).expand(row_entropy.shape[0], -1, row_entropy.shape[2])
        is_counted = log_keys > 0
        largest = log_keys if call.sinks is None else log_keys.exp().add(1).log()  # a sink is one more key
        normalised = torch.where(is_counted, row_entropy / largest.where(is_counted, 1.0), 0.0)
        rows = is_counted.sum(-1).float()  # (batch, 1 or heads)
        entropy = normalised.sum(-1) / rows.clamp(min=1)
    return attend(call), entropy, rows.amax(-1)  # all heads of a sample count the same rows


def _log_keys(call: AttentionCall) -> Tensor:
    """Return the logarithm of the number of keys that each row sees, float32, broadcastable to (batch, heads, query).

    It is 0 for rows that the mean entropy leaves out: those that see one key or none, and those of padding tokens.
    """
    mask, queries, keys = call.mask, call.query.shape[2], call.key.shape[2]
    if mask is None:
        device = call.query.device
        counts = torch.arange(1, queries + 1, device=device) if call.is_causal else torch.tensor([keys], device=device)
        return counts.view(1, 1, -1).float().log()
    visible = mask if mask.dtype == torch.bool else mask > _HIDDEN
    visible = visible.expand(*mask.shape[:-1], keys)
    counts = visible.sum(-1)
    if queries == keys:
        # Taken for self-attention, whose queries and keys are the same tokens: one that no row sees is padding, and its
        # own row is no real query. A mask that is the same for every row has one count, of all rows.
        counts = counts * visible.any(-2)
    return counts.clamp(min=1).float().log()


def _repeat_groups(call: AttentionCall, tensor: Tensor) -> Tensor:
    """Return keys or values, each key/value head once for every query head of its group."""
    repeats = call.query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _row_slices(call: AttentionCall) -> list[slice]:
    """Return slices of query rows, each with at most `_MAP_ELEMENTS` attention weights, or a single row."""
    batch, heads, rows = call.query.shape[:3]
    step = max(1, _MAP_ELEMENTS // (batch * heads * call.key.shape[2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _softmax(call: AttentionCall, key: Tensor, rows: slice) -> Tensor:
    """Return the weights of query rows, (batch, heads, rows, keys) float32; a sink is one more key, the last."""
    scores = (call.query[:, :, rows] @ key.transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.mask is not None:
        mask = call.mask if call.mask.shape[-2] == 1 else call.mask[..., rows, :]
        # A row that sees no key must not become NaN, which the gradient would spread to the other rows.
        lowest = torch.finfo(torch.float32).min / 2
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, lowest) if is_bool else scores + mask.float().clamp(min=lowest)
    if call.is_causal:
        row = torch.arange(rows.start, rows.stop, device=scores.device)
        scores = scores.masked_fill(torch.arange(key.shape[2], device=scores.device) > row[:, None], -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(-1)
