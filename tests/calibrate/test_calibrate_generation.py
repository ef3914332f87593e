"""Calibration of language and vision-language models: half precision, little memory, and what is refused."""

import logging
from typing import Any

import pytest
import torch
from support.generative import padded, with_images
from support.models import causal_lm, llava
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hies_export import DataError, StepError, UnsupportedModelError, find_attention, find_modules
from hies_export.calibrate.statistics import _halved, collect_statistics


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


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to", "DefaultCPUAllocator: not enough memory: you"])
def test_batches_are_halved_until_they_fit(message: str, backward: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, batches = causal_lm(), [padded([9, 4, 6, 5, 7], "right"), padded([3, 7, 5], "left")]
    sites = find_attention(model, batches[0])
    expected = collect_statistics(model, batches, sites)
    sizes = []

    def small(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(len(output))
        if len(output) > 2 and torch.is_grad_enabled() >= backward:
            raise torch.OutOfMemoryError(message) if "CUDA" in message else RuntimeError(message)

    handle = model.model.layers[1].self_attn.o_proj.register_forward_hook(small)
    with caplog.at_level(logging.WARNING, logger="hies_export"):
        found = collect_statistics(model, batches, sites)
    parts = [2, 2, 1, 2, 1]
    # Two samples are also what the order of the blocks is looked for with.
    assert sizes == [2, *([5, 3, 5] if backward else [5]), 2, *parts, *parts]
    assert (expected.calibration.batch_size, found.calibration.batch_size) == (5, 2)
    assert (found.calibration.samples, found.calibration.fingerprint) == (8, expected.calibration.fingerprint)
    assert "a batch of 5 samples does not fit into memory: going on with 2 at once" in caplog.text
    assert_equal_scores(found["his"], expected["his"])
    assert_equal_scores(found["entropy"], expected["entropy"])
    handle.remove()

    def full(*_: object) -> None:
        raise RuntimeError(message)

    model.lm_head.register_forward_hook(full)
    with pytest.raises(StepError, match="one sample must fit into memory, but one of calibration batch 0"):
        collect_statistics(model, batches, sites)


def test_another_runtime_error_is_not_taken_for_a_lack_of_memory() -> None:
    model, batch = causal_lm(), padded([5, 4], "right")
    sites = find_attention(model, batch)
    model.lm_head.register_forward_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        collect_statistics(model, [batch], sites)


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


def test_a_batch_whose_tensors_have_other_rows_is_not_halved() -> None:
    """Four texts with nine images between them."""
    batches = [{"input_ids": torch.zeros(2, 3)}, {"input_ids": torch.zeros(4, 3), "pixel_values": torch.zeros(9, 2)}]
    with pytest.raises(StepError, match="batch 1 of 4 samples does not fit into memory and cannot be halved, because"):
        _halved(batches, 4, RuntimeError("out of memory"))


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
