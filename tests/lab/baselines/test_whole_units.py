"""Kwon's and FLAP's choices against loops over samples, tokens and pairs of units."""

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.cuts import moments_by_module
from support.generative import padded
from support.models import bert, causal_lm, llama, text_batch
from support.neurons import neurons, one_by_one
from support.references import layer_tokens, read_tokens
from support.tolerance import assert_near
from torch import Tensor

from hies_export import PrunableModule, collect_statistics, find_attention, prune_units, select_units
from hies_export.calibrate.moments import MomentStore
from hies_export.select.cost import CostTable
from hies_lab.baselines.flap import (
    Averages,
    add_means,
    fluctuations,
    input_averages,
    score_flap,
    score_martra,
    score_wanda,
)
from hies_lab.baselines.kwon import exchanged, mask_gradients, rearranged, scalars, scale_units


def units_of(model: Any, batch: dict[str, Tensor]) -> tuple[PrunableModule, ...]:
    return (*find_attention(model, batch), *neurons(model))


def test_mask_gradients_are_those_of_every_sample_by_itself() -> None:
    model = bert()
    batches = [text_batch(3, 10), text_batch(2, 8)]
    modules = units_of(model, batches[0])
    found = mask_gradients(model, batches, modules)
    for module in (modules[0], modules[-1]):
        expected = []
        for sample in one_by_one(batches):
            mask = torch.ones(module.units, requires_grad=True)
            wide = mask.repeat_interleave(module.unit_width)
            layer = model.get_submodule(module.consumer)
            handle = layer.register_forward_pre_hook(lambda _, args, wide=wide: (args[0] * wide, *args[1:]))
            model(**sample).loss.backward()
            handle.remove()
            expected.append(mask.grad)
        torch.testing.assert_close(found[module.name], torch.stack(expected).double(), rtol=1e-4, atol=1e-6)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("labelled", [True, False])
def test_the_loss_of_a_text_is_the_mean_over_its_own_tokens(labelled: bool) -> None:
    model, batch = causal_lm(), padded([12, 10, 8, 6], "right")
    if not labelled:
        del batch["labels"]
    modules = units_of(model, batch)
    # The diagonal of the Fisher information is the statistic of that name.
    fisher = collect_statistics(model, [batch], modules)["fisher"]
    for name, gradients in mask_gradients(model, [batch], modules).items():
        assert_near(gradients.square().mean(0), fisher[name])


def naively_exchanged(gradients: np.ndarray, count: int) -> list[int]:
    """Return what Kwon's greedy round removes, with the Fisher information written out."""
    fisher = gradients.T @ gradients / len(gradients)

    def cost(gone: list[int]) -> float:
        mask = np.ones(len(fisher))
        mask[gone] = 0
        return float((1 - mask) @ fisher @ (1 - mask))

    order = np.argsort(fisher.diagonal(), kind="stable").tolist()
    gone = order[:count]
    for unit in order[count:]:
        gone.append(unit)
        gone.remove(min(gone, key=lambda back: cost([i for i in gone if i != back])))
    return sorted(gone)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_exchange_is_kwons_greedy_round(count: int) -> None:
    better = 0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        # Few samples for many units: gradients of different units cancel.
        gradients = torch.randn(5, 12, dtype=torch.float64, generator=generator)
        first = gradients.square().sum(0).argsort(stable=True)[:count].tolist()
        found = exchanged(gradients, first)
        assert found == naively_exchanged(gradients.numpy(), count)
        costs = [gradients[:, units].sum(1).square().sum() for units in (first, found)]
        assert costs[1] <= costs[0] + 1e-12
        better += bool(costs[1] < costs[0] - 1e-9)
    assert bool(better) == (count > 1)  # of a single unit, the diagonal is everything
    assert exchanged(gradients, []) == []


