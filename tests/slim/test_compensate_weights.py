"""Refits from moments, with weighted tokens, against scikit-learn and NumPy."""

from collections.abc import Callable

import numpy as np
import pytest
from support.models import bert, image_batch, llama, text_batch, vit
from support.neurons import half, neurons
from support.references import read_tokens
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import CompensationSection, RequestError, compensate, prune_units
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
    how = CompensationSection(ridge=0.05, token_weights=mix)
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


def test_weights_of_tokens_need_weighted_moments() -> None:
    dense, batches = bert(), batches_of(bert())
    modules = neurons(dense)
    selection = half(modules)
    slim = prune_units(dense, selection, modules)
    weighted = CompensationSection(token_weights=0.5)
    with pytest.raises(RequestError, match="collect them with weighted=True"):
        refit(slim, selection, modules, MomentStore(dense, modules, batches), weighted)
