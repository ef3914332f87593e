"""Add up, in the process that owns a module, what all batches give for its units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..processes import Piece
from ..units import PrunableModule
from .inputs import InputSums
from .weights import WeightGradients, weight_l2


class Totals:
    """Sums over samples of every statistic, for the modules that this process owns.

    Args:
        own: These modules.
        inputs, weights: Sums of the optional statistics, if they are wanted.
    """

    def __init__(
        self, own: Sequence[PrunableModule], *, inputs: InputSums | None = None, weights: WeightGradients | None = None
    ):
        self._own, self._inputs, self._weights = own, inputs, weights
        self._his = {module.name: torch.zeros(module.units, dtype=torch.float64) for module in own}
        self._fisher = {name: torch.zeros_like(total) for name, total in self._his.items()}
        attention = [module for module in own if module.kind == "attention"]
        self._entropy = {module.name: torch.zeros(module.units, dtype=torch.float64) for module in attention}
        self._samples_with_rows = dict.fromkeys(self._entropy, 0)

    def add(self, piece: Piece) -> None:
        """Add a piece, whose key is what it adds to and the name of a module or a layer."""
        what, name = piece.key
        tensors = piece.tensors
        if what == "gates":
            self._his[name] += tensors["his"].cpu()
            self._fisher[name] += tensors["fisher"].cpu()
        elif what == "entropy":
            self._entropy[name] += tensors["entropy"].cpu()
            self._samples_with_rows[name] += int(tensors["samples"])
        elif what == "inputs":
            assert self._inputs is not None
            self._inputs.add(name, tensors)
        else:
            assert self._weights is not None
            self._weights.add(name, tensors["gradient"], tensors["factor"].item())

    def values(self, model: PreTrainedModel, samples: int) -> dict[str, dict[str, Tensor]]:
        """Return statistic -> module -> values of its units, float64 on CPU.

        Args:
            model: The model.
            samples: Number of samples that were added.
        """
        counted = self._samples_with_rows
        return {
            "his": {name: total / samples for name, total in self._his.items()},
            "fisher": {name: total / samples for name, total in self._fisher.items()},
            "entropy": {name: total / max(counted[name], 1) for name, total in self._entropy.items()},
            "weight_l2": {module.name: weight_l2(model, module) for module in self._own},
            **({} if self._inputs is None else self._inputs.values(self._own)),
            **({} if self._weights is None else self._weights.values()),
        }
