"""Attention and its entropy against explicit attention maps, and the attention function replaced and restored."""

import dataclasses
import math

import pytest
import torch
from support.models import bert, text_batch
from torch import Tensor, nn

from hies_export.model import attention, kernels
from hies_export.model.attention import AttentionCall, AttentionFunction, use_attention
from hies_export.model.kernels import attend, attend_with_entropy

BATCH, HEADS, GROUPS, LENGTH, WIDTH = 3, 4, 2, 7, 8


def make_call(
    mask: Tensor | None = None, *, is_causal: bool = False, key_length: int = LENGTH, **shape: int
) -> AttentionCall:
    heads = shape.get("key_value_heads", HEADS)
    return AttentionCall(
        module=nn.Identity(),
        query=torch.randn(BATCH, HEADS, LENGTH, WIDTH) * 2,
        key=torch.randn(BATCH, heads, key_length, WIDTH),
        value=torch.randn(BATCH, heads, key_length, shape.get("value_dim", WIDTH)),
        mask=mask,
        scaling=0.4,
        is_causal=is_causal,
    )


def naive(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute output and entropy one sample, head and row at a time, from the attention map."""
    batch, heads, rows, _ = call.query.shape
    groups = heads // call.key.shape[1]
    output = torch.zeros(batch, heads, rows, call.value.shape[-1], dtype=torch.float64)
    entropy = torch.zeros(batch, heads, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            key, value = call.key[b, h // groups].double(), call.value[b, h // groups].double()
            allowed = torch.ones(rows, key.shape[0], dtype=torch.bool)
            bias = torch.zeros(rows, key.shape[0], dtype=torch.float64)
            if call.is_causal:
                allowed = allowed.tril()
            if call.mask is not None:
                mask = call.mask.expand(batch, heads, rows, key.shape[0])[b, h]
                allowed = mask if mask.dtype == torch.bool else mask > -9999
                bias = bias if mask.dtype == torch.bool else mask.double().where(allowed, torch.tensor(0.0).double())
            padding = ~allowed.any(0) if rows == key.shape[0] else torch.zeros(rows, dtype=torch.bool)
            found = []
            for row in range(rows):
                seen = allowed[row].nonzero().flatten()
                scores = call.query[b, h, row].double() @ key[seen].T * call.scaling
                if call.softcap is not None:
                    scores = call.softcap * torch.tanh(scores / call.softcap)
                scores = scores + bias[row, seen]
                if call.sinks is not None:
                    scores = torch.cat([scores, call.sinks[h].double().view(1)])
                p = scores.softmax(0)
                output[b, h, row] = p[: len(seen)] @ value[seen]
                if len(seen) > 1 and not padding[row]:
                    found.append(-(p * p.log()).sum() / math.log(len(p)))
            entropy[b, h] = torch.stack(found).mean() if found else 0
    return output, entropy


def padding_mask() -> Tensor:
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[1, :, :, 4:] = False
    mask[2, :, :, 2:] = False
    return mask


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


CALLS = {
    "plain": lambda: make_call(),
    "padding, the same for every row": lambda: make_call(padding_mask()[:, :, :1]),
    "hidden by -10000": lambda: make_call((~padding_mask()[:, :, :1]).float() * -1e4),
    "position bias": lambda: make_call(additive(padding_mask()) + torch.randn(1, HEADS, LENGTH, LENGTH)),
    "causal": lambda: make_call(is_causal=True),
    "causal padding": lambda: make_call(padding_mask() & torch.ones(LENGTH, LENGTH).tril().bool()),
    "left padding": lambda: make_call(padding_mask().flip(-1) & torch.ones(LENGTH, LENGTH).tril().bool()),
    "groups": lambda: make_call(padding_mask(), key_value_heads=GROUPS),
    "cross": lambda: make_call(torch.rand(BATCH, 1, LENGTH, 5) > 0.3, key_length=5),
    "wide values": lambda: make_call(padding_mask(), value_dim=WIDTH + 2),
    "softcap": lambda: dataclasses.replace(make_call(padding_mask().flip(-1), key_value_heads=GROUPS), softcap=1.5),
    "sinks": lambda: dataclasses.replace(make_call(additive(padding_mask())), sinks=torch.randn(HEADS)),
    "softcap and sinks": lambda: dataclasses.replace(make_call(is_causal=True), softcap=2.0, sinks=torch.randn(HEADS)),
}


@pytest.mark.parametrize("name", CALLS)
def test_output_and_entropy_equal_the_attention_map(name: str) -> None:
    call = CALLS[name]()
    expected_output, expected_entropy = naive(call)
    output, entropy, _ = attend_with_entropy(call)
    rows_that_see_a_key = torch.ones(BATCH, 1, LENGTH, dtype=torch.bool)
    if call.mask is not None and call.mask.dtype == torch.bool:
        rows_that_see_a_key = call.mask.any(-1)
    keep = rows_that_see_a_key[..., None]
    torch.testing.assert_close((output * keep).double(), expected_output * keep, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["position bias", "causal", "softcap and sinks"])
def test_slices_of_rows_are_stitched_together(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call = CALLS[name]()
    whole = attend_with_entropy(call)[1]
    monkeypatch.setattr(kernels, "_MAP_ELEMENTS", call.query.shape[0] * call.query.shape[1] * LENGTH * 2)
    torch.testing.assert_close(attend_with_entropy(call)[1], whole)


def test_uniform_attention_has_entropy_one_and_a_single_key_has_no_row() -> None:
    call = make_call()
    flat = AttentionCall(call.module, call.query * 0, call.key, call.value, None, 1.0, False)
    _, entropy, rows = attend_with_entropy(flat)
    torch.testing.assert_close(entropy, torch.ones(BATCH, HEADS))
    assert rows.tolist() == [LENGTH] * BATCH
    only_self = torch.eye(LENGTH, dtype=torch.bool).expand(BATCH, 1, LENGTH, LENGTH)
    _, entropy, rows = attend_with_entropy(make_call(only_self))
    assert rows.tolist() == [0] * BATCH
    assert entropy.eq(0).all()


def test_the_model_computes_the_same_inside_and_is_left_as_it_was_also_after_an_error() -> None:
    model, batch = bert(), text_batch()
    before = model.config._attn_implementation
    expected = model(**batch).logits
    with use_attention(model, attend):
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ZeroDivisionError, match="division"), use_attention(model, lambda call: 1 / 0):
        model(**batch)
    assert model.config._attn_implementation == before
    assert not attention._FUNCTIONS
    torch.testing.assert_close(model(**batch).logits, expected)


def test_the_innermost_function_is_called() -> None:
    model = bert(num_hidden_layers=1)
    batch, seen = text_batch(labels=False), list[str]()

    def record(name: str) -> AttentionFunction:
        return lambda call: seen.append(name) or attend(call)

    with use_attention(model, record("outer")):
        model(**batch)
        with use_attention(model, record("inner")):
            model(**batch)
        model(**batch)
    assert seen == ["outer", "inner", "outer"]


@pytest.mark.parametrize("masked", ["by a bias", "by booleans", "causally", "not at all"])
def test_a_position_bias_is_added_to_the_scores(masked: str) -> None:
    model = bert()
    layer = model.bert.encoder.layer[0].attention.self
    query, key, value = (torch.randn(2, 6, 5, 8) for _ in range(3))
    bias, visible = torch.randn(1, 6, 5, 5), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    if masked.startswith("by"):
        visible[1, ..., 3:] = False
    elif masked == "causally":
        visible = visible.tril()
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    mask = {"by a bias": additive, "by booleans": visible}.get(masked)
    with use_attention(model, lambda call: attend_with_entropy(call)[0]):
        found, _ = attention._attention_forward(
            layer, query, key, value, mask, scaling=1.0, is_causal=masked == "causally", position_bias=bias
        )
    expected = (query @ key.mT + bias + additive).softmax(-1) @ value
    torch.testing.assert_close(found, expected.transpose(1, 2))
