"""Score units as FLAP, Wanda-sp and Martra do.

FLAP (An et al. 2023, https://arxiv.org/abs/2312.11983) goes by how much inputs fluctuate. The fluctuation of input
channel j of a consumer is the sample variance of the channel over tokens, times |W_:j|^2: the error of the consumer's
output if the channel is replaced by its mean. Fluctuations are standardised within each consumer. A head's score is the
mean over its channels, and a neuron has one channel. All heads and neurons of the model are then ranked together, and
the lowest go until the budget is met. Removed channels are replaced by their mean: the output that they had then goes
into the consumer's bias, b' = b + W_M mu_M. This is the compensation `bias`, and FLAP is much worse without it. A
consumer without a bias gets one, as in the original. No config of such a model describes that, so it is judged and not
saved. Tokens are those of the compensation rows, without padding; the original takes text of one length. The original's
code also squares the fluctuations of attention before they are standardised, which the paper does not say; here they
are not squared (https://github.com/CASIA-IVA-Lab/FLAP/blob/main/lib/prune.py).

Wanda scores a weight by |W_ij| times the norm of its input channel j over tokens (Sun et al. 2023,
https://arxiv.org/abs/2306.11695). The authors of FLAP take the mean over the outputs i, and call it Wanda-sp. A head's
score is the sum over its channels. Every module loses the same share of its units, and nothing makes up for them. Here
the inputs are those of the dense model; the original reads what the layers cut so far leave.

Martra (2025, https://arxiv.org/abs/2512.22671) scores a neuron by max(w) + |min(w)| of its row in each producer, added
up: of a gated block, in gate and up. No data are read. Every feed-forward block loses the same share of its neurons,
heads stay, and nothing makes up for them. The author's library calls this score MAW or PPM
(https://github.com/peremartra/optipfair).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export.calibrate.readings import Read, read_forward
from hies_export.calibrate.statistics import sum_by_unit
from hies_export.data.batches import Batch
from hies_export.model.linear import weight_of
from hies_export.score.criteria import Removal, Scores
from hies_export.select.constraints import worst_first
from hies_export.units.units import PrunableModule, Selection, Units

from .names import FLAP, MARTRA, WANDA


@dataclass(frozen=True)
class Averages:
    """Mean of x and of x^2 for every input channel x of a consumer, (inputs,) float64, over a number of tokens."""

    mean: Tensor
    square: Tensor
    tokens: int

    @property
    def variance(self) -> Tensor:
        """Sample variance of every channel over tokens, (inputs,)."""
        return (self.square - self.mean.square()).clamp(min=0) * self.tokens / max(1, self.tokens - 1)


def input_averages(
    model: PreTrainedModel, batches: Sequence[Batch], modules: Sequence[PrunableModule]
) -> dict[str, Averages]:
    """Return the averages of what the consumer of every module reads, by module name; padding is left out.

    The moments of a refit have them too, but also a product for every pair of channels, which takes far longer.
    """
    sums: dict[str, tuple[Tensor, Tensor, int]] = {}

    def add(_: Sequence[PrunableModule], read: Read) -> None:
        for number in range(len(batches)):
            for one in read(number):
                x = one.inputs[one.real].double()  # (tokens, inputs)
                total, squares, tokens = sums.get(one.name, (0, 0, 0))
                sums[one.name] = total + x.sum(0), squares + x.square().sum(0), tokens + len(x)

    read_forward(model, batches, modules, add)
    return {name: Averages(total / n, squares / n, n) for name, (total, squares, n) in sums.items()}


def fluctuations(
    model: PreTrainedModel, modules: Sequence[PrunableModule], averages: Mapping[str, Averages]
) -> dict[str, Tensor]:
    """Return the fluctuation of every unit, (units,) float64 on CPU by module, standardised within the module."""
    found = {}
    for module in modules:
        variance = averages[module.name].variance
        norms = weight_of(model.get_submodule(module.consumer)).detach().to(variance).square().sum(0)
        metric = variance * norms  # (inputs,)
        standard = (metric - metric.mean()) / (metric.std().item() or 1.0)
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


def score_wanda(model: PreTrainedModel, modules: Sequence[PrunableModule], averages: Mapping[str, Averages]) -> Scores:
    """Return the scores of Wanda-sp, (units,) float64 on CPU by module."""
    found = {}
    for module in modules:
        size = averages[module.name].square.sqrt()  # (inputs,)
        weights = weight_of(model.get_submodule(module.consumer)).detach().to(size).abs().mean(0)
        found[module.name] = (weights * size).view(module.units, module.unit_width).sum(1).cpu()
    return Scores(WANDA, {}, found)


def score_martra(model: PreTrainedModel, modules: Sequence[PrunableModule]) -> Scores:
    """Return the scores of feed-forward blocks, (units,) float64 on CPU by module."""

    def peaks(module: PrunableModule, name: str) -> Tensor:
        weight = weight_of(model.get_submodule(name)).detach().double()
        if name == module.consumer:
            return weight.new_zeros(1, weight.shape[1])
        return (weight.amax(1) + weight.amin(1).abs())[:, None]

    return Scores(MARTRA, {}, {module.name: sum_by_unit(module, partial(peaks, module)) for module in modules})
