"""Score neurons by the peaks of their weights, as Martra does (2025, https://arxiv.org/abs/2512.22671).

A neuron's score is max(w) + |min(w)| of its row in each producer, added up: of a gated block, in gate and up. No data
are read. Every feed-forward block loses the same share of its neurons, heads stay, and nothing makes up for them. The
author's library calls this score MAW or PPM (https://github.com/peremartra/optipfair).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ...calibrate.weight_gradients import sum_by_unit
from ...model.linear import weight_of
from ...score.criteria import Scores
from ...units.units import PrunableModule
from .names import MARTRA


def score_martra(model: PreTrainedModel, modules: Sequence[PrunableModule]) -> Scores:
    """Return the scores of feed-forward blocks, (units,) float64 on CPU by module."""
    found = {}
    for module in modules:

        def peaks(name: str, consumer: str = module.consumer) -> Tensor:
            weight = weight_of(model.get_submodule(name)).detach().double()
            if name == consumer:
                return weight.new_zeros(1, weight.shape[1])
            return (weight.amax(1) + weight.amin(1).abs())[:, None]

        found[module.name] = sum_by_unit(module, peaks)
    return Scores(MARTRA, {}, found)
