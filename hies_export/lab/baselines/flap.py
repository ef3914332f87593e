"""Score units as FLAP does, by how much their inputs fluctuate (An et al. 2023, https://arxiv.org/abs/2312.11983).

The fluctuation of input channel j of a consumer is the sample variance of the channel over tokens, times |W_:j|^2: the
error of the consumer's output if the channel is replaced by its mean. Fluctuations are standardised within each
consumer. A head's score is the mean over its channels, and a neuron has one channel. All heads and neurons of the model
are then ranked together, and the lowest go until the budget is met.

FLAP replaces removed channels by their mean, which is the compensation `bias` of `slim.refit`. That needs a bias in
every consumer. (The original adds missing biases; here, models without them are compared under another compensation.)
Tokens are those of the compensation rows, without padding; the original takes text of one length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ...calibrate.sums import LayerMoments
from ...model.linear import weight_of
from ...select.bundles import worst_first
from ...units import PrunableModule, Units
from ...values import Removal, Scores
from .names import FLAP


def fluctuations(model: PreTrainedModel, moments: Iterable[tuple[PrunableModule, LayerMoments]]) -> dict[str, Tensor]:
    """Return the fluctuation of every unit, (units,) float64 on CPU by module, standardised within the module."""
    found = {}
    for module, layer in moments:
        variance = layer.spread(centred=True).moments.diagonal().clamp(min=0)
        variance = variance * layer.counted / max(1, layer.counted - 1)
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
