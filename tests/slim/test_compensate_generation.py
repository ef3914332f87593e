"""Compensation and compensated scores of decoders and LLaVA, against unpadded samples one at a time and numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.cuts import effects, random_cut
from support.generative import padded, with_images
from support.models import causal_lm, llava
from support.references import RIDGE, assert_least_squares, naive_effect, read_by_sample, read_tokens
from support.tolerance import assert_near
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import Compensation, DataError, compensate, find_attention
from hies_export.score.compensated import RemovalOptions, removal_chain
from hies_export.tasks.text_generation import text_labels

Batches = list[dict[str, Tensor]]


def decoder_batches(side: str) -> Batches:
    return [padded([9, 4, 6, 8], side, answers=[2, 3, 1, 4]), padded([3, 7, 5], side), padded([8, 8], "right")]


def llava_batches(side: str) -> Batches:
    return [with_images(batch) for batch in decoder_batches(side)]


CASES = [(causal_lm, decoder_batches, "left"), (llava, llava_batches, "right")]


@pytest.mark.parametrize(("make", "make_batches", "side"), CASES, ids=["decoder", "llava"])
def test_effects_are_of_the_log_probability_of_the_text(
    make: Callable[[], PreTrainedModel], make_batches: Callable[[str], Batches], side: str
) -> None:
    model, batches = make(), make_batches(side)
    sites = find_attention(model, batches[0])
    found = effects(model, batches, sites)
    for site in sites:
        layer, samples = found[site.name], read_by_sample(model, site, batches)
        weight = model.get_submodule(site.consumer).weight.detach().double().numpy()
        assert layer.centred == ("vision" in site.name)  # LLaMA's projections have no bias
        assert torch.bincount(layer.sample).tolist() == [len(x) for x, *_ in samples]
        np.testing.assert_allclose(layer.inputs.numpy(), np.concatenate([x for x, *_ in samples]), atol=1e-5)
        wanted = np.concatenate([g @ weight for *_, g in samples])
        np.testing.assert_allclose(layer.gradients.numpy(), wanted, atol=1e-4 * max(1.0, np.abs(wanted).max()))
    last = sites[-1]
    # A text is no single prediction, so the changes of its tokens are not added up.
    options = RemovalOptions(RIDGE, per_sample=False)
    first, _ = removal_chain(found[last.name], last, 9, options=options)
    samples = [(x, y, g) for x, y, _, g in read_by_sample(model, last, batches)]
    costs = [naive_effect(model, last, samples, [1 - group], per_sample=False) for group in (0, 1)]
    cheapest = int(np.argmin(costs))
    assert first.units == tuple(range(last.group_size * cheapest, last.group_size * (cheapest + 1)))
    assert first.effect == pytest.approx(min(costs), rel=1e-3)


@pytest.mark.parametrize(("make", "side"), [(causal_lm, "right"), (llava, "left")])
def test_without_labels_the_text_is_its_own(make: Callable[[], PreTrainedModel], side: str) -> None:
    model, batch = make(), padded([9, 4, 6], side)
    batch = with_images(batch) if make is llava else batch
    # Nothing real predicts the first token.
    firsts = batch["attention_mask"].cumsum(-1) == 1
    labelled = batch | {"labels": batch["labels"].masked_fill(firsts, -100)}
    unlabelled = {k: v for k, v in batch.items() if k != "labels"}
    sites = find_attention(model, batch)
    one, other = (effects(model, [b], sites) for b in (labelled, unlabelled))
    for site in sites:
        assert_near(one[site.name].gradients, other[site.name].gradients)
    assert torch.equal(text_labels(model, unlabelled)[:, 1:], labelled["labels"][:, 1:])
    embedded = {"inputs_embeds": torch.randn(5, 4, 32)}
    with pytest.raises(DataError, match="must have labels or input_ids, got inputs_embeds"):
        effects(causal_lm(), [embedded], find_attention(causal_lm(), padded([4], "right")))


@pytest.mark.parametrize(("make", "make_batches", "side"), CASES, ids=["decoder", "llava"])
def test_least_squares_of_real_tokens_is_the_formula(
    make: Callable[[], PreTrainedModel], make_batches: Callable[[str], Batches], side: str
) -> None:
    dense = make()
    batches = [batch for _ in range(3) for batch in make_batches(side)]
    slim, plan, sites = random_cut(dense, batches[0])
    fits = {fit.name: fit for fit in compensate(dense, slim, plan, sites, batches, Compensation(ridge=0.05))}
    assert fits
    for site in sites:
        if site.name not in fits or fits[site.name].method != "least_squares":
            continue
        x, *_ = read_tokens(dense, site, batches)
        assert fits[site.name].tokens == len(x)
        assert_least_squares(dense, slim, plan, site, x)
    assert any(fit.method == "least_squares" for name, fit in fits.items() if "vision" not in name)
