"""Moments and effects against loops over samples and tokens with autograd and numpy."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
import transformers
from support.cuts import effects, moments_by_module, moments_of
from support.generative import padded, with_images
from support.models import bert, causal_lm, image_batch, llama, llava, opt, shake, text_batch, vit, zero_padding
from support.neurons import neurons
from support.references import bounds, read_by_sample
from support.tolerance import assert_near
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import (
    DataError,
    NonFiniteError,
    PrunableModule,
    RequestError,
    UnsupportedModelError,
    find_attention,
    find_modules,
    score_compensated,
)
from hies_export.calibrate import moments as moments_module
from hies_export.calibrate.moments import WIDE, Moments, MomentStore
from hies_export.calibrate.readings import by_sample
from hies_export.calibrate.statistics import collect_statistics
from hies_export.kinds import BOTH, MLP

Batches = list[dict[str, Tensor]]
SUMS = ("x", "y", "xx", "yx", "yy")


def both_kinds(model: PreTrainedModel, batch: dict[str, Tensor]) -> list[PrunableModule]:
    return [module for pair in zip(find_attention(model, batch), neurons(model), strict=True) for module in pair]


class Tokens(NamedTuple):
    """The real tokens of a consumer, one sample after the other, in numpy."""

    x: np.ndarray  # (tokens, inputs)
    y: np.ndarray  # (tokens, outputs)
    g: np.ndarray  # (tokens, inputs), gradient of the prediction with respect to x
    sample: np.ndarray  # (tokens,)


def naive(model: PreTrainedModel, module: PrunableModule, batches: Batches) -> Tokens:
    """Read a consumer sample by sample, without padding."""
    parts = [
        (x, y, g, np.full(len(x), number)) for number, (x, y, g, _) in enumerate(read_by_sample(model, module, batches))
    ]
    return Tokens(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def naive_moments(tokens: Tokens, mix: float, *, held_out: bool) -> dict[str, np.ndarray]:
    """Add up the weighted tokens of one part of the samples."""
    q = (tokens.g**2).sum(1)
    weights = mix + (1 - mix) * q / q.mean() if q.any() else np.ones(len(q))
    part = (tokens.sample % 5 == 4) == held_out
    x, y, w = tokens.x[part], tokens.y[part], weights[part]
    sums = {"x": w @ x, "y": w @ y, "xx": x.T * w @ x, "yx": y.T * w @ x, "yy": w @ (y**2).sum(1)}
    return sums | {"tokens": w.sum()}


def assert_is(found: Moments, expected: dict[str, np.ndarray], *, rtol: float = 1e-4) -> None:
    for name in SUMS:
        value = getattr(found, name).numpy()
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=rtol * np.abs(expected[name]).max())
    assert found.tokens.item() == pytest.approx(float(expected["tokens"]), rel=1e-4)


def text_batches() -> Batches:
    return [zero_padding(text_batch(*shape, labels=False)) for shape in ((4, 12), (3, 9))]


def image_batches() -> Batches:
    return [image_batch(7, labels=False), image_batch(5, labels=False)]


def generative_batches() -> Batches:
    batches = [padded([9, 4, 6, 8], "left"), padded([3, 7, 5], "left")]
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]


def answers_about_images() -> Batches:
    return [with_images(padded([9, 4, 6, 8], "right", answers=[2, 3, 1, 4])), with_images(padded([3, 7, 5], "right"))]


CASES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], Batches]]] = {
    "bert with padding": (bert, text_batches),
    "regression": (lambda: bert(num_labels=1), text_batches),
    "vit": (vit, image_batches),
    "gated, no bias": (lambda: llama(intermediate_size=48), text_batches),
    "language model": (lambda: causal_lm(intermediate_size=48), generative_batches),
    "answers about images": (lambda: llava(intermediate_size=48), answers_about_images),
    "flattened tokens": (opt, text_batches),
}


@pytest.mark.parametrize(("case", "wide"), [*((case, False) for case in CASES), ("gated, no bias", True)])
def test_moments_and_effects_are_those_of_a_loop_over_tokens(
    case: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(moments_module, "WIDE", 16)
        monkeypatch.setattr(moments_module, "BLOCK", 20)
    make, make_batches = CASES[case]
    model, batches = make(), make_batches()
    modules = both_kinds(model, batches[0])
    moments, layers = moments_by_module(model, modules, batches, weighted=True), effects(model, batches, modules)
    for module in modules:
        tokens, found, layer = naive(model, module, batches), moments[module.name], layers[module.name]
        for one, other in ((layer.inputs, tokens.x), (layer.gradients, bounds(tokens.x, tokens.g) * tokens.g)):
            assert one.dtype == torch.float32
            np.testing.assert_allclose(one.numpy(), other, rtol=1e-3, atol=1e-4 * max(np.abs(other).max(), 1e-3))
        assert layer.sample.tolist() == tokens.sample.tolist()
        assert found.counted == len(tokens.x)
        second = tokens.x.T @ tokens.x / len(tokens.x)
        spread = np.cov(tokens.x.T, bias=True) if layer.centred else second
        np.testing.assert_allclose(found.spread().moments, spread, rtol=1e-3, atol=1e-4)
        columns = torch.randperm(tokens.x.shape[1])[:11]
        for mix in (1.0, 0.3):
            whole, part = found.mixed(mix), found.mixed(mix, columns)
            for held_out, of_whole, of_part in zip((False, True), whole, part, strict=True):
                expected = naive_moments(tokens, mix, held_out=held_out)
                assert_is(of_whole, expected)
                kept = {"x": expected["x"][columns], "xx": expected["xx"][np.ix_(columns, columns)]}
                assert_is(of_part, expected | kept | {"yx": expected["yx"][:, columns]})
            assert sum(one.tokens.item() for one in whole) == pytest.approx(found.counted)


WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
MAPS = {"image_size": 16, "patch_size": 4, "hidden_sizes": [8], "depths": [2], "num_stages": 1}


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: transformers.SwinForImageClassification(transformers.SwinConfig(**WINDOWS)), BOTH),
        (lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**MAPS)), (MLP,)),
    ],
    ids=["windows", "rows and columns"],
)
def test_all_parts_of_an_image_belong_to_its_sample(
    make: Callable[[], PreTrainedModel], kinds: tuple[str, ...]
) -> None:
    model, batches = shake(make()), [image_batch(3, labels=False), image_batch(2, labels=False)]
    modules = find_modules(model, batches[0], kinds=kinds)
    moments, layers = moments_by_module(model, modules, batches), effects(model, batches, modules)
    for module in modules:
        tokens, split = naive(model, module, batches), moments[module.name].mixed()
        for held_out, part in zip((False, True), split, strict=True):
            assert_is(part, naive_moments(tokens, 1.0, held_out=held_out))
        assert layers[module.name].sample.tolist() == tokens.sample.tolist()
        np.testing.assert_allclose(layers[module.name].inputs.numpy(), tokens.x, rtol=1e-3, atol=1e-4)


def test_a_layer_that_is_not_read_weighs_all_tokens_alike_and_a_batch_that_skips_it_adds_nothing() -> None:
    model = llava()  # features are those of the last but one layer of the tower
    shown, texts = with_images(padded([5, 7, 6, 4, 5], "right")), padded([5, 7], "right")
    unread = next(m for m in find_attention(model, shown) if "vision_tower.encoder.layers.2" in m.name)
    (alone,) = moments_by_module(model, [unread], [shown], weighted=True).values()
    assert_near(alone.mixed(0.3)[0].xx, alone.mixed()[0].xx)
    (beside,) = moments_by_module(model, [unread], [shown, texts]).values()
    assert_near(beside.mixed()[0].xx, alone.mixed()[0].xx)


@pytest.mark.parametrize("keep", [True, False])
def test_a_store_gives_every_use_the_same_moments(keep: bool) -> None:
    model, batches = bert(), text_batches()
    modules = both_kinds(model, batches[0])
    expected = moments_by_module(model, modules, batches, weighted=True)
    store, walks = MomentStore(model, modules, batches, weighted=True, keep=keep), 0

    def begin(*_: object) -> None:
        nonlocal walks
        walks += 1

    wanted = [modules[1].name, modules[4].name]
    with model.bert.embeddings.register_forward_pre_hook(begin):
        for names, count in ((None, 6), (wanted, 2)):
            seen: list[str] = []

            def work(inside: Any, sums: Any, seen: list[str] = seen) -> None:
                for module in inside:
                    seen.append(module.name)
                    for one, other in zip(sums[module.name].parts(), expected[module.name].parts(), strict=True):
                        assert_near(one.x, other.x)
                        assert_near(one.xx, other.xx)

            store.each(work, names)
            assert len(seen) == len({*seen}) == count
            assert names is None or sorted(seen) == sorted(names)
    each = len(batches) + 1  # and a few tokens show the order of the blocks
    assert walks == (each if keep else 2 * each)
    assert set(store.kept) == ({module.name for module in modules} if keep else set())


def test_an_error_is_a_mean_over_tokens_and_never_below_zero() -> None:
    x, noise = torch.randn(60, 5).double() + torch.arange(5), torch.randn(60, 3).double()
    y, weight = x[:, :3] + noise, torch.randn(3, 5).double()
    moments = moments_of(x, y)
    for shift in (torch.randn(3).double(), None):
        expected = (x @ weight.T + (0 if shift is None else shift) - y).square().sum(1).mean().item()
        assert moments.error(weight, shift) == pytest.approx(expected, rel=1e-9)
    exact = moments_of(x * 1e4, x * 1e4 @ weight.T)  # rounding alone would fall below zero for some
    assert 0 <= exact.error(weight, None) < 1e-3
    exact.yy -= 1e6
    assert exact.error(weight, None) == 0
    torch.testing.assert_close(moments.fit_bias(weight), (y - x @ weight.T).mean(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_wide_inputs_are_exact(dtype: torch.dtype) -> None:
    x = torch.randn(2000, WIDE + 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact, found = x.double().T @ x.double(), Moments.zeros(x.shape[1], x.device)
    found.add(x)
    found.complete()
    scale = exact.diagonal().sqrt()
    assert ((found.xx - exact).abs() / torch.outer(scale, scale)).max() < 2e-6


def test_moments_that_take_more_than_half_of_the_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = bert(), text_batches()
    modules = neurons(model)
    found = moments_by_module(model, modules, batches).values()
    needed = sum(tensor.nbytes for one in found for part in one.parts() for tensor in part.tensors())
    for free, kept in ((1.9 * needed, False), (2 * needed, True)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=int(free)))
        assert MomentStore(model, modules, batches).keeps == kept


STREAMS: dict[str, Callable[..., Any]] = {
    "moments": lambda model, modules, batches: moments_by_module(model, modules, batches, weighted=True),
    "effects": lambda model, modules, batches: effects(model, batches, modules),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_the_model_is_left_as_it_was(stream: str) -> None:
    model, batches = bert().train(), text_batches()
    first = next(model.parameters()).requires_grad_(False)
    modules = both_kinds(model, batches[0])
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def check() -> None:
        assert model.training
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad == (p is not first) for p in model.parameters())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    with torch.no_grad():  # nobody has to know that a gradient is needed
        STREAMS[stream](model, modules, batches)
    check()
    model.classifier.weight.data[0, 0] = state["classifier.weight"][0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="gradients of batch 0 in bert.encoder.layer.2 have NaN or infinity"):
        STREAMS[stream](model, modules, batches)
    check()


def test_bad_requests() -> None:
    model, batches = bert(), text_batches()
    modules = neurons(model)
    found, *_ = moments_by_module(model, modules, batches).values()
    with pytest.raises(RequestError, match="collect them with weighted=True"):
        found.mixed(0.5)
    with pytest.raises(DataError, match="at least 5 samples, one of them to hold out, got 4"):
        MomentStore(model, modules, [text_batch(4)])
    with pytest.raises(UnsupportedModelError, match=r"the shape \(7, 3, 8\) for 3 samples; give every sample one"):
        by_sample(model, modules[0].name, text_batch(3), torch.zeros(7, 3, 8))
    two_images = {"input_ids": torch.ones(1, 9), "pixel_values": torch.ones(2, 3, 16, 16)}
    with pytest.raises(UnsupportedModelError, match=r"the shape \(2, 17, 32\) for 1 samples; give every sample one"):
        by_sample(llava(), modules[0].name, two_images, torch.zeros(2, 17, 32))
    generator = causal_lm(vocab_size=100)
    unlabelled = {**text_batch(6), "labels": torch.full_like(text_batch(6)["input_ids"], -100)}
    with pytest.raises(DataError, match="every sample must have a label token"):
        score_compensated(generator, [unlabelled], neurons(generator))
    with pytest.raises(DataError, match="must have labels or input_ids, got inputs_embeds"):
        effects(generator, [{"inputs_embeds": torch.randn(5, 4, 32)}], neurons(generator))


def test_samples_of_a_model_that_reads_tokens_first_are_not_mixed() -> None:
    """With three times as many tokens as samples, windows of the samples would have the same shape."""
    config = transformers.XLNetConfig(vocab_size=100, d_model=16, n_layer=1, n_head=2, d_inner=24)
    model = shake(transformers.XLNetForSequenceClassification(config))
    ids = torch.randint(4, 100, (5, 15))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 0, 1, 1])}
    modules = find_modules(model, batch, kinds=(MLP,))
    refused = r"of XLNet\w+ reads 15 tokens of [25] samples as \(15, [25], 24\); make batches of one"
    for stream in STREAMS.values():
        with pytest.raises(UnsupportedModelError, match=refused):
            stream(model, modules, [batch])
    with pytest.raises(UnsupportedModelError, match=refused):
        collect_statistics(model, [batch], modules)
    alone = [{name: tensor[[row]] for name, tensor in batch.items()} for row in range(5)]
    for layer in effects(model, alone, modules).values():
        assert layer.sample.bincount().tolist() == [15] * 5
    collect_statistics(model, alone, modules)
