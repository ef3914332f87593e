"""Calibration of language models: little memory, and samples that predict nothing."""

from typing import Any

import pytest
import torch
from support.generative import padded
from support.models import causal_lm
from support.tolerance import assert_near
from torch.utils._python_dispatch import TorchDispatchMode

from hies_export import DataError, find_attention, find_modules
from hies_export.calibrate.statistics import collect_statistics


def test_gradient_checkpointing_changes_nothing_and_stays() -> None:
    model, batches = causal_lm(attention_dropout=0.5), [padded([9, 4, 6], "right")]
    sites = find_attention(model, batches[0])
    expected = collect_statistics(model, batches, sites)
    model.activation_checkpointing_enable()
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    found = collect_statistics(model, batches, sites)
    for what in ("his", "entropy"):
        assert_near(dict(found[what]), dict(expected[what]), where=what)
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert model.config.use_cache


def test_bad_samples() -> None:
    model, good = causal_lm(), padded([5, 4, 6], "right")
    sites = find_attention(model, good)
    bad = padded([5, 4, 6], "right")
    bad["labels"][0, 1:] = bad["labels"][2] = -100  # the first token is never predicted
    with pytest.raises(DataError, match=r"one of batch 1 \(from 0\) has none"):
        collect_statistics(model, [good, bad], sites)


class Largest(TorchDispatchMode):
    """Remember how many elements the largest tensor has that any operation of the block writes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_no_tensor_of_a_long_sample_has_an_element_per_pair_of_tokens() -> None:
    model = causal_lm(max_position_embeddings=1024)

    def largest(length: int) -> int:
        ids = torch.randint(4, 32, (1, length))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        modules = find_modules(model, {k: v[:, :8] for k, v in batch.items()}, kinds=("attention", "mlp"))
        with Largest() as seen:
            collect_statistics(model, [batch], modules)
        return seen.elements

    short, long = largest(256), largest(1024)
    assert short > 256 * 8
    assert long <= 4 * short
    assert long < 1024 * 1024
