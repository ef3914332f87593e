from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import bert, image_batch, llama, save_text_model, text_batch, vit, write_rows
from support.references import RIDGE, naive_effect
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.calibrate.effects import Effects, LayerEffects, collect_effects
from hies_export.errors import DataError, NonFiniteError, RecipeError
from hies_export.legacy import AttentionSite, select_heads
from hies_export.pipeline.choose import choose, write_choice
from hies_export.pipeline.prepare import prepare
from hies_export.progress import Silent
from hies_export.prunable.attention import find_attention
from hies_export.recipe import PruningRecipe
from hies_export.score.compensated import removal_order, score_compensated
from hies_export.score.criteria import score_units


def regression_bert() -> PreTrainedModel:
    return bert(num_labels=1)


def collected(
    model: PreTrainedModel, site: AttentionSite, batches: list[dict[str, Tensor]]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per sample (x, y, g) at its real tokens: input, output, and gradient of the prediction at the OUTPUT."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = model.get_submodule(site.output).register_forward_hook(lambda m, x, y: seen.append((x[0], y)))
    samples = []
    for batch in batches:
        for i in range(len(next(iter(batch.values())))):
            one = {k: v[i : i + 1] for k, v in batch.items() if k != "labels"}
            logits = model(**one).logits[0]
            ordered = logits.sort(descending=True).values
            prediction = logits[0] if len(logits) == 1 else ordered[0] - ordered[1]
            x, y = seen.pop()
            (g,) = torch.autograd.grad(prediction, y)
            real = one["attention_mask"][0].bool() if "attention_mask" in one else slice(None)
            samples.append(tuple(t[0][real].detach().double().numpy() for t in (x, y, g)))
    handle.remove()
    return samples


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize(
    "make", [bert, regression_bert, vit, llama], ids=["bert with padding", "regression", "vit", "grouped, no bias"]
)
def test_it_is_greedy_by_the_effect_of_the_compensated_layers(
    make: Callable[[], PreTrainedModel], squared: bool
) -> None:
    model = make()
    batches = [image_batch(9), image_batch(7)] if make is vit else [text_batch(4, 20), text_batch(8, 30)]
    sites = find_attention(model, batches[0])
    samples = {site.name: collected(model, site, batches) for site in sites}
    effects = collect_effects(model, batches, sites)
    found = score_compensated(effects, sites, ridge=RIDGE, squared=squared)

    kept = {site.name: list(range(site.key_value_heads)) for site in sites}
    before = {site.name: 0.0 for site in sites}
    rank, total = 0, sum(site.key_value_heads for site in sites)
    raises: dict[str, list[float]] = {site.name: [] for site in sites}
    while any(len(groups) > 1 for groups in kept.values()):
        tried = [
            (naive_effect(model, s, samples[s.name], [k for k in kept[s.name] if k != g], squared=squared), g, s)
            for s in sites
            if len(kept[s.name]) > 1
            for g in kept[s.name]
        ]
        after, group, site = min(tried, key=lambda item: item[0] - before[item[2].name])
        scores = found.scores[site.name].view(-1, site.group_size)[group]
        assert scores.tolist() == [rank / total] * site.group_size
        raises[site.name].append(after - before[site.name])
        before[site.name] = after
        kept[site.name].remove(group)
        rank += 1
    for site in sites:
        order = removal_order(
            effects.layers[site.name], site.key_value_heads, effects.samples, ridge=RIDGE, squared=squared
        )
        np.testing.assert_allclose([r for _, r in order[:-1]], raises[site.name], rtol=2e-3, atol=1e-7)
        assert order[-1][0] == kept[site.name][0]
        best = found.scores[site.name].view(-1, site.group_size)[order[-1][0], 0].item()
        assert best >= rank / total  # the head that is never removed ranks above all that are
    assert {tuple(v.shape) for v in found.scores.values()} == {(site.heads,) for site in sites}
    assert (found.criterion, found.parameters) == ("hies-compensated", {"ridge": RIDGE, "squared": squared})


def synthetic(tokens: int = 300, inputs: int = 12, samples: int = 20, *, centred: bool = True) -> LayerEffects:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator) + 1
    h = torch.randn(tokens, inputs, generator=generator)
    return LayerEffects(x, h, torch.arange(tokens) % samples, centred)


@pytest.mark.parametrize("centred", [True, False])
def test_downdating_equals_solving_anew(centred: bool) -> None:
    layer, width, samples = synthetic(centred=centred), 3, 20
    order = removal_order(layer, 4, samples, ridge=0.01, squared=True)
    x, h, sample = (t.double().numpy() for t in (layer.inputs, layer.gradients, layer.sample))
    z = x - x.mean(0) if centred else x
    c = z.T @ z / len(z)
    gone: list[int] = []
    effect = 0.0
    for group, raised in order:
        gone += range(group * width, (group + 1) * width)
        kept = sorted(set(range(x.shape[1])) - set(gone))
        damped = c[np.ix_(kept, kept)] + 0.01 * c.diagonal().mean() * np.eye(len(kept))
        residual = z[:, gone] - z[:, kept] @ np.linalg.solve(damped, c[np.ix_(kept, gone)])
        per_token = (h[:, gone] * residual).sum(1)
        after = np.mean([per_token[sample == s].sum() ** 2 for s in range(samples)])
        assert raised == pytest.approx(after - effect, rel=1e-9)
        effect = after
    assert sorted(gone) == list(range(x.shape[1]))


