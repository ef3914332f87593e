"""Calibration of language and vision-language models: half precision, little memory, and what is refused."""

from typing import Any

import pytest
import torch
from support.generative import padded, with_images
from support.models import causal_lm, llava
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hies_export import DataError, UnsupportedModelError, find_attention, find_modules
from hies_export.calibrate.statistics import collect_statistics


def assert_equal_scores(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-6}
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_nearly_the_same_in_double(dtype: torch.dtype) -> None:
    model, batch = causal_lm(), padded([9, 4, 6], "right")
    sites = find_attention(model, batch)
    expected = collect_statistics(model, [batch], sites)
    found = collect_statistics(model.to(dtype), [batch], sites)
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    for name, his in expected["his"].items():
        assert found["his"][name].dtype == found["entropy"][name].dtype == torch.float64
        assert (found["his"][name] - his).abs().max() < tolerance * his.max()
        torch.testing.assert_close(found["entropy"][name], expected["entropy"][name], rtol=0, atol=tolerance)


def test_gradient_checkpointing_changes_nothing_and_stays() -> None:
    model, batches = causal_lm(num_hidden_layers=4, attention_dropout=0.5), [padded([9, 4, 6], "right")]
    sites = find_attention(model, batches[0])
    expected = collect_statistics(model, batches, sites)
    model.activation_checkpointing_enable()
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    found = collect_statistics(model, batches, sites)
    assert_equal_scores(found["his"], expected["his"])
    assert_equal_scores(found["entropy"], expected["entropy"])
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert model.config.use_cache


def test_bad_samples() -> None:
    model, good = causal_lm(), padded([5, 4, 6], "right")
    sites = find_attention(model, good)
    bad = padded([5, 4, 6], "right")
    bad["labels"][0, 1:] = bad["labels"][2] = -100  # the first token is never predicted
    with pytest.raises(DataError, match=r"one of batch 1 \(from 0\) has none"):
        collect_statistics(model, [good, bad], sites)


def test_several_tiles_per_sample_are_refused() -> None:
    model = llava()
    batch = with_images(padded([6, 5], "right", answers=[2, 2]))
    sites = find_attention(model, batch)
    # Two images in one sample and none in the other: the same tokens, but rows are no samples.
    ids = batch["input_ids"]
    one = {
        "input_ids": torch.cat([ids[0, :17], ids[0, 1:17], ids[0, 17:]])[None],
        "pixel_values": batch["pixel_values"],
    }
    one |= {"attention_mask": torch.ones_like(one["input_ids"]), "labels": one["input_ids"].clone()}
    with pytest.raises(
        UnsupportedModelError, match=r"vision_tower.* has the shape \(2, 17, 32\) for 1 samples; give every"
    ):
        collect_statistics(model, [one], sites)


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
    model = causal_lm(max_position_embeddings=2048)

    def largest(length: int) -> int:
        ids = torch.randint(4, 32, (1, length))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        modules = find_modules(model, {k: v[:, :8] for k, v in batch.items()}, kinds=("attention", "mlp"))
        with Largest() as seen:
            collect_statistics(model, [batch], modules)
        return seen.elements

    short, long = largest(512), largest(2048)
    assert short > 512 * 8
    assert long <= 4 * short
    assert long < 2048 * 2048
