import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.architectures import tiny
from support.cuts import moments_of, random_cut, random_plan
from support.models import bert, llama, opt, text_batch
from support.references import kept_columns, layer_tokens, read_tokens
from transformers import PreTrainedModel

from hies_export import CompensationSection, find_attention, find_modules, prune_units
from hies_export.calibrate import moments as moments_room
from hies_export.calibrate.moments import MomentStore
from hies_export.errors import DataError, NonFiniteError, RequestError
from hies_export.slim.refit import compensate, refit


@pytest.mark.parametrize("method", ["bias", "least_squares"])
def test_it_brings_the_slim_model_nearer_to_the_dense_one(method: str) -> None:
    dense = bert()
    batches = [text_batch(8, 40, labels=False) for _ in range(10)]
    fresh = [text_batch(8, 40, labels=False) for _ in range(4)]
    slim, plan, sites = random_cut(dense, batches[0])
    cut = [s for s in sites if len(plan.kept[s.name].units) < s.units]
    first = cut[0]  # its inputs are the same in both models, and not those it was fitted on
    wanted = read_tokens(dense, first, fresh)[1]
    before = ((read_tokens(slim, first, fresh)[1] - wanted) ** 2).mean()
    state = {k: v.clone() for k, v in dense.state_dict().items()}
    fits = compensate(dense, slim, plan, sites, batches, CompensationSection(method=method))
    after = ((read_tokens(slim, first, fresh)[1] - wanted) ** 2).mean()
    assert after < before
    assert after / before == pytest.approx(fits[0].error, abs=0.15)
    assert all(fit.method == method and fit.error < 1 for fit in fits)
    assert all((fit.ridge is None) == (method == "bias") for fit in fits)
    assert all(torch.equal(v, state[k]) for k, v in dense.state_dict().items())
    if method == "bias":
        x, y, *_ = read_tokens(dense, first, batches)
        layer = slim.get_submodule(first.consumer)
        expected = y.mean(0) - layer.weight.detach().double().numpy() @ x[:, kept_columns(plan, first)].mean(0)
        np.testing.assert_allclose(layer.bias.detach().numpy(), expected, atol=1e-5)


# What reads the residual stream in front of the attention and of the neurons of a layer.
STREAMS = {
    "normalised after the sum": (bert, "bert.encoder.layer.{}", "bert.encoder.layer.{}.intermediate"),
    "normalised before": (llama, "model.layers.{}", "model.layers.{}.post_attention_layernorm"),
    "tokens of all samples in one axis": (
        *(opt, "model.decoder.layers.{}.self_attn_layer_norm", "model.decoder.layers.{}.final_layer_norm"),
    ),
}