def test_a_linear_copy_of_another_head_goes_first_and_costs_nothing() -> None:
    layer = synthetic()
    inputs = layer.inputs.clone()
    inputs[:, 6:9] = inputs[:, :1] * torch.tensor([1.0, -2.0, 0.5]) + 3  # head 2 says only what head 0 says as well
    copied = LayerEffects(
        inputs, layer.gradients * torch.tensor([1.0] * 6 + [10.0] * 3 + [1.0] * 3), layer.sample, True
    )
    order = removal_order(copied, 4, 20, ridge=1e-10, squared=True)
    assert order[0][0] == 2
    assert order[0][1] < 1e-9 * order[1][1]


def test_the_order_over_modules_is_by_the_next_raise_and_budgets_are_nested() -> None:
    model, batches = bert(), [text_batch(8, 30)]
    sites = find_attention(model, batches[0])
    effects = collect_effects(model, batches, sites)
    # A module whose predictions hang a thousand times less on it is emptied, up to one head, before the others.
    small = sites[1].name
    layer = effects.layers[small]
    layers = dict(effects.layers) | {
        small: LayerEffects(layer.inputs, layer.gradients * 1e-3, layer.sample, layer.centred)
    }
    scores = score_compensated(Effects(layers, effects.samples), sites)
    assert sorted((scores.scores[small] * 18).round().int().tolist())[:5] == [0, 1, 2, 3, 4]
    assert sorted((torch.cat(list(scores.scores.values())) * 18).round().int().tolist()) == list(range(18))
    plans = [select_heads(scores, sites, heads=share) for share in (0.2, 0.4, 0.6, 0.8)]
    for less, more in itertools.pairwise(plans):
        assert all(set(more.kept[s.name].query) <= set(less.kept[s.name].query) for s in sites)
    assert plans[0].alpha is None


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model, batch = bert().train(training), text_batch(8)
    frozen = next(model.parameters()).requires_grad_(False)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    sites = find_attention(model, batch)

    def check() -> None:
        assert model.training == training
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad == (p is not frozen) for p in model.parameters())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    first = collect_effects(model, [batch], sites)
    check()
    with torch.no_grad():  # nobody has to know that a gradient is needed
        again = collect_effects(model, [batch], sites)
    assert all(torch.equal(first.layers[k].gradients, again.layers[k].gradients) for k in first.layers)
    with torch.no_grad():
        model.classifier.weight[0, 0] = state["classifier.weight"][0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="batch 0 gave NaN or infinity"):
        collect_effects(model, [batch], sites)
    model.classifier.weight.data[0, 0] = state["classifier.weight"][0, 0] = 0.0
    check()


def test_padding_and_labels_make_no_difference() -> None:
    model, batch = bert(), text_batch(4, 12)
    sites = find_attention(model, batch)
    wider = {k: torch.nn.functional.pad(batch[k], (0, 7)) for k in ("input_ids", "attention_mask")}
    one, other = (collect_effects(model, [b], sites) for b in (batch, wider))
    assert one.samples == 4
    for site in sites:
        a, b = one.layers[site.name], other.layers[site.name]
        assert len(a.inputs) == batch["attention_mask"].sum()
        assert torch.bincount(a.sample).tolist() == batch["attention_mask"].sum(1).tolist()
        assert torch.equal(a.sample, b.sample)
        torch.testing.assert_close(a.inputs, b.inputs)
        torch.testing.assert_close(a.gradients, b.gradients)
        assert {t.dtype for t in (a.inputs, a.gradients)} == {torch.float32}


@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_a_recipe_may_name_it(tmp_path: Path, alpha: object) -> None:
    save_text_model(tmp_path / "model")
    recipe = PruningRecipe(
        model=str(tmp_path / "model"),
        task="text-classification",
        data={"files": {"train": write_rows(tmp_path / "a.jsonl", 40)}, "text": "sentence", "label": "label"},
        calibration={"samples": 24},
        evaluation={"split": "train"},
        prune={"criterion": "hies-compensated", "alpha": alpha, "budget": {"heads": 0.5}},
    )
    prepared = prepare(recipe)
    assert prepared.held_out == []
    choice = choose(prepared, recipe, progress=Silent())
    assert (choice.plan.criterion, choice.plan.alpha, choice.plan.removed) == ("hies-compensated", None, 9)
    assert choice.plan.calibration["labels"] == "predictions"  # those of the rows are not looked at
    expected = score_compensated(collect_effects(prepared.model, prepared.calibration, prepared.sites), prepared.sites)
    assert select_heads(expected, prepared.sites, heads=0.5).kept == choice.plan.kept
    write_choice(tmp_path, choice)
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["parameters"] == {"ridge": 0.1, "squared": True}
    assert set(written["his"]) == set(written["entropy"]) == set(written["scores"]) == {s.name for s in prepared.sites}


def test_bad_requests() -> None:
    model, batch = bert(), text_batch(4)
    sites = find_attention(model, batch)
    with pytest.raises(DataError, match="at least one sample, got none; raise calibration.samples"):
        collect_effects(model, [], sites)
    with pytest.raises(RecipeError, match="ridge must be above 0, got 0"):
        score_compensated(collect_effects(model, [batch], sites), sites, ridge=0)
    with pytest.raises(RecipeError, match="hies-compensated is scored by score_compensated"):
        score_units(None, criterion="hies-compensated")  # type: ignore[arg-type]
