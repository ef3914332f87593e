"""Compute attention and the entropy of its rows, without storing an attention map."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from .attention import AttentionCall
from .internals import fused_attention_cpu, fused_attention_cuda

# Additive masks hide keys by this number or a lower one; the softmax leaves no weight at either.
_HIDDEN = -1e4

# If torch's fused kernels cannot be used, attention maps are computed in slices of this many elements.
_MAP_ELEMENTS = 2**22


class MaskFacts(NamedTuple):
    """What the mask of a call does, in the forms that the functions below need.

    Attributes:
        bias: The additive mask in the query's dtype; None if the call has no mask. Layers keep it for the backward
            pass, so it is laid out once in the way that the fused kernel needs.
        log_keys: Logarithm of the number of keys that each row sees, float32, broadcastable to (batch, heads, query); 0
            for rows that the mean entropy leaves out: those that see one key or none, and those of padding tokens.
        has_bias: Whether the mask changes the scores of visible keys.
    """

    bias: Tensor | None
    log_keys: Tensor
    has_bias: bool


class VisibleKeys:
    """Finds the `MaskFacts` of calls, and remembers them by mask, as the layers of a model share one.

    The facts of a mask are dropped with the mask, so one object serves any number of forward passes.
    """

    def __init__(self) -> None:
        self._by_mask: MutableMapping[Tensor, dict[Any, MaskFacts]] = WeakIdKeyDictionary()
        self._without_mask: dict[Any, MaskFacts] = {}

    def __call__(self, call: AttentionCall) -> MaskFacts:
        """Return the facts of a call's mask."""
        known = self._without_mask if call.mask is None else self._by_mask.setdefault(call.mask, {})
        key = (call.is_causal, call.query.shape[2], call.key.shape[2], call.query.dtype, call.query.device)
        if key not in known:
            known[key] = _facts(call)
        return known[key]


def _facts(call: AttentionCall) -> MaskFacts:
    """Return what the mask of a call does, for all calls with this mask and these numbers of queries and keys."""
    device, mask, queries, keys = call.query.device, call.mask, call.query.shape[2], call.key.shape[2]
    if mask is None:
        counts = torch.arange(1, queries + 1, device=device) if call.is_causal else torch.tensor([keys], device=device)
        return MaskFacts(None, counts.view(1, 1, -1).float().log(), False)
    if mask.dtype == torch.bool:
        visible, has_bias, added = mask, False, torch.zeros(mask.shape, device=device)
    else:
        visible, added = mask > _HIDDEN, mask
        has_bias = bool((mask.masked_fill(~visible, 0) != 0).any())
    bias = added.to(call.query.dtype).masked_fill(~visible, -math.inf)
    if device.type == "cuda":  # `fused_attention_cuda` needs rows that are aligned to 16 elements in memory
        bias = bias.expand(*bias.shape[:-1], keys)
        bias = torch.nn.functional.pad(bias, (0, -keys % 16))[..., :keys] if keys % 16 else bias.contiguous()
    counts = visible.expand(*visible.shape[:-1], keys).sum(-1)
    if queries == keys:
        # Taken for self-attention, whose queries and keys are the same tokens: one that no row sees is padding, and its
        # own row is no real query.
        is_real = visible.any(-2)
        if is_real.shape[-1] == keys:  # else the mask is one number per row, which says nothing about single keys
            counts = counts * is_real  # a mask that is the same for every row has one count, of all rows
    return MaskFacts(bias, counts.clamp(min=1).float().log(), has_bias)


def attend(call: AttentionCall, visible: VisibleKeys) -> Tensor:
    """Compute the layer's own attention, (batch, heads, query, value head_dim), by fused kernels if possible."""
    bias = visible(call).bias
    key, value = _repeat_groups(call)
    if not call.is_plain:
        return _explicit_output(call, key, value, bias)
    return torch.nn.functional.scaled_dot_product_attention(
        call.query, key, value, attn_mask=bias, dropout_p=call.dropout, is_causal=call.is_causal, scale=call.scaling
    )


