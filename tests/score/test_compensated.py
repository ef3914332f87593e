"""Greedy removal against loops that build every compensated layer anew, token by token."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cuts import effects, moments_by_module, plan_of
from support.generative import padded
from support.loading import load_pruning
from support.models import (
    bert,
    causal_lm,
    image_batch,
    llama,
    save_text_model,
    text_batch,
    vit,
    write_rows,
    zero_padding,
)
from support.neurons import neurons
from support.references import RIDGE, bounds, naive_effect, read_by_sample
from support.tolerance import assert_near, near
from transformers import PreTrainedModel

from hies_export import PrunableModule, PruningRecipe, find_attention, score_compensated
from hies_export.calibrate.moments import MomentStore, Spread
from hies_export.calibrate.readings import Gradients, LayerEffects
from hies_export.errors import NonFiniteError
from hies_export.kinds import KINDS, Kind
from hies_export.pipeline.choose import choose
from hies_export.pipeline.reporting import write_choice
from hies_export.pipeline.stages import calibrate
from hies_export.score import compensated
from hies_export.score.compensated import Removal, removal_chain, scores_of_chains
from hies_export.units.units import Units


def regression_bert(**options: Any) -> PreTrainedModel:
    return bert(num_labels=1, **options)


@pytest.mark.parametrize(
    ("make", "per_sample"), [(bert, True), (regression_bert, True), (vit, True), (llama, True), (causal_lm, False)]
)
def test_it_is_greedy_by_the_effect_of_the_compensated_layers(make: Callable[..., Any], per_sample: bool) -> None:
    model = make(intermediate_size=6, num_hidden_layers=2)
    texts = [zero_padding(text_batch(4, 20)), zero_padding(text_batch(8, 30))]
    batches = [image_batch(9), image_batch(7)] if make is vit else texts
    if make is causal_lm:
        batches = [padded([9, 4, 6, 8], "left"), padded([3, 7, 5], "left")]
    modules = [*find_attention(model, batches[0]), *neurons(model)]
    found = score_compensated(model, batches, modules)
    assert (found.criterion, found.parameters) == ("compensated", {"ridge": RIDGE, "per_sample": per_sample})
    assert len(found.chains) == len(modules)
    for module, chain in zip(modules, found.chains, strict=True):
        x, y, h, g = zip(*read_by_sample(model, module, batches), strict=True)
        factors = np.split(bounds(np.concatenate(x), np.concatenate(h)), np.cumsum([*map(len, x)])[:-1])
        samples = [*zip(x, y, map(np.multiply, factors, g), strict=True)]
        kept = list(range(module.groups))
        for removal in chain:
            # The last group's removal leaves no inputs to build a layer of.
            tried = [
                (naive_effect(model, module, samples, [k for k in kept if k != g], per_sample=per_sample), g)
                for g in (kept if len(kept) > 1 else [])
            ]
            effect, group = min(tried) if tried else (removal.effect, kept[0])
            units = tuple(range(group * module.group_size, (group + 1) * module.group_size))
            assert (removal.module, removal.units) == (module.name, units)
            assert removal.effect == pytest.approx(effect, rel=2e-3, abs=1e-7)
            kept.remove(group)
        assert not kept
        # Within a module, units rank as they go.
        scores = found.scores[module.name]
        assert scores.shape == (module.units,)
        of_removals = [scores[list(removal.units)].unique().tolist() for removal in chain]
        assert all(len(values) == 1 for values in of_removals)
        assert of_removals == sorted(of_removals)


def layer_of(tokens: int, inputs: int, samples: int, *, centred: bool, seed: int = 1) -> LayerEffects:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=torch.Generator().manual_seed(0))
    x = torch.randn(tokens, inputs, generator=generator) @ mixed + 1
    h = torch.randn(tokens, inputs, generator=generator)
    return LayerEffects(x, h, torch.arange(tokens) % samples, centred)


def module_of(units: int, *, width: int = 1, groups: int = 0, kind: str = "attention") -> PrunableModule:
    return PrunableModule(name="layer", units=units, groups=groups, kind=kind, unit_width=width, consumer="layer.o")


def solved_anew(
    layer: LayerEffects,
    gone: list[int],
    samples: int,
    *,
    per_sample: bool = True,
    known: np.ndarray | None = None,
) -> float:
    """Return e without the columns that are gone; mean and covariance are those of the `known` tokens."""
    x, h, sample = (t.double().numpy() for t in (layer.inputs, layer.gradients, layer.sample))
    known = x if known is None else known
    mean = known.mean(0) if layer.centred else np.zeros(x.shape[1])
    c = (known - mean).T @ (known - mean) / len(known)
    kept = sorted(set(range(x.shape[1])) - set(gone))
    damped = c[np.ix_(kept, kept)] + RIDGE * np.trace(c) / len(c) * np.eye(len(kept))
    predict = c[np.ix_(gone, kept)] @ np.linalg.inv(damped) if kept else np.zeros((len(gone), 0))
    z = x - mean
    d = (h[:, gone] * (z[:, gone] - z[:, kept] @ predict.T)).sum(1)  # of each token
    of_samples = sum(d[sample == s].sum() ** 2 for s in range(samples)) if per_sample else 0.0
    return float((d @ d + of_samples) / samples)


def naive_chain(
    layer: LayerEffects,
    module: PrunableModule,
    samples: int,
    *,
    step: int = 1,
    per_sample: bool = True,
    known: np.ndarray | None = None,
) -> list[tuple[list[int], float]]:
    """Return the groups that each step removes, and the effect after it, by trying every group that is left."""
    width = module.unit_width * module.group_size

    def effect(groups: list[int]) -> float:
        gone = [column for g in sorted(groups) for column in range(g * width, (g + 1) * width)]
        return solved_anew(layer, gone, samples, per_sample=per_sample, known=known)

    gone: list[int] = []
    chain = []
    while len(gone) < module.groups:
        left = [g for g in range(module.groups) if g not in gone]
        cheapest = sorted(left, key=lambda g: (effect([*gone, g]), -g))[:step]
        gone += cheapest
        chain.append((cheapest, effect(gone)))
    return chain


# The kind of precision is the kind of unit's: a neuron's system is a single number.
SHAPES = {
    "heads": (module_of(5, width=3), 1e-9),
    "groups": (module_of(8, width=2, groups=4), 1e-9),
    "neurons": (module_of(12, kind="mlp"), 1e-5),
}


@pytest.mark.parametrize(
    ("centred", "per_sample", "known"),  # known are the moments of other tokens
    [(True, True, False), (False, True, True), (True, False, True), (False, False, False)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_downdating_equals_solving_anew(shape: str, centred: bool, per_sample: bool, known: bool) -> None:
    (module, precision), samples = SHAPES[shape], 10
    inputs = module.units * module.unit_width
    layer = layer_of(60, inputs, samples, centred=centred)
    others = layer_of(150, inputs, samples, centred=centred, seed=2).inputs if known else None
    spread = None if others is None else Spread.of(others, centred=centred)
    found = removal_chain(layer, module, samples, spread=spread, per_sample=per_sample)
    numbers = None if others is None else others.double().numpy()
    expected = naive_chain(layer, module, samples, per_sample=per_sample, known=numbers)
    size = module.group_size
    assert [r.units for r in found] == [tuple(range(g * size, (g + 1) * size)) for (g,), _ in expected]
    assert [r.effect for r in found] == pytest.approx([effect for _, effect in expected], rel=precision)


@pytest.mark.parametrize("size", [2, 3])
def test_heads_of_all_groups_go_in_turns(size: int) -> None:
    module, samples = module_of(3 * size, width=2, groups=3), 10
    layer = layer_of(60, 6 * size, samples, centred=True)
    gone: list[int] = []
    for removal in removal_chain(layer, module, samples, unit="query"):
        for group, head in enumerate(removal.units):
            left = [unit for unit in range(size * group, size * (group + 1)) if unit not in gone]

            def effect(unit: int) -> float:
                columns = [2 * u + i for u in sorted([*gone, unit]) for i in range(2)]
                return solved_anew(layer, columns, samples)

            assert head == min(left, key=effect)
            least = effect(head)
            gone.append(head)
        assert removal.effect == pytest.approx(least, rel=1e-9)
    assert sorted(gone) == list(range(3 * size))


def test_neurons_go_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "mlp", Kind("neuron", "feed-forward block", 0.2))
    module, samples = module_of(16, kind="mlp"), 10
    layer = layer_of(60, 16, samples, centred=True)
    found = removal_chain(layer, module, samples)
    expected = naive_chain(layer, module, samples, step=3)
    assert [len(r.units) for r in found] == [3, 3, 3, 3, 3, 1]
    assert [list(r.units) for r in found] == [groups for groups, _ in expected]
    assert [r.effect for r in found] == pytest.approx([effect for _, effect in expected], rel=1e-5)


def assert_same_chain(found: Sequence[Removal], expected: Sequence[Removal]) -> None:
    assert [(r.module, r.units) for r in found] == [(r.module, r.units) for r in expected]
    assert [r.effect for r in found] == near([r.effect for r in expected])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_is_made_on_the_device_that_was_asked_for(shape: str) -> None:
    (module, _), samples = SHAPES[shape], 10
    layer = layer_of(60, module.units * module.unit_width, samples, centred=True)
    expected = removal_chain(layer, module, samples)
    # A tensor made without naming its device would be on this one, which has no values.
    with torch.device("meta"):
        assert_same_chain(removal_chain(layer, module, samples, device="cpu"), expected)


def test_a_step_is_one_percent_of_a_wide_layer() -> None:
    module, samples = module_of(251, kind="mlp"), 10
    layer = layer_of(300, 251, samples, centred=True)
    found = removal_chain(layer, module, samples)
    assert [len(r.units) for r in found] == [3] * 83 + [2]
    assert sorted(unit for r in found for unit in r.units) == list(range(251))
    gone: list[int] = []
    for number, removal in enumerate(found):
        gone += removal.units
        if number % 20 == 0:
            assert removal.effect == pytest.approx(solved_anew(layer, sorted(gone), samples), rel=1e-4)
    heads = removal_chain(layer_of(60, 120, 10, centred=True), module_of(120), samples)
    assert {len(r.units) for r in heads} == {1}


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_units_that_write_nothing_go_first_and_cost_nothing(kind: str) -> None:
    layer = layer_of(100, 6, 20, centred=False)
    silent = LayerEffects(layer.inputs * torch.tensor([1.0, 0, 1, 1, 0, 1]), layer.gradients, layer.sample, False)
    chain = removal_chain(silent, module_of(6, kind=kind), 20)
    # Of equals, the later one goes first.
    assert [r.units for r in chain[:2]] == [(4,), (1,)]
    assert [r.effect for r in chain[:2]] == [0, 0]
    assert chain[2].effect > 0
    dead = LayerEffects(layer.inputs * 0, layer.gradients, layer.sample, True)
    assert [(r.units, r.effect) for r in removal_chain(dead, module_of(3, width=2, kind=kind), 20)] == [
        *(((2,), 0), ((1,), 0), ((0,), 0))
    ]


def test_moments_reach_the_modules_they_were_collected_of() -> None:
    model, batches, others = bert(intermediate_size=16), [text_batch(8, 20)], [text_batch(8, 30), text_batch(8, 30)]
    modules = [*find_attention(model, batches[0]), *neurons(model)]
    layers, known_of = effects(model, batches, modules), moments_by_module(model, modules, others)
    store = MomentStore(model, modules, others)
    found = score_compensated(model, batches, modules, moments=store)
    assert all(len(part.xx) for sums in store.kept.values() for part in sums.parts())  # a refit reads them afterwards
    for module, chain in zip(modules, found.chains, strict=True):
        layer, spread = layers[module.name], known_of[module.name].spread()
        assert_same_chain(chain, removal_chain(layer, module, 8, spread=spread))
        assert [r.effect for r in chain[:-1]] != pytest.approx([r.effect for r in removal_chain(layer, module, 8)[:-1]])


def test_spreads_kept_and_found_again_block_by_block_give_the_same_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches, others = llama(), [text_batch(8, 20)], [text_batch(8, 30), text_batch(8, 30)]
    modules = [*find_attention(model, batches[0]), *neurons(model)]
    again, collect_again = list[str](), Gradients.collect_again

    def counted(gradients: Gradients, block: str, work: Any) -> None:
        again.append(block)
        collect_again(gradients, block, work)

    monkeypatch.setattr(Gradients, "collect_again", counted)
    found = []
    for kept in (True, False):
        monkeypatch.setattr(compensated, "_spreads_are_small", lambda *_, kept=kept: kept)
        store = MomentStore(model, modules, others, keep=False)
        found.append(score_compensated(model, batches, modules, moments=store).chains)
        assert len(again) == (0 if kept else model.config.num_hidden_layers)
    for chain, other in zip(*found, strict=True):
        assert_same_chain(chain, other)


def test_spreads_are_kept_where_they_take_less_than_the_gradients() -> None:
    model = causal_lm()
    batches = [{"input_ids": torch.randint(0, model.config.vocab_size, (8, 20))} for _ in range(2)]
    modules = [*find_attention(model, batches[0]), *neurons(model)]
    # Heads are ranked in float64; neurons and hidden states are float32.
    spreads = sum(
        (8 if module.unit_width > 1 else 4) * model.get_submodule(module.consumer).in_features ** 2
        for module in modules
    )
    blocks = math.ceil(spreads / (2 * 8 * 20 * model.config.hidden_size * 4))
    assert compensated._spreads_are_small(model, modules, batches, blocks)
    assert not compensated._spreads_are_small(model, modules, batches, blocks - 1)


def test_predictions_that_are_no_numbers_are_refused_by_their_batch() -> None:
    model = causal_lm()
    batches = [{"input_ids": torch.randint(0, model.config.vocab_size, (rows, 20))} for rows in (2, 4)]

    def broken(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return (args[0].index_fill(0, torch.tensor(3), torch.nan),) if len(args[0]) == 4 else None

    model.lm_head.register_forward_pre_hook(broken)
    with pytest.raises(NonFiniteError, match="predictions of batch 1 have NaN or infinity"):
        score_compensated(model, batches, neurons(model))


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "block by block"])
def test_moments_that_are_no_numbers_are_refused_by_name(keep: bool) -> None:
    model, batches, others = llama(), [text_batch(4)], [text_batch(8)]
    modules = neurons(model)

    def broken(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return (args[0].index_fill(0, torch.tensor(3), torch.nan),) if len(args[0]) == 8 else None

    model.get_submodule(modules[-1].consumer).register_forward_pre_hook(broken)
    store = MomentStore(model, modules, others, keep=keep)
    with pytest.raises(NonFiniteError, match=f"of {modules[-1].name}'s last layer must be finite to refit it"):
        score_compensated(model, batches, modules, moments=store)


def test_units_rank_among_their_kind_by_slope_and_the_last_of_every_module_above_all() -> None:
    modules = [Units(name="a", units=3), Units(name="m", units=4, kind="mlp"), Units(name="b", units=3)]
    chains = [
        tuple(Removal(module.name, units, effect) for units, effect in steps)
        for module, steps in zip(
            modules,
            (
                [((1,), 1.0), ((0,), 5.0), ((2,), 6.0)],
                [((3, 0), 2.0), ((1,), 3.0), ((2,), 9.0)],
                [((2,), 2.0), ((1,), 4.0), ((0,), 50.0)],
            ),
            strict=True,
        )
    ]
    found = scores_of_chains(modules, chains, per_sample=True)
    # Slopes of a are 1 and 4, of b 2 and 2; the last of a has less effect than the last of b.
    ranks = {"a": [3, 0, 4], "m": [1, 2, 3, 0], "b": [5, 2, 1]}
    assert {m.name: (found.scores[m.name] * (4 if m.kind == "mlp" else 6)).tolist() for m in modules} == {
        name: pytest.approx(values) for name, values in ranks.items()
    }
    plans = [plan_of(found, [modules[0], modules[2]], heads=share) for share in (1 / 6, 0.5, 2 / 3)]
    assert [[kept.removed for kept in plan.kept.values()] for plan in plans] == [
        [(1,), ()],
        [(1,), (1, 2)],
        [(0, 1), (1, 2)],
    ]
    assert plans[0].alpha is None


def test_a_recipe_may_name_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_text_model(tmp_path / "model")
    recipe = PruningRecipe(
        model=str(tmp_path / "model"),
        task="text-classification",
        data={"files": {"train": write_rows(tmp_path / "a.jsonl", 40)}, "text": "sentence", "label": "label"},
        calibration={"samples": 24},
        evaluation={"split": "train"},
        prune={"criterion": "compensated", "alpha": "auto", "budget": {"heads": 0.5}},
    )
    prepared = load_pruning(recipe)
    assert "compensated ranks units by the errors that least squares leaves" in caplog.text
    assert prepared.rows.held_out == []
    choice = choose(prepared, calibrate(prepared))
    assert (choice.plan.criterion, choice.plan.alpha, choice.plan.removed) == ("compensated", None, 9)
    # The labels of the rows are not looked at.
    assert (choice.plan.calibration["labels"], choice.plan.calibration["samples"]) == ("predictions", 24)
    sites = prepared.modules
    expected = score_compensated(prepared.model, prepared.rows.score, sites)
    assert_near({s.name: choice.scores.scores[s.name] for s in sites}, dict(expected.scores))
    assert plan_of(expected, sites, heads=0.5).kept == choice.plan.kept
    write_choice(choice, tmp_path)
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["parameters"] == {"ridge": 0.1, "per_sample": True}
    assert set(written["his"]) == set(written["entropy"]) == set(written["scores"]) == {s.name for s in sites}
