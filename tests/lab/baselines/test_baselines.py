"""Baselines that do not remove heads, against weights zeroed by hand, singular values and training written out."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.cuts import plan_of
from support.generative import padded
from support.models import bert, causal_lm, image_batch, llama, text_batch, vit
from support.references import layer_tokens
from support.tolerance import REFITTED, assert_near
from torch import Tensor

from hies_export import Constraints, Scores, find_attention
from hies_export.errors import UnsupportedModelError
from hies_export.evaluate.predict import predict
from hies_lab.baselines.channels import channel_taylor, masked_channels, select_channels
from hies_lab.baselines.slicing import collect_bases, fine_tuned, sliced


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**{k: v for k, v in batch.items() if k != "labels"}).logits


def rows_and_columns(model: Any, site: Any) -> list[list[tuple[Tensor, Any]]]:
    """Per channel, by names: the weights (and biases) it consists of, as (parameter, index)."""
    attention, width = model.get_submodule(site.name), site.unit_width
    names = ("query", "key", "value") if hasattr(attention, "query") else ("q_proj", "k_proj", "v_proj")
    q, k, v = (getattr(attention, name) for name in names)
    o = model.get_submodule(site.consumer)
    found = []
    for group in range(site.groups):
        for channel in range(width):
            shared = group * width + channel
            own = [(group * site.group_size + i) * width + channel for i in range(site.group_size)]
            parts = [(layer.weight, shared) for layer in (k, v)] + [(q.weight, i) for i in own]
            parts += [(o.weight, (slice(None), i)) for i in own]
            if q.bias is not None:
                parts += [(layer.bias, shared) for layer in (k, v)] + [(q.bias, i) for i in own]
            found.append(parts)
    return found


@pytest.mark.parametrize("make", [bert, llama])
def test_channels_are_masked_as_if_their_weights_were_zero(make: Any) -> None:
    model, batch = make(), text_batch(4, 12)
    sites = find_attention(model, batch)
    scores = {s.name: torch.rand(s.groups * s.unit_width, dtype=torch.float64) for s in sites}
    dense = logits_of(model, batch)
    stay = select_channels(scores, sites, heads=0.5, constraints=Constraints())
    zeroed = copy.deepcopy(model)
    gone = 0
    for site in sites:
        kept = stay[site.name].nonzero().flatten().tolist()
        for channel, parts in enumerate(rows_and_columns(zeroed, site)):
            if channel in kept:
                continue
            for parameter, index in parts:
                with torch.no_grad():
                    parameter[index] = 0
                gone += parameter[index].numel() if parameter.dim() == 2 else 0
    # As many weights as the heads of the same budget have.
    heads = Scores("random", {}, {s.name: torch.rand(s.units, dtype=torch.float64) for s in sites})
    plan = plan_of(heads, sites, heads=0.5)
    of_heads = 0
    for site in sites:
        lost = site.groups - len(plan.kept[site.name].kept_groups)
        hidden = model.get_submodule(site.consumer).weight.shape[0]
        of_heads += lost * site.unit_width * hidden * (2 + 2 * site.group_size)
    assert gone == of_heads > 0
    with masked_channels(model, sites, stay):
        found = logits_of(model, batch)
    torch.testing.assert_close(found, logits_of(zeroed, batch), rtol=1e-4, atol=1e-5)
    assert (found - dense).abs().max() > 1e-3
    assert_near(logits_of(model, batch), dense)


@pytest.mark.parametrize("make", [bert, llama])
def test_the_channels_of_least_taylor_importance_go(make: Any) -> None:
    model, batch = make(), text_batch(4, 12)
    sites = find_attention(model, batch)
    found = channel_taylor(model, [batch], sites)
    (model(**batch).loss * 4).backward()
    everything: list[tuple[float, str, int]] = []
    for site in sites:
        expected = [
            sum((p[i] * p.grad[i]).abs().sum().item() for p, i in parts if p.dim() == 2)
            for parts in rows_and_columns(model, site)
        ]
        assert found[site.name].tolist() == pytest.approx(expected, rel=1e-4)
        everything += [(value, site.name, channel) for channel, value in enumerate(expected)]
    # The least first, but every module keeps as many channels as a head has.
    kept = {site.name: set(range(site.groups * site.unit_width)) for site in sites}
    wanted = len(everything) // 2
    for _, name, channel in sorted(everything):
        if wanted and len(kept[name]) > sites[0].unit_width:
            kept[name].remove(channel)
            wanted -= 1
    stay = select_channels(found, sites, heads=0.5, constraints=Constraints())
    assert {name: set(mask.nonzero().flatten().tolist()) for name, mask in stay.items()} == kept


def test_uniform_channels_and_constraints() -> None:
    model, batch = bert(), text_batch(2, 8)
    sites = find_attention(model, batch)
    scores = {s.name: torch.rand(48, dtype=torch.float64) for s in sites}
    uniform = Constraints(allocation="uniform", keep_layers=(0,))
    stay = select_channels(scores, sites, heads=0.5, constraints=uniform)
    assert [int(mask.sum()) for mask in stay.values()] == [48, 24, 24]
    narrow = {s.name: torch.zeros(48, dtype=torch.float64) + i for i, s in enumerate(sites)}
    stay = select_channels(narrow, sites, heads=0.5, constraints=Constraints(min_heads=2))
    assert [int(mask.sum()) for mask in stay.values()] == [16, 16, 40]


def test_heads_of_other_widths_have_no_channels() -> None:
    sites = find_attention(bert(), text_batch(2, 8))
    odd = (sites[0], replace(sites[1], unit_width=4), sites[2])
    with pytest.raises(UnsupportedModelError, match="equally wide in q, k, v and o of all layers, but .* 8 and 4"):
        select_channels({}, odd, heads=0.5, constraints=Constraints())


@pytest.mark.parametrize("make", [bert, llama])
def test_slices_are_the_singular_vectors_of_what_attention_reads_and_writes(make: Any) -> None:
    model = make()
    batches = [text_batch(4, 10, labels=False), text_batch(3, 7, labels=False)]
    sites = find_attention(model, batches[0])
    bases = collect_bases(model, batches, sites)
    dense = logits_of(model, batches[0])
    reference = copy.deepcopy(model)
    for site in sites:
        # By hand: every real token's input and output in one matrix.
        read, _ = layer_tokens(model, site.producers[0], batches)
        _, written = layer_tokens(model, site.consumer, batches)
        for what, found in ((read, bases.read[site.name]), (written, bases.written[site.name])):
            matrix = torch.cat(what).numpy()
            width = matrix.shape[1]
            kept = round(0.6 * width)
            vectors = np.linalg.svd(matrix)[2][:kept]
            projector = torch.tensor(vectors.T @ vectors)
            assert_near(found[:, :kept] @ found[:, :kept].T, projector, within=REFITTED)
            # The same by changing the weights: W P for what is read, P W for what is written.
            with torch.no_grad():
                if what is read:
                    for name in site.producers:
                        layer = reference.get_submodule(name)
                        layer.weight.copy_(layer.weight.double() @ projector)
                else:
                    layer = reference.get_submodule(site.consumer)
                    layer.weight.copy_(projector @ layer.weight.double())
                    if layer.bias is not None:
                        layer.bias.copy_(projector @ layer.bias.double())
    with sliced(model, sites, bases, share=0.4):
        found = logits_of(model, batches[0])
    torch.testing.assert_close(found, logits_of(reference, batches[0]), rtol=1e-3, atol=1e-4)
    assert (found - dense).abs().max() > 1e-3
    with sliced(model, sites, bases, share=0.0):
        torch.testing.assert_close(logits_of(model, batches[0]), dense, rtol=1e-4, atol=1e-4)
    assert_near(logits_of(model, batches[0]), dense)


def test_samples_of_slices_may_be_images() -> None:
    model, batch = vit(), image_batch(2, labels=False)
    sites = find_attention(model, batch)
    assert [len(collect_bases(model, [batch], sites).read[s.name]) for s in sites] == [48, 48, 48]


@pytest.mark.parametrize("make", [bert, causal_lm])
def test_a_short_fine_tune_comes_nearer_and_is_undone(make: Any) -> None:
    model = make()
    batches = [padded([10, 8, 6, 4], "right") if make is causal_lm else text_batch(4, labels=False) for _ in range(4)]
    sites = find_attention(model, batches[0])
    bases, targets = collect_bases(model, batches, sites), predict(model, batches)
    assert (targets.kind == "classes") == (make is bert)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def distance() -> float:
        if make is causal_lm:
            with torch.no_grad():
                return float(sum(model(**b).loss for b in batches))
        found = torch.cat([logits_of(model, b) for b in batches]).log_softmax(-1)
        wanted = targets.values.log_softmax(-1)
        return float(torch.nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True))

    with sliced(model, sites, bases, share=0.5):
        untuned = distance()
        with fine_tuned(model, sites, batches, targets, epochs=10, rate=1e-3):
            assert distance() < 0.9 * untuned
            names = {n for s in sites for n in (*s.producers, s.consumer)}
            changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
            assert {name.rpartition(".")[0] for name in changed} == names
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad
        assert parameter.grad is None
