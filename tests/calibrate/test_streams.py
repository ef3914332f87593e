"""Moments and effects, whole and in groups, against loops over samples and tokens with autograd and numpy."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from support.cuts import by_module
from support.generative import padded, with_images
from support.models import bert, causal_lm, image_batch, llama, llava, opt, shake, text_batch, vit, zero_padding
from support.neurons import half, neurons
from support.references import read_by_sample
from support.tolerance import assert_near, near
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
)
from hies_export.calibrate import moments
from hies_export.calibrate.moments import Moments, MomentStream, bytes_of
from hies_export.calibrate.passes import LIMIT_BYTES, Stream, usual_limit
from hies_export.calibrate.readings import EffectStream, by_sample
from hies_export.calibrate.statistics import collect_statistics
from hies_export.kinds import KINDS, MLP

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
    """Add up the weighted tokens of one part of the samples, one by one."""
    q = (tokens.g**2).sum(1)
    weights = mix + (1 - mix) * q / q.mean() if q.any() else np.ones(len(q))
    total: dict[str, np.ndarray] = dict.fromkeys((*SUMS, "tokens", "counted"), np.zeros(()))
    for x, y, w, sample in zip(tokens.x, tokens.y, weights, tokens.sample, strict=True):
        if (sample % 5 == 4) == held_out:
            outer = {"xx": np.outer(x, x), "yx": np.outer(y, x), "yy": y @ y, "tokens": 1.0}
            for name, value in ({"x": x, "y": y} | outer).items():
                total[name] = total[name] + w * value
            total["counted"] = total["counted"] + 1
    return total


def assert_is(found: Moments, expected: dict[str, np.ndarray], *, rtol: float = 1e-4) -> None:
    for name in SUMS:
        value = getattr(found, name).numpy()
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=rtol * np.abs(expected[name]).max())
    assert found.tokens == pytest.approx(float(expected["tokens"]), rel=1e-4)
    assert found.counted == expected["counted"]


def text_batches() -> Batches:
    return [zero_padding(text_batch(*shape, labels=False)) for shape in ((4, 12), (3, 9), (5, 14))]


def image_batches() -> Batches:
    return [image_batch(7, labels=False), image_batch(5, labels=False)]


def generative_batches(side: str) -> Batches:
    batches = [padded([9, 4, 6, 8], side), padded([3, 7, 5], side)]
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]


CASES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], Batches]]] = {
    "bert with padding": (bert, text_batches),
    "regression": (lambda: bert(num_labels=1), text_batches),
    "vit": (vit, image_batches),
    "gated, no bias": (lambda: llama(intermediate_size=48), text_batches),
    "language model": (lambda: causal_lm(intermediate_size=48), lambda: generative_batches("left")),
    "llava": (
        lambda: llava(intermediate_size=48),
        lambda: [with_images(b | {"labels": b["input_ids"]}) for b in generative_batches("right")],
    ),
    "flattened tokens": (opt, text_batches),
}


@pytest.mark.parametrize(("case", "wide"), [*((case, False) for case in CASES), ("gated, no bias", True)])
def test_moments_are_those_of_a_loop_over_weighted_tokens(
    case: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(moments, "WIDE", 16)
        monkeypatch.setattr(moments, "BLOCK", 20)
    make, make_batches = CASES[case]
    model = make()
    batches = [{k: v for k, v in batch.items() if k != "labels"} for batch in make_batches()]
    modules = both_kinds(model, batches[0])
    stream = MomentStream(model, modules, batches, weighted=True)
    seen = []
    for module, found in stream:
        seen.append(module)
        tokens = naive(model, module, batches)
        assert found.counted == len(tokens.x)
        np.testing.assert_allclose(
            found.spread(centred=True).moments, np.cov(tokens.x.T, bias=True), rtol=1e-3, atol=1e-4
        )
        second = tokens.x.T @ tokens.x / len(tokens.x)
        np.testing.assert_allclose(found.spread(centred=False).moments, second, rtol=1e-3, atol=1e-4)
        columns = torch.randperm(tokens.x.shape[1])[:11]
        for mix in (1.0, 0.3):
            whole, part = found.mixed(mix), found.mixed(mix, columns)
            for held_out, of_whole, of_part in (
                (False, whole.fitting, part.fitting),
                (True, whole.held_out, part.held_out),
            ):
                expected = naive_moments(tokens, mix, held_out=held_out)
                assert_is(of_whole, expected)
                kept = {"x": expected["x"][columns], "xx": expected["xx"][np.ix_(columns, columns)]}
                assert_is(of_part, expected | kept | {"yx": expected["yx"][:, columns]})
            assert whole.fitting.tokens + whole.held_out.tokens == pytest.approx(found.counted)
    assert seen == modules
    assert stream.passes == 1


WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
MAPS = {"image_size": 16, "patch_size": 4, "hidden_sizes": [8], "depths": [2], "num_stages": 1}


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: transformers.SwinForImageClassification(transformers.SwinConfig(**WINDOWS)), KINDS),
        (lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**MAPS)), (MLP,)),
    ],
    ids=["windows", "rows and columns"],
)
def test_all_parts_of_an_image_belong_to_its_sample(
    make: Callable[[], PreTrainedModel], kinds: tuple[str, ...]
) -> None:
    model, batches = shake(make()), [image_batch(3, labels=False), image_batch(2, labels=False)]
    modules = find_modules(model, batches[0], kinds=kinds)
    effects = by_module(EffectStream(model, batches, modules))
    for module, found in MomentStream(model, modules, batches):
        tokens, split = naive(model, module, batches), found.mixed()
        for held_out, part in ((False, split.fitting), (True, split.held_out)):
            assert_is(part, naive_moments(tokens, 1.0, held_out=held_out))
        assert effects[module.name].sample.tolist() == tokens.sample.tolist()
        np.testing.assert_allclose(effects[module.name].inputs.numpy(), tokens.x, rtol=1e-3, atol=1e-4)


def test_what_follows_from_the_inputs_equals_what_is_added_up() -> None:
    model, batches = bert(), text_batches()
    modules = neurons(model)
    selection = half(modules)
    # Targets of some inputs must be added up.
    added = by_module(MomentStream(model, modules, batches, selection=selection))
    for module, found in MomentStream(model, modules, batches):
        derived = found.mixed(columns=module.columns(selection[module.name].units))
        for one, other in (
            (derived.fitting, added[module.name].mixed().fitting),
            (derived.held_out, added[module.name].mixed().held_out),
        ):
            assert (one.tokens, one.counted) == (other.tokens, other.counted)
            for name in SUMS:
                torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-5)


def test_moments_need_no_logits() -> None:
    """The head of a language model, which may cost as much as many layers, computes one token a row."""
    model, batch = causal_lm(), padded([9, 12], "right")
    seen: list[tuple[int, ...]] = []
    with model.lm_head.register_forward_hook(lambda layer, args, output: seen.append(tuple(output.shape))):
        for _ in MomentStream(model, both_kinds(model, batch), [batch] * 3):
            pass
        assert {shape[1] for shape in seen} == {1}
        seen.clear()
        for _ in EffectStream(model, [batch], both_kinds(model, batch)):
            pass
    assert batch["input_ids"].shape[1] in {shape[1] for shape in seen}


@pytest.mark.parametrize(("selected", "weighted"), [(False, True), (True, False)])
def test_groups_of_modules_give_the_same_moments_in_more_passes(selected: bool, weighted: bool) -> None:
    model, batches = bert(), text_batches()
    modules = both_kinds(model, batches[0])
    how = {"weighted": weighted, "selection": half(modules) if selected else None}
    whole = MomentStream(model, modules, batches, **how)
    assert whole.groups == (tuple(modules),)
    kept = list(whole)
    assert [a[1] is b[1] for a, b in zip(kept, whole, strict=True)] == [True] * 6
    assert whole.passes == 1
    sizes = [bytes_of(model, module, **how) for module in modules]
    for limit, count in ((1, 6), (sum(sizes[:2]), 3), (sum(sizes) - 1, 2), (sum(sizes), 1)):
        stream = MomentStream(model, modules, batches, limit_bytes=limit, **how)
        assert len(stream.groups) == count
        assert all(len(group) == 1 or sum(bytes_of(model, m, **how) for m in group) <= limit for group in stream.groups)
        for _ in range(2):
            for (module, one), (other_module, other) in zip(stream, kept, strict=True):
                assert module is other_module
                mix = 0.4 if weighted else 1.0
                for a, b in zip(vars(one.mixed(mix)).values(), vars(other.mixed(mix)).values(), strict=True):
                    assert (a.tokens, a.counted) == (near(b.tokens), b.counted)
                    assert_near({n: getattr(a, n) for n in SUMS}, {n: getattr(b, n) for n in SUMS})
        assert stream.passes == (1 if count == 1 else 2 * count)
    some = MomentStream(model, modules, batches, limit_bytes=1, **how)
    assert [module for module, _ in some.of([modules[1].name, modules[4].name])] == [modules[1], modules[4]]
    assert some.passes == 2


def test_the_bytes_are_those_of_the_sums() -> None:
    model, batches = bert(), text_batches()
    modules = both_kinds(model, batches[0])
    for how in ({}, {"weighted": True}, {"selection": half(modules)}):
        for module, found in MomentStream(model, modules, batches, **how):
            parts = [*found.uniform, *(found.weighted or ())]
            matrices = [m for part in parts for m in vars(part).values() if isinstance(m, Tensor) and m.dim() == 2]
            matrices = [m for m in matrices if m.dtype == torch.float64]  # not the layer's own weight
            assert bytes_of(model, module, **how) == sum(m.nbytes for m in matrices)


def test_a_limit_below_the_largest_module_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = bert(), text_batches()
    with caplog.at_level(logging.WARNING):
        stream = MomentStream(model, neurons(model), batches, limit_bytes=1000)
        assert len(list(stream)) == 3
        EffectStream(model, batches, neurons(model), limit_bytes=1000)
    assert [record.message.split(" take ")[0] for record in caplog.records] == [
        "the moments of bert.encoder.layer.0",
        "the effects of bert.encoder.layer.0",
    ]
    assert "more than the limit of 9.3e-07 GiB: going on with one module at a time" in caplog.text


def test_on_a_gpu_half_of_what_is_free_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 1))]))
    free = {1: 100 << 30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 141 << 30))
    assert usual_limit(on_gpu) == 50 << 30
    free[1] = LIMIT_BYTES
    assert usual_limit(on_gpu) == LIMIT_BYTES
    assert usual_limit(bert()) == LIMIT_BYTES


def test_a_consumer_that_the_prediction_does_not_read_gets_equal_weights() -> None:
    model = llava()  # features are those of the last but one layer of the tower
    batches = [with_images(padded([5, 7, 6, 4, 5], "right"))]
    unread = next(m for m in find_attention(model, batches[0]) if "vision_tower.encoder.layers.2" in m.name)
    ((_, found),) = MomentStream(model, [unread], batches, weighted=True)
    assert_near(found.mixed(0.3).fitting.xx, found.mixed().fitting.xx)


def test_a_batch_that_does_not_reach_a_module_adds_nothing() -> None:
    model = llava()
    shown, texts = with_images(padded([5, 7, 6, 4, 5], "right")), padded([5, 7], "right")
    tower = next(module for module in find_attention(model, shown) if "vision_tower" in module.name)
    alone, beside = ([*MomentStream(model, [tower], batches)] for batches in ([shown], [shown, texts]))
    assert_near(beside[0][1].mixed().fitting.xx, alone[0][1].mixed().fitting.xx)


@pytest.mark.parametrize("case", ["bert with padding", "llava"])
def test_groups_of_modules_give_the_same_effects_in_more_passes(case: str) -> None:
    make, make_batches = CASES[case]
    model = make()
    batches = [{k: v for k, v in batch.items() if k != "labels"} for batch in make_batches()]
    modules = both_kinds(model, batches[0])
    everything = EffectStream(model, batches, modules)
    whole = by_module(everything)
    sizes = [sum(t.nbytes for t in (e.inputs, e.gradients, e.sample)) for e in whole.values()]
    tokens = naive(model, modules[-1], batches)
    last = whole[modules[-1].name]
    for one, other in ((last.inputs, tokens.x), (last.gradients, tokens.g)):
        assert one.dtype == torch.float32
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-3, atol=1e-4 * np.abs(other).max())
    assert last.sample.tolist() == tokens.sample.tolist()
    for limit, groups in ((1, len(modules)), (sum(sizes) - 1, 2), (sum(sizes), 1)):
        stream = EffectStream(model, batches, modules, limit_bytes=limit)
        assert (stream.samples, len(stream.groups)) == (everything.samples, groups)
        for _ in range(2):
            for (module, found), expected in zip(stream, modules, strict=True):
                assert module is expected
                for name in ("inputs", "gradients", "sample"):
                    assert_near(getattr(found, name), getattr(whole[module.name], name))
        assert stream.passes == (1 if groups == 1 else 2 * groups)
    assert EffectStream(model, batches[:1], modules, limit_bytes=1).samples == len(next(iter(batches[0].values())))


def test_a_group_is_a_stretch_of_the_model_where_its_backward_pass_ends() -> None:
    model, batch = bert(), text_batch()
    modules = [*find_attention(model, batch), *neurons(model)]
    assert EffectStream(model, [batch], modules).groups == (tuple(both_kinds(model, batch)),)
    first, last = modules[0], modules[-1]
    reached: list[bool] = []
    with model.get_submodule(first.consumer).register_forward_hook(lambda *call: reached.append(call[2].requires_grad)):
        for module, _ in EffectStream(model, [batch], modules, limit_bytes=1).of([first.name, last.name]):
            assert reached.pop() == (module is first)


STREAMS: dict[str, Callable[..., Stream[Any]]] = {
    "moments": lambda model, modules, batches: MomentStream(model, modules, batches, weighted=True),
    "effects": lambda model, modules, batches: EffectStream(model, batches, modules),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(stream: str, training: bool) -> None:
    model, batches = bert().train(training), text_batches()
    first = next(model.parameters()).requires_grad_(False)
    modules = both_kinds(model, batches[0])
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def check() -> None:
        assert model.training == training
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad == (p is not first) for p in model.parameters())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    with torch.no_grad():  # nobody has to know that a gradient is needed
        list(STREAMS[stream](model, modules, batches))
    check()
    model.classifier.weight.data[0, 0] = state["classifier.weight"][0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="batch 0 gave NaN or infinity"):
        list(STREAMS[stream](model, modules, batches))
    check()


def test_bad_requests() -> None:
    model, batches = bert(), text_batches()
    modules = neurons(model)
    ((_, found), *_) = MomentStream(model, modules, batches)
    with pytest.raises(RequestError, match="collect them with weighted=True"):
        found.mixed(0.5)
    with pytest.raises(DataError, match="at least 5 samples, one of them to hold out, got 4"):
        MomentStream(model, modules, [text_batch(4)])
    with pytest.raises(UnsupportedModelError, match=r"the shape \(7, 3, 8\) for 3 samples; give every sample one"):
        by_sample(model, modules[0].name, text_batch(3), torch.zeros(7, 3, 8))
    generator = causal_lm()
    unlabelled = {**text_batch(6), "labels": torch.full_like(text_batch(6)["input_ids"], -100)}
    with pytest.raises(DataError, match="every sample must have a label token"):
        EffectStream(generator, [unlabelled], neurons(generator))


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
            list(stream(model, modules, [batch]))
    with pytest.raises(UnsupportedModelError, match=refused):
        collect_statistics(model, [batch], modules)
    alone = [{name: tensor[[row]] for name, tensor in batch.items()} for row in range(5)]
    for _, effects in EffectStream(model, alone, modules):
        assert effects.sample.bincount().tolist() == [15] * 5
    collect_statistics(model, alone, modules)