def attend_with_entropy(call: AttentionCall, visible: VisibleKeys) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the layer's own attention and the length-normalised entropy of its rows, without a whole attention map.

    With s the scaled products and p = softmax(s) over the keys that a row sees, H(p) = logsumexp(s) - E_p[s], and
    E_p[s] = scale * q . (p K). The fused kernels return logsumexp(s), and also p K if K is passed as the values. Where
    more is added to s (a bias on visible keys, soft caps, sinks), the entropy is that of an explicit softmax.

    Returns:
        output: (batch, heads, query, value head_dim), differentiable.
        entropy: (batch, heads) float32, mean over rows of H(row) / log(keys the row sees, with a sink), in [0, 1].
        rows: (batch,) float32, number of rows in that mean, see `MaskFacts`; if it is 0, the entropy is 0 too.
    """
    bias, log_keys, has_bias = visible(call)
    key, value = _repeat_groups(call)
    # The fused kernels, called by hand, give a bias no gradient.
    if call.is_plain and not (bias is not None and bias.requires_grad):
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
        is_counted = log_keys > 0
        largest = log_keys if call.sinks is None else log_keys.exp().add(1).log()  # a sink is one more key
        normalised = torch.where(is_counted, row_entropy / largest.where(is_counted, 1.0), 0.0)
        rows = is_counted.sum(-1).float()  # (batch, 1 or heads)
        entropy = normalised.sum(-1) / rows.clamp(min=1)
    return output, entropy, rows.amax(-1)  # all heads of a sample count the same rows


def _repeat_groups(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the keys and the values, each key/value head once for every query head of its group."""

    def repeated(tensor: Tensor) -> Tensor:
        repeats = call.query.shape[1] // tensor.shape[1]
        return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)

    return repeated(call.key), repeated(call.value)


def _output_and_logsumexp(
    call: AttentionCall, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return attention, and the logsumexp of each row of scores, (batch, heads, query); None if no kernel gives it."""
    query = call.query
    same_width = query.shape[-1] == value.shape[-1]
    if query.device.type == "cpu" and same_width and call.dropout == 0:
        return fused_attention_cpu(query, key, value, bias, is_causal=call.is_causal, scale=call.scaling)
    # The kernel reads 16 bytes at once, so a head's width must be a multiple of that.
    if query.device.type == "cuda" and call.dropout == 0 and query.shape[-1] * query.element_size() % 16 == 0:
        full_bias = bias if bias is None else bias.expand(*query.shape[:3], key.shape[2])
        return fused_attention_cuda(query, key, value, full_bias, is_causal=call.is_causal, scale=call.scaling)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, bias, call.dropout, call.is_causal, scale=call.scaling
    )
    return output, None


def _row_slices(call: AttentionCall) -> list[slice]:
    """Return slices of query rows, each with at most `_MAP_ELEMENTS` attention weights, or a single row."""
    batch, heads, rows = call.query.shape[:3]
    step = max(1, _MAP_ELEMENTS // (batch * heads * call.key.shape[2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _log_softmax(call: AttentionCall, key: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
    """Return the log weights of query rows, (batch, heads, rows, keys) float32; a sink is one more key, the last."""
    scores = (call.query[:, :, rows] @ key.transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is not None:
        # A row that sees no key must not become NaN, which the gradient would spread to the other rows.
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
    """Compute attention by an explicit softmax; if there are several slices of rows, the backward pass repeats it."""

    def output_of(rows: slice) -> Tensor:
        weights = _log_softmax(call, key, bias, rows).exp()[..., : key.shape[2]]  # without that of a sink
        return torch.nn.functional.dropout(weights, call.dropout).to(value.dtype) @ value

    slices = _row_slices(call)
    if len(slices) == 1:
        return output_of(slices[0])
    return torch.cat([checkpoint(output_of, rows, use_reentrant=False) for rows in slices], dim=2)


def _explicit_entropy(call: AttentionCall, key: Tensor, bias: Tensor | None) -> Tensor:
    """Compute row entropies, (batch, heads, query) float32, by an explicit softmax, a slice of rows at a time."""
    entropies = []
    for rows in _row_slices(call):
        log_p = _log_softmax(call, key, bias, rows)
        entropies.append(-(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0)).sum(-1))  # 0 log 0 is 0
    return torch.cat(entropies, dim=-1)