# Which layer, if any, is not cut.
@pytest.mark.parametrize(("name", "whole"), [*zip(STREAMS, (0, 1, None), strict=True)])
def test_sequential_makes_up_for_what_the_stream_lacks(name: str, whole: int | None) -> None:
    make, *streams = STREAMS[name]
    dense = make().eval()
    # So many that every fit is better on held-out tokens than a new bias alone.
    count = 10 if make is bert else 6
    batches = [text_batch(8, 40, padding=make is bert, labels=False) for _ in range(count)]
    modules = find_modules(dense, batches[0], kinds=("attention", "mlp"))
    # Attention modules come first, and the blocks of neurons after them, but each layer runs one of both.
    half = len(modules) // 2
    in_order = [module for pair in zip(modules[:half], modules[half:], strict=True) for module in pair]
    kept = dict(random_plan(modules, uniform=False).kept)
    for module in [] if whole is None else in_order[2 * whole : 2 * whole + 2]:
        kept[module.name] = module.kept(range(module.units))
    slim = prune_units(dense, kept, modules)
    one_shot = copy.deepcopy(slim)
    compensate(dense, one_shot, kept, modules, batches, CompensationSection(ridge=0.01))
    compensate(dense, slim, kept, modules, batches, CompensationSection(ridge=0.01, sequential=True))
    cut = [module for module in in_order if kept[module.name].removed]
    first = cut[0].consumer
    torch.testing.assert_close(slim.get_submodule(first).weight, one_shot.get_submodule(first).weight)
    original = prune_units(dense, kept, modules)
    for module in cut:
        number = in_order.index(module)
        # Nothing fits this target better, at the inputs that the layer now has, than what it was given.
        layer = streams[number % 2].format(number // 2)
        there, here = (torch.cat(layer_tokens(model, layer, batches)[0]).numpy() for model in (dense, slim))
        x, y = read_tokens(slim, module, batches)[0], read_tokens(dense, module, batches)[1] + there - here
        moments, consumer = (
            moments_of(torch.from_numpy(x), torch.from_numpy(y)),
            original.get_submodule(module.consumer),
        )
        before, centred = consumer.weight.detach().double(), consumer.bias is not None
        ((_, weight, bias),) = moments.ridge_fits(before, [0.01], centred=centred)
        refitted = slim.get_submodule(module.consumer)
        torch.testing.assert_close(refitted.weight.detach().double(), weight, atol=1e-5, rtol=1e-4)
        if bias is not None:
            torch.testing.assert_close(refitted.bias.detach().double(), bias, atol=1e-5, rtol=1e-4)


def test_sequential_is_refused_where_a_layer_runs_several_times() -> None:
    dense, batches = tiny("albert")[0], [text_batch(8, 20, labels=False)]
    modules = find_attention(dense, batches[0])
    plan = random_plan(modules, uniform=False)
    slim = prune_units(dense, plan, modules)
    with pytest.raises(RequestError, match="every layer to run once, but .* runs 2 times; set compensation.sequential"):
        compensate(dense, slim, plan, modules, batches, CompensationSection(sequential=True))


def test_a_fit_that_does_not_carry_over_is_not_kept() -> None:
    """Five short samples and a tiny ridge: least squares explains the fitting tokens and nothing else."""
    dense = bert()
    batches = [text_batch(5, 3, padding=False, labels=False)]
    slim, plan, sites = random_cut(dense, batches[0])
    weights = [slim.get_submodule(s.consumer).weight.clone() for s in sites]
    fits = compensate(dense, slim, plan, sites, batches, CompensationSection(ridge=1e-9))
    kept = [fit.method for fit in fits]
    assert set(kept) - {"least_squares"}
    assert all(fit.error <= 1 for fit in fits)
    unchanged = [torch.equal(slim.get_submodule(s.consumer).weight, w) for s, w in zip(sites, weights, strict=True)]
    by_name = dict(zip([s.name for s in sites], unchanged, strict=True))
    assert [by_name[fit.name] for fit in fits] == [method != "least_squares" for method in kept]


@pytest.mark.parametrize("make", [bert, llama])
def test_least_squares_is_left_out_where_inputs_never_change(make: Callable[[], PreTrainedModel]) -> None:
    dense = make()
    batches = [text_batch(5, 40, padding=False, labels=False) for _ in range(4)]
    sites = find_attention(dense, batches[0])
    plan = random_plan(sites, uniform=False)
    empty = next(site for site in sites if len(plan.kept[site.name].units) < site.units)
    module = dense.get_submodule(empty.name)
    with torch.no_grad():
        for parameter in (module.value if make is bert else module.v_proj).parameters():
            parameter.zero_()
    slim = prune_units(dense, plan, sites)
    fits = {fit.name: fit.method for fit in compensate(dense, slim, plan, sites, batches)}
    assert fits.pop(empty.name) in ("bias", "none")
    assert set(fits.values()) <= {"least_squares", "bias"}
    assert torch.isfinite(slim(**batches[0]).logits).all()


def test_ridges_too_small_for_a_matrix_leave_the_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where sums of products of very unequal inputs are rounded, and the matrix is not positive definite."""
    factor = torch.linalg.cholesky_ex
    monkeypatch.setattr(moments_room, "WIDE", 1)
    too_small = 0.02
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda a: factor(a - too_small * a.diagonal().mean() * torch.eye(len(a)))
    )
    dense, batches = bert(num_hidden_layers=1), [text_batch(8, 40, padding=False, labels=False) for _ in range(4)]
    sites = find_attention(dense, batches[0])
    plan = random_plan(sites, uniform=False)
    with torch.no_grad():  # heads that do the same: without a ridge, the matrix is singular
        for site in sites:
            attention, consumer = dense.get_submodule(site.name), dense.get_submodule(site.consumer)
            for layer in (attention.query, attention.key, attention.value):
                layer.weight.copy_(layer.weight[:8].repeat(6, 1))
                layer.bias.copy_(layer.bias[:8].repeat(6))
            consumer.weight.copy_(consumer.weight[:, :8].repeat(1, 6))
    slim = prune_units(dense, plan, sites)
    fits = compensate(dense, slim, plan, sites, batches)
    assert [(fit.method, fit.ridge) for fit in fits] == [("least_squares", 0.1)]


HOW = {
    "least squares": CompensationSection(),
    "layer by layer": CompensationSection(sequential=True),
    "bias": CompensationSection(method="bias"),
}


@pytest.mark.parametrize(("value", "stays"), [(math.nan, True), (math.inf, False)], ids=["a head stays", "a head goes"])
@pytest.mark.parametrize("how", HOW)
def test_inputs_that_are_no_numbers_are_refused_by_name(how: str, stays: bool, value: float) -> None:
    """What a head gives that goes is in the outputs to be met, and not among the inputs."""
    dense = bert()
    batches = [text_batch(8, 40, padding=False, labels=False) for _ in range(2)]
    sites = find_attention(dense, batches[0])
    plan = random_plan(sites, uniform=False)
    last = [site for site in sites if plan.kept[site.name].removed][-1]
    head = (plan.kept[last.name].units if stays else plan.kept[last.name].removed)[0]
    with torch.no_grad():
        dense.get_submodule(f"{last.name}.value").weight[head * last.unit_width] = value
    slim = prune_units(dense, plan.kept, sites)
    before = copy.deepcopy(slim.get_submodule(last.consumer)).state_dict()
    said = f"every input and output of {last.name}'s last layer must be finite to refit it, but .* NaN or infinity"
    with pytest.raises(NonFiniteError, match=said):
        compensate(dense, slim, plan, sites, batches, HOW[how])
    after = slim.get_submodule(last.consumer).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(NonFiniteError, match=said):
        refit(slim, plan, sites, MomentStore(dense, sites, batches), HOW[how])


@pytest.mark.parametrize("how", HOW)
def test_weights_that_are_no_numbers_are_refused_by_name(how: str) -> None:
    dense, batches = bert(), [text_batch(8, 40, padding=False, labels=False)]
    sites = find_attention(dense, batches[0])
    plan = random_plan(sites, uniform=False)
    slim, last = prune_units(dense, plan.kept, sites), [site for site in sites if plan.kept[site.name].removed][-1]
    with torch.no_grad():
        dense.get_submodule(last.consumer).weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=f"of {last.name}'s last layer must be finite to refit it"):
        compensate(dense, slim, plan, sites, batches, HOW[how])


def test_bad_requests() -> None:
    dense, batch = bert(), text_batch(8)
    slim, plan, sites = random_cut(dense, batch)
    with pytest.raises(DataError, match="at least 5 samples, one of them to hold out, got 4"):
        compensate(dense, slim, plan, sites, [text_batch(4)])
    dense, batch = llama(), text_batch(8, padding=False)
    slim, plan, sites = random_cut(dense, batch)
    with pytest.raises(RequestError, match="o_proj has none; use least_squares"):
        compensate(dense, slim, plan, sites, [batch], CompensationSection(method="bias"))
