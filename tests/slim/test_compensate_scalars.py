"""Scalars of kept units, against NumPy's least squares over the tokens themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from support.models import bert, llama, text_batch
from support.neurons import neurons
from support.references import read_tokens

from hies_export.calibrate.moments import MomentStream
from hies_export.prunable.attention import find_attention
from hies_export.slim.cut import prune_units
from hies_export.slim.refit import Compensation, compensate, refit
from hies_export.units import PrunableModule

pytestmark = pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")

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


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_scalars_are_those_of_least_squares_over_all_tokens(make: Any, kind: str) -> None:
    model = make()
    batches = [text_batch(5, 12, labels=False) for _ in range(20)]
    modules = find_attention(model, batches[0]) if kind == "attention" else neurons(model)
    kept = {m.name: m.kept(range(0, m.units // 2)) for m in modules}
    slim, other = (prune_units(model, kept, modules) for _ in range(2))
    fits = compensate(model, slim, kept, modules, batches, NO_RIDGE)
    refit(other, kept, modules, MomentStream(model, modules, batches), NO_RIDGE)
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
