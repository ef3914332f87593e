"""Score units as Wanda-sp does, by the size of their weights times that of their inputs.

Wanda scores a weight by |W_ij| times the norm of its input channel j over tokens (Sun et al. 2023,
https://arxiv.org/abs/2306.11695). The authors of FLAP take the mean over the outputs i, and call it Wanda-sp (An et al.
2023, https://arxiv.org/abs/2312.11983). A head's score is the sum over its channels, and a neuron has one channel.
Every module loses the same share of its units, and nothing makes up for them.

Here the inputs are those of the dense model. The original prunes layer by layer, and reads what the layers cut so far
leave (https://github.com/CASIA-IVA-Lab/FLAP/blob/main/lib/prune.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from ...model.linear import weight_of
from ...score.criteria import Scores
from ...units.units import PrunableModule
from .averages import Averages
from .names import WANDA


def score_wanda(model: PreTrainedModel, modules: Sequence[PrunableModule], averages: Mapping[str, Averages]) -> Scores:
    """Return the scores of Wanda-sp, (units,) float64 on CPU by module."""
    found = {}
    for module in modules:
        size = averages[module.name].square.sqrt()  # (inputs,)
        weights = weight_of(model.get_submodule(module.consumer)).detach().to(size).abs().mean(0)
        found[module.name] = (weights * size).view(module.units, module.unit_width).sum(1).cpu()
    return Scores(WANDA, {}, found)
