"""Scoring of language and vision-language models against eager attention, one unpadded sample at a time."""

import logging
from collections.abc import Sequence

import pytest
import torch
from support.generative import padded, unpadded, with_images
from support.models import causal_lm, llava
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export.calibrate.collect import _halved, collect_statistics
from hies_export.errors import DataError, NonFiniteError, StepError, UnsupportedModelError
from hies_export.prunable.attention import find_attention
from hies_export.units import PrunableModule
from hies_export.values import Statistics


def naive_statistics(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], sites: Sequence[PrunableModule]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Eager attention, one unpadded sample at a time, a mask in front of each o projection, the entropy of each row."""
    model.set_attn_implementation("eager")
    his = {s.name: torch.zeros(s.units, dtype=torch.float64) for s in sites}
    entropy = {s.name: torch.zeros(s.units, dtype=torch.float64) for s in sites}
    maps: dict[str, Tensor] = {}
    watching = [
        model.get_submodule(s.name).register_forward_hook(lambda m, x, y, n=s.name: maps.update({n: y[1]}))
        for s in sites
    ]
    samples = 0
    for one in unpadded(batches):
        masks = {s.name: torch.ones(s.units, requires_grad=True) for s in sites}

        def multiply(site: PrunableModule, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (site.units, site.unit_width))
            return (heads * masks[site.name][:, None]).flatten(-2)  # noqa: B023

        hooks = [
            model.get_submodule(s.consumer).register_forward_pre_hook(lambda m, x, s=s: (multiply(s, x[0]),))
            for s in sites
        ]
        logits = model(**{k: v for k, v in one.items() if k != "labels"}, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0, :-1], one["labels"][0, 1:])  # the mean over its own labels
        for hook in hooks:
            hook.remove()
        gradients = torch.autograd.grad(loss, list(masks.values()), allow_unused=True)
        for site, gradient in zip(sites, gradients, strict=True):
            his[site.name] += 0 if gradient is None else gradient.abs().double()
            rows = maps[site.name][0].double()  # (heads, queries, keys)
            causal = "vision" not in site.name
            keys = torch.arange(1, rows.shape[1] + 1) if causal else torch.full((rows.shape[1],), rows.shape[2])
            h = torch.special.entr(rows).sum(-1)[:, keys > 1] / keys[keys > 1].double().log()
            entropy[site.name] += h.mean(-1)
        samples += 1
    for hook in watching:
        hook.remove()
    model.set_attn_implementation("sdpa")
    return {k: v / samples for k, v in his.items()}, {k: v / samples for k, v in entropy.items()}


def assert_equal_scores(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-6}
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, **tolerance)


BATCHES = {
    "right": lambda: [padded([9, 4, 6], "right"), padded([3, 7], "right")],
    "left": lambda: [padded([9, 4, 6], "left"), padded([3, 7], "left")],
    "blocks": lambda: [padded([8, 8, 8], "right"), padded([8], "right")],
    "answers right": lambda: [padded([9, 6, 5], "right", answers=[2, 5, 1])],
    "answers left": lambda: [padded([9, 6, 5], "left", answers=[2, 5, 1])],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_decoder_equals_the_naive_reference(kind: str) -> None:
    model, batches = causal_lm(), BATCHES[kind]()
    sites = find_attention(model, batches[0])
    assert [(s.units, s.groups) for s in sites] == [(4, 2)] * 2
    his, entropy = naive_statistics(model, batches, sites)
    found = collect_statistics(model, batches, sites)
    assert (found.calibration.labels, found.calibration.samples) == ("data", sum(len(b["labels"]) for b in batches))
    assert found.calibration.batch_size == 3
    assert_equal_scores(found["his"], his)
    assert_equal_scores(found["entropy"], entropy)
    assert torch.cat(list(his.values())).std() > 0


@pytest.mark.parametrize("side", ["right", "left"])
def test_both_towers_of_llava_equal_the_naive_reference(side: str) -> None:
    model = llava()
    batches = [with_images(padded([9, 6, 5], side, answers=[2, 4, 1])), with_images(padded([4], side, answers=[2]))]
    sites = find_attention(model, batches[0])
    assert sum("vision_tower" in s.name for s in sites) == 3
    assert len(sites) == 5
    his, entropy = naive_statistics(model, batches, sites)
    found = collect_statistics(model, batches, sites)
    assert_equal_scores(found["his"], his)
    assert_equal_scores(found["entropy"], entropy)
    # LLaVA takes the last but one layer of its image tower.
    assert [bool(v.any()) for n, v in found["his"].items() if "vision" in n] == [True, True, False]


def test_a_long_answer_weighs_no_more_than_a_short_one() -> None:
    model = causal_lm()
    batch = padded([9, 6], "right", answers=[8, 1])
    sites = find_attention(model, batch)
    together = collect_statistics(model, [batch], sites)
    apart = [collect_statistics(model, [{k: v[i : i + 1] for k, v in batch.items()}], sites) for i in (0, 1)]
    for site in sites:
        mean = (apart[0]["his"][site.name] + apart[1]["his"][site.name]) / 2
        torch.testing.assert_close(together["his"][site.name], mean, rtol=1e-4, atol=1e-7)


def test_a_language_models_own_predictions_stand_in_for_labels() -> None:
    model = causal_lm()
    batch = padded([9, 4, 6], "right")
    sites = find_attention(model, batch)
    predicted = model(**batch).logits.argmax(-1)
    labels = torch.full_like(predicted, -100)
    for row, length in enumerate([9, 4, 6]):
        labels[row, 1:length] = predicted[row, : length - 1]
    found = collect_statistics(model, [{k: v for k, v in batch.items() if k != "labels"}], sites)
    assert found.calibration.labels == "predictions"
    assert_equal_scores(found["his"], collect_statistics(model, [batch | {"labels": labels}], sites)["his"])


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


def test_overflow_in_half_precision_is_named() -> None:
    model, batch = causal_lm().to(torch.float16), padded([5, 4], "right")
    sites = find_attention(model, batch)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e6)
    with pytest.raises(NonFiniteError, match="batch 0 gave nan"):
        collect_statistics(model, [batch], sites)


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to", "DefaultCPUAllocator: not enough memory: you"])
def test_batches_are_halved_until_they_fit(message: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batches = causal_lm(), [padded([9, 4, 6, 5, 7], "right"), padded([3, 7, 5], "left")]
    sites = find_attention(model, batches[0])
    expected = collect_statistics(model, batches, sites)
    sizes = []

    def small(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(len(output))
        if len(output) > 2:
            raise torch.OutOfMemoryError(message) if "CUDA" in message else RuntimeError(message)

    handle = model.model.layers[1].self_attn.o_proj.register_forward_hook(small)
    with caplog.at_level(logging.WARNING, logger="hies_export"):
        found = collect_statistics(model, batches, sites)
    assert sizes == [5, 2, 2, 1, 2, 1]
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_saves_activations_and_changes_nothing(reentrant: bool) -> None:
    model, batches = causal_lm(num_hidden_layers=4, attention_dropout=0.5), [padded([9, 4, 6], "right")]
    sites = find_attention(model, batches[0])

    def saved_elements() -> tuple[int, Statistics]:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = collect_statistics(model, batches, sites)
        return sum(kept.values()), found

    plain, expected = saved_elements()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    calls = []
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda m, x, y: calls.append(m.training))
    checkpointed, found = saved_elements()
    handle.remove()
    assert checkpointed < plain / 2
    assert calls == [False, False]  # once, and once more in the backward pass; never with dropout
    assert_equal_scores(found["his"], expected["his"])
    assert_equal_scores(found["entropy"], expected["entropy"])
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert not any(m.training for m in model.modules())
    assert model.config.use_cache


def test_bad_samples() -> None:
    model, good = causal_lm(), padded([5, 4, 6], "right")
    sites = find_attention(model, good)
    bad = padded([5, 4, 6], "right")
    bad["labels"][0, 1:] = bad["labels"][2] = -100  # the first token is never predicted
    with pytest.raises(DataError, match=r"of batch 1 \(from 0\) samples 0, 2 \(from 0\) of 3 have none"):
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
    with pytest.raises(UnsupportedModelError, match="vision_tower.* sees 2 rows for 1 samples"):
        collect_statistics(model, [one], sites)


def test_a_batch_whose_tensors_have_other_rows_is_not_halved() -> None:
    """Four texts with nine images between them."""
    batch = {"input_ids": torch.zeros(4, 3), "pixel_values": torch.zeros(9, 2)}
    with pytest.raises(StepError, match="batch 2 of 4 samples does not fit into memory and cannot be halved, because"):
        _halved(batch, 2, RuntimeError("out of memory"))
    assert _halved({"input_ids": torch.zeros(5, 3)}, 2, RuntimeError("out of memory")) == 2
    with pytest.raises(StepError, match="one sample must fit into memory, but one of calibration batch 2 does not"):
        _halved({"input_ids": torch.zeros(1, 3)}, 2, RuntimeError("out of memory"))
