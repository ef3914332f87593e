"""Count the parameters that every module saves per bundle of units removed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from ...model.linear import features_of
from ...select.constraints import bundle_count
from ...select.cost import CostTable
from ...units.follow import feature_cuts, parameter_cuts
from ...units.units import Kept, PrunableModule
from ..measure.counts import count_parameters
from .flops import keep_first


def parameters_table(model: PreTrainedModel, modules: Sequence[PrunableModule], *, unit: str = "group") -> CostTable:
    """Return the table of parameters saved by removing bundles from every module.

    All bundles of a module own as many rows and columns. Nothing is cut, and no weight is read, so the model may be on
    the meta device.

    Args:
        model: The dense model; its tied parameters count once.
        modules: The modules that may lose units.
        unit: As in `Constraints`.

    Returns:
        Module -> share of the dense model's parameters that it saves by losing 0, 1, 2, ... bundles.

    Examples:
        >>> table = parameters_table(model, modules)
        >>> [len(saved) for saved in table.saved.values()]
        [7, 7, 7]
    """
    dense = count_parameters(model)
    saved = {}
    for module in modules:
        count = bundle_count(module, unit)
        one = _removed(model, module, keep_first(module, count - 1, unit)) / dense
        saved[module.name] = tuple(one * k for k in range(count + 1))
    return CostTable("parameters", saved)


def _removed(model: nn.Module, module: PrunableModule, kept: Kept) -> int:
    """Return the number of parameters, weights and biases, that a module loses with the units that are not kept."""
    removed = 0
    for name, axis, index in feature_cuts(model, module, kept):
        layer = model.get_submodule(name)
        features = features_of(layer)
        has_bias = axis == 0 and layer.bias is not None  # an output feature has a bias, an input feature has none
        removed += (features[axis] - len(index)) * (features[1 - axis] + has_bias)
    for name, axis, index in parameter_cuts(model, module, kept):
        parameter = model.get_parameter(name)
        removed += (parameter.shape[axis] - len(index)) * (parameter.numel() // parameter.shape[axis])
    return removed
