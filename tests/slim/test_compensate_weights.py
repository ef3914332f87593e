"""Refits from moments, with weighted tokens and by scalars, against scikit-learn, NumPy and predictions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.models import bert, image_batch, llama, text_batch, vit
from support.neurons import half, neurons
from support.references import read_tokens
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import Compensation, PrunableModule, RecipeError, RequestError, compensate, find_attention, prune_units
from hies_export.calibrate import moments
from hies_export.calibrate.moments import MomentStore
from hies_export.slim.refit import refit

sklearn = pytest.importorskip("sklearn.linear_model")


def batches_of(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    if model.main_input_name == "pixel_values":
        return [image_batch(20, labels=False), image_batch(31, labels=False)]
    batches = [text_batch(8, length, labels=False) for length in (30, 24, 40, 18, 35, 22, 31, 40)]
    return [batch | {"input_ids": batch["input_ids"] * batch["attention_mask"]} for batch in batches]


@pytest.mark.parametrize(
    ("make", "wide", "mix"),
    [(bert, False, 1.0), (bert, True, 0.3), (vit, False, 0.3), (lambda: llama(intermediate_size=48), False, 0.3)],
    ids=["bert", "bert, wide and weighted", "vit, weighted", "no bias, weighted"],
)
def test_it_is_the_ridge_regression_of_scikit_learn(
    make: Callable[[], PreTrainedModel], mix: float, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(moments, "WIDE", 16)
    dense = make()
    batches, modules = batches_of(dense), neurons(dense)
    selection = half(modules)
    one, other = (prune_units(dense, selection, modules) for _ in range(2))
    how = Compensation(ridge=0.05, token_weights=mix)
    fits = compensate(dense, one, selection, modules, batches, how)
    refit(other, selection, modules, MomentStore(dense, modules, batches, weighted=True), how)
    for module, fit in zip(modules, fits, strict=True):
        assert (fit.name, fit.method) == (module.name, "least_squares")
        x, y, gradients, _ = read_tokens(dense, module, batches)
        q = (gradients**2).sum(1)
        assert fit.tokens == len(x)
        kept = list(selection[module.name].units)
        layer = dense.get_submodule(module.consumer)
        weight = layer.weight.detach().double().numpy()[:, kept]
        weights = mix + (1 - mix) * q / q.mean()
        centred = layer.bias is not None
        mean = np.average(x[:, kept], axis=0, weights=weights) if centred else 0
        scale = np.average((x[:, kept] - mean) ** 2, axis=0, weights=weights).mean()
        # Shrinking towards the weight is shrinking the change to zero.
        fitted = sklearn.Ridge(alpha=0.05 * scale * weights.sum(), fit_intercept=centred)
        fitted.fit(x[:, kept], y - x[:, kept] @ weight.T, sample_weight=weights)
        for slim in (one, other):
            found = slim.get_submodule(module.consumer)
            np.testing.assert_allclose(found.weight.detach().numpy(), weight + fitted.coef_, atol=2e-5)
            assert (found.bias is None) == (not centred)
            if centred:
                np.testing.assert_allclose(found.bias.detach().numpy(), fitted.intercept_, atol=2e-5)


def test_bad_requests() -> None:
    dense, batches = bert(), batches_of(bert())
    with pytest.raises(RecipeError, match="a compensation must be as in a recipe.*token_weights"):
        Compensation(token_weights=0.0)
    with pytest.raises(RecipeError, match="sequential refits weigh all tokens alike, got token_weights: 0.5"):
        Compensation(sequential=True, token_weights=0.5)
    modules = neurons(dense)
    selection = half(modules)
    slim = prune_units(dense, selection, modules)
    weighted = Compensation(token_weights=0.5)
    with pytest.raises(RequestError, match="collect them with weighted=True"):
        refit(slim, selection, modules, MomentStore(dense, modules, batches), weighted)


# So small that the solution is that of plain least squares.
NO_RIDGE = Compensation(method="scalars", ridge=1e-10)


def by_lstsq(model: Any, module: PrunableModule, units: list[int], batches: list[dict[str, torch.Tensor]]) -> Any:
    """Return the best scalars of the kept units, the consumer's weight, and the columns of each of these units."""
    x, y, *_ = read_tokens(model, module, batches)
    layer, width = model.get_submodule(module.consumer), module.unit_width
    weight = layer.weight.detach().double().numpy()
    target = y if layer.bias is None else y - layer.bias.detach().double().numpy()
    columns = [slice(u * width, (u + 1) * width) for u in units]
    design = np.stack([(x[:, c] @ weight[:, c].T).ravel() for c in columns], 1)  # (tokens * outputs, units)
    return np.linalg.lstsq(design, target.ravel(), rcond=None)[0], weight, columns


@pytest.mark.parametrize(("make", "kind"), [(bert, "mlp"), (llama, "attention")])
def test_scalars_are_those_of_least_squares_over_all_tokens(make: Any, kind: str) -> None:
    model = make()
    batches = [text_batch(5, 12, labels=False) for _ in range(20)]
    modules = find_attention(model, batches[0]) if kind == "attention" else neurons(model)
    kept = {m.name: m.kept(range(0, m.units // 2)) for m in modules}
    slim, other = (prune_units(model, kept, modules) for _ in range(2))
    fits = compensate(model, slim, kept, modules, batches, NO_RIDGE)
    refit(other, kept, modules, MomentStore(model, modules, batches), NO_RIDGE)
    # On few tokens, ones may be better on those held out; such a layer is left as it is.
    scaled = [module for module, fit in zip(modules, fits, strict=True) if fit.method == "scalars"]
    assert scaled
    for module in scaled:
        units = list(kept[module.name].units)
        scalars, weight, columns = by_lstsq(model, module, units, batches)
        expected = np.concatenate([s * weight[:, c] for s, c in zip(scalars, columns, strict=True)], 1)
        for found in (slim, other):
            layer = found.get_submodule(module.consumer)
            np.testing.assert_allclose(layer.weight.detach().numpy(), expected, rtol=1e-3, atol=1e-4)
            if layer.bias is not None:
                assert torch.equal(layer.bias, model.get_submodule(module.consumer).bias)
        assert np.abs(scalars - 1).max() > 0.01


def test_a_great_ridge_leaves_the_scalars_at_one_and_units_that_all_stay_are_left_alone() -> None:
    model, batch = bert(), text_batch(8, 12, labels=False)
    modules = neurons(model)
    kept = {m.name: m.kept(range(m.units if i == 0 else 40)) for i, m in enumerate(modules)}
    slim = prune_units(model, kept, modules)
    before = {name: p.detach().clone() for name, p in slim.named_parameters()}
    fits = compensate(model, slim, kept, modules, [batch], Compensation(method="scalars", ridge=1e9))
    assert [fit.name for fit in fits] == [module.name for module in modules[1:]]
    for name, parameter in slim.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=1e-5, atol=1e-6)