def test_groups_are_exchanged_as_wholes_and_counts_stay() -> None:
    model, batch = llama(), text_batch(4, 10)
    modules = units_of(model, batch)
    gradients = mask_gradients(model, [batch], modules)
    before = {m.name: m.kept(range(m.units // 2)) for m in modules}
    after = rearranged(before, modules[1:], gradients)
    assert after[modules[0].name] == before[modules[0].name]
    for module in modules[1:]:
        kept = after[module.name]
        assert len(kept.units) == module.units // 2
        assert len(kept.units) == len(kept.kept_groups) * module.group_size
        assert kept.kind == module.kind


def by_lstsq(model: Any, module: PrunableModule, units: list[int], batches: list[dict[str, Tensor]]) -> np.ndarray:
    """Return the consumer's weight, (outputs, inputs) of the kept units, each unit times its best scalar."""
    x, y, *_ = read_tokens(model, module, batches)
    layer, width = model.get_submodule(module.consumer), module.unit_width
    weight = layer.weight.detach().double().numpy()
    target = y if layer.bias is None else y - layer.bias.detach().double().numpy()
    columns = [slice(u * width, (u + 1) * width) for u in units]
    design = np.stack([(x[:, c] @ weight[:, c].T).ravel() for c in columns], 1)  # (tokens * outputs, units)
    best = np.linalg.lstsq(design, target.ravel(), rcond=None)[0]
    assert np.abs(best - 1).max() > 0.01
    return np.concatenate([s * weight[:, c] for s, c in zip(best, columns, strict=True)], 1)


@pytest.mark.parametrize(("make", "kind"), [(bert, "mlp"), (llama, "attention")])
def test_scalars_are_those_of_least_squares_over_all_tokens(make: Any, kind: str) -> None:
    model = make()
    batches = [text_batch(5, 12, labels=False) for _ in range(20)]
    modules = find_attention(model, batches[0]) if kind == "attention" else neurons(model)
    kept = {m.name: m.kept(range(0, m.units // 2)) for m in modules}
    slim, found = prune_units(model, kept, modules), moments_by_module(model, modules, batches)
    for module in modules:
        units, layer = kept[module.name].units, slim.get_submodule(module.consumer)
        fitting, held_out = found[module.name].mixed(columns=module.columns(units))
        scaled = layer.weight.detach().double() * scalars(fitting + held_out, layer, 1e-10, module.unit_width)
        expected = by_lstsq(model, module, list(units), batches)
        np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-3, atol=1e-4)


def test_units_are_scaled_where_that_brings_outputs_nearer_on_held_out_tokens() -> None:
    model, batches = bert(), [text_batch(5, 12, labels=False) for _ in range(20)]
    modules = neurons(model)
    kept = {m.name: m.kept(range(m.units if i == 0 else 40)) for i, m in enumerate(modules)}
    slim = prune_units(model, kept, modules)
    before = {name: p.detach().clone() for name, p in slim.named_parameters()}
    scale_units(slim, kept, modules, MomentStore(model, modules, batches))
    found, changed = moments_by_module(model, modules, batches), set()
    for module in modules:
        _, held_out = found[module.name].mixed(columns=module.columns(kept[module.name].units))
        layer, old = slim.get_submodule(module.consumer), before[f"{module.consumer}.weight"]
        scales = layer.weight.detach() / old
        assert_near(scales, scales[:1].expand_as(scales))  # neurons: one scalar for each column
        was, now = (held_out.error(w.double(), layer.bias.detach().double()) for w in (old, layer.weight.detach()))
        assert now <= was
        changed |= {module.name} if now < was else set()
    assert changed
    assert modules[0].name not in changed
    untouched = {name for name, p in slim.named_parameters() if torch.equal(p, before[name])}
    assert before.keys() - untouched == {f"{m.consumer}.weight" for m in modules if m.name in changed}


class Averaged(NamedTuple):
    """A model with its modules, the averages of what their consumers read, and all that they read, token by token."""

    model: Any
    modules: tuple[PrunableModule, ...]
    averages: dict[str, Averages]
    read: dict[str, Tensor]


@pytest.fixture(scope="module", params=[bert, llama])
def averaged(request: pytest.FixtureRequest) -> Averaged:
    torch.manual_seed(0)
    model = request.param()
    batches = [text_batch(4, 12, labels=False) for _ in range(2)]
    modules = units_of(model, batches[0])
    read = {m.name: torch.cat(layer_tokens(model, m.consumer, batches)[0]) for m in modules}
    return Averaged(model, modules, input_averages(model, batches, modules), read)


def test_fluctuations_are_variances_over_tokens_times_squared_columns(averaged: Averaged) -> None:
    model, modules, averages, read = averaged
    found = fluctuations(model, modules, averages)
    for module in modules:
        x = read[module.name].numpy()
        weight = model.get_submodule(module.consumer).weight.detach().double().numpy()
        metric = [x[:, j].var(ddof=1) * (weight[:, j] ** 2).sum() for j in range(x.shape[1])]
        standard = (np.array(metric) - np.mean(metric)) / np.std(metric, ddof=1)
        expected = standard.reshape(module.units, -1).mean(1)
        np.testing.assert_allclose(found[module.name].numpy(), expected, rtol=1e-3, atol=1e-4)
    # Equal channels have no spread to standardise by.
    equal = copy.deepcopy(model)
    with torch.no_grad():
        equal.get_submodule(modules[0].consumer).weight.zero_()
    assert not fluctuations(equal, modules[:1], averages)[modules[0].name].any()


def test_heads_and_neurons_go_in_one_order_until_the_budget_is_met() -> None:
    model, batch = bert(), text_batch(2, 8)
    modules = units_of(model, batch)
    generator = torch.Generator().manual_seed(1)
    metrics = {m.name: torch.randn(m.units, dtype=torch.float64, generator=generator) for m in modules}
    cost = {"attention": 0.03, "mlp": 0.002}
    table = CostTable("FLOPs", {m.name: tuple(cost[m.kind] * k for k in range(m.units)) for m in modules})
    found = select_units(score_flap(metrics, modules), modules, table=table, ratio=0.7)
    order = sorted((float(v), m.name, u, cost[m.kind]) for m in modules for u, v in enumerate(metrics[m.name]))
    saved, gone = 0.0, set()
    for _, name, unit, spared in order:
        if saved >= 0.3 - 1e-9:
            break
        saved += spared
        gone.add((name, unit))
    assert {(m.name, u) for m in modules for u in found[m.name].removed} == gone
    assert {m.kind for m in modules for u in found[m.name].removed} == {"attention", "mlp"}


def test_removed_inputs_give_their_mean_output_as_a_bias(averaged: Averaged) -> None:
    model, modules, averages, read = averaged
    selection = {m.name: m.kept(range(m.group_size, m.units)) for m in modules}
    selection[modules[0].name] = modules[0].kept(range(modules[0].units))
    slim = prune_units(model, selection, modules)
    add_means(slim, model, selection, modules, averages)
    dense, cut = model.get_submodule(modules[0].consumer), slim.get_submodule(modules[0].consumer)
    assert (cut.bias is None) == (dense.bias is None)  # nothing was removed there
    for module in modules[1:]:
        dense, cut = (of.get_submodule(module.consumer) for of in (model, slim))
        width = module.unit_width * module.group_size
        x = read[module.name].to(dense.weight)
        with torch.no_grad():
            wanted, got = (dense(x), cut(x[:, width:]))
        # The mean output stays, and would not without the bias.
        torch.testing.assert_close(got.mean(0), wanted.mean(0), rtol=1e-4, atol=1e-6)
        assert not torch.allclose((got - cut.bias).mean(0), wanted.mean(0), atol=1e-4)
    assert (model.get_submodule(modules[1].consumer).bias is None) == (model.config.model_type == "llama")


def test_wanda_is_the_mean_over_outputs_of_weights_times_norms_of_inputs(averaged: Averaged) -> None:
    model, modules, averages, read = averaged
    found = score_wanda(model, modules, averages).scores
    for module in modules:
        x = read[module.name].numpy()
        weight = model.get_submodule(module.consumer).weight.detach().double().numpy()
        norms = np.sqrt((x**2).sum(0) / len(x))
        of_channels = np.array([np.abs(weight[:, j]).mean() * norms[j] for j in range(x.shape[1])])
        expected = of_channels.reshape(module.units, -1).sum(1)
        np.testing.assert_allclose(found[module.name].numpy(), expected, rtol=1e-5)


def test_martra_adds_up_the_peaks_of_gate_and_up() -> None:
    model = llama()
    blocks = neurons(model)
    found = score_martra(model, blocks).scores
    for block in blocks:
        mlp = model.get_submodule(block.consumer.rpartition(".")[0])
        for unit in range(block.units):
            rows = [layer.weight[unit].double() for layer in (mlp.gate_proj, mlp.up_proj)]
            expected = sum((row.max() + row.min().abs()).item() for row in rows)
            assert float(found[block.name][unit]) == pytest.approx(expected, rel=1e-6)
