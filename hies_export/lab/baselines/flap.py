"""Prune as FLAP does, by how much inputs fluctuate (An et al. 2023, https://arxiv.org/abs/2312.11983).

The fluctuation of input channel j of a consumer is the sample variance of the channel over tokens, times |W_:j|^2: the
error of the consumer's output if the channel is replaced by its mean. Fluctuations are standardised within each
consumer. A head's score is the mean over its channels, and a neuron has one channel. All heads and neurons of the model
are then ranked together, and the lowest go until the budget is met.

FLAP replaces removed channels by their mean. The output that they had then goes into the consumer's bias: b' = b + W_M
mu_M. This is the compensation `bias`, and FLAP is much worse without it. A consumer without a bias gets one, as in the
original. No config of such a model describes that, so it is judged and not saved.

Tokens are those of the compensation rows, without padding; the original takes text of one length. The original's code
also squares the fluctuations of attention before they are standardised, which the paper does not say; here they are not
squared (https://github.com/CASIA-IVA-Lab/FLAP/blob/main/lib/prune.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...model.linear import weight_of
from ...score.criteria import Removal, Scores
from ...select.constraints import worst_first
from ...units.units import PrunableModule, Selection, Units
from .averages import Averages
from .names import FLAP


def fluctuations(
    model: PreTrainedModel, modules: Sequence[PrunableModule], averages: Mapping[str, Averages]
) -> dict[str, Tensor]:
    """Return the fluctuation of every unit, (units,) float64 on CPU by module, standardised within the module."""
    found = {}
    for module in modules:
        variance = averages[module.name].variance
        norms = weight_of(model.get_submodule(module.consumer)).detach().to(variance).square().sum(0)
        metric = variance * norms  # (inputs,)
        spread = metric.std().item() or 1.0
        standard = (metric - metric.mean()) / spread
        found[module.name] = standard.view(module.units, module.unit_width).mean(1).cpu()
    return found


def score_flap(metrics: Mapping[str, Tensor], modules: Sequence[Units], *, unit: str = "group") -> Scores:
    """Return scores with one chain of removals: the bundles of all modules, those with the least fluctuation first.

    The effect of a removal is its place in the chain, because the metric has no unit once it is standardised.
    """
    order = worst_first(metrics, modules, unit)
    chain = tuple(Removal(name, units, float(rank)) for rank, (name, units) in enumerate(order, start=1))
    return Scores(FLAP, {}, {module.name: metrics[module.name] for module in modules}, chains=(chain,))


def add_means(
    slim: PreTrainedModel,
    dense: PreTrainedModel,
    selection: Selection,
    modules: Sequence[PrunableModule],
    averages: Mapping[str, Averages],
) -> None:
    """Add to the bias of every consumer in `slim`, in place, its output for the removed inputs at their means.

    A consumer without a bias gets one. Modules that lose all units keep theirs.
    """
    for module in modules:
        kept, layer = selection[module.name], slim.get_submodule(module.consumer)
        if not kept.removed or not kept.units:
            continue
        mean = averages[module.name].mean.clone()
        mean[module.columns(kept.units).to(mean.device)] = 0
        output = weight_of(dense.get_submodule(module.consumer)).detach().to(mean) @ mean  # (outputs,)
        if isinstance(layer.bias, Tensor):
            output = output + layer.bias.detach()
        with torch.no_grad():
            layer.bias = nn.Parameter(output.to(weight_of(layer)), requires_grad=False)
