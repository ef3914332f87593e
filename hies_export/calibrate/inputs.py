"""Sum up what consumers read from their units: norms of activations and outputs, and the error of removing a unit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.targets import size_of
from ..model.linear import weight_of
from ..model.tokens import real_tokens
from ..units import PrunableModule
from .readings import by_sample

# Damping of the inverse of the moments, relative to the mean of their diagonal.
RIDGE = 1e-2

STATISTICS = ("activation_l2", "output_norm", "obs")


class InputSums:
    """Sums over real tokens of the inputs x_u that every consumer W reads from its units u.

    activation_l2   E |x_u|
    output_norm     E |W_u x_u|
    obs             tr(W_u ((M + lambda I)^-1_uu)^-1 W_u^T) with M = E x x^T: the error that remains after unit u is
                    removed and the others are refitted (optimal brain surgeon, Hassibi and Stork 1992, by blocks)
    """

    def __init__(self, model: PreTrainedModel, modules: Sequence[PrunableModule], needs: Collection[str] = STATISTICS):
        self._model, self._modules, self._needs = model, modules, frozenset(needs)
        self._activation = {m.name: torch.zeros(m.units, dtype=torch.float64) for m in modules}
        self._written = {m.name: torch.zeros(m.units, dtype=torch.float64) for m in modules}
        self._moments: dict[str, Tensor] = {}
        self._tokens = dict.fromkeys(self._activation, 0)

    def add(self, batch: Mapping[str, Tensor], inputs: Mapping[str, Sequence[Tensor]]) -> None:
        """Add a batch.

        Args:
            batch: Inputs of the model, on its device.
            inputs: Module -> input of its consumer at each call, (batch, tokens, units * unit_width) or
                (batch * tokens, units * unit_width).
        """
        for module in self._modules:
            name = module.name
            for called_with in inputs[name]:
                x = by_sample(called_with, size_of(batch))
                real = x[real_tokens(self._model, name, batch, x)].double()  # (tokens, inputs)
                units = real.unflatten(1, (module.units, -1))  # (tokens, units, unit_width)
                self._tokens[name] += len(real)
                if "activation_l2" in self._needs:
                    self._activation[name] += units.norm(dim=-1).sum(0).cpu()
                if "output_norm" in self._needs:
                    squares = torch.einsum("thd,hde,the->th", units, self._gram(module), units)
                    self._written[name] += squares.clamp(min=0).sqrt().sum(0).cpu()
                if "obs" in self._needs:
                    self._moments[name] = self._moments.get(name, 0) + real.T @ real

    def _gram(self, module: PrunableModule) -> Tensor:
        """Return W_u^T W_u of every unit, (units, unit_width, unit_width): |W_u x|^2 = x^T W_u^T W_u x."""
        weight = weight_of(self._model.get_submodule(module.consumer)).detach().double()
        by_unit = weight.unflatten(1, (module.units, -1))  # (outputs, units, unit_width)
        return torch.einsum("ohd,ohe->hde", by_unit, by_unit)

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return statistic -> module -> (units,) float64 on CPU."""
        tokens = self._tokens
        found = {
            "activation_l2": lambda m: self._activation[m.name] / tokens[m.name],
            "output_norm": lambda m: self._written[m.name] / tokens[m.name],
            "obs": lambda m: self._obs(m, self._moments[m.name] / tokens[m.name]),
        }
        return {
            name: {module.name: value(module) for module in self._modules}
            for name, value in found.items()
            if name in self._needs
        }

    def _obs(self, module: PrunableModule, moments: Tensor) -> Tensor:
        """Return the OBS score of every unit, (units,), from the mean of x x^T, (inputs, inputs)."""
        weight = weight_of(self._model.get_submodule(module.consumer)).detach().double()
        damping = RIDGE * (moments.diagonal().mean().item() or 1.0)
        identity = torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        inverse = torch.linalg.inv(moments + damping * identity)
        scores = []
        for unit in range(module.units):
            block = slice(unit * module.unit_width, (unit + 1) * module.unit_width)
            solved = torch.linalg.solve(inverse[block, block], weight[:, block].T)  # (unit_width, outputs)
            scores.append((weight[:, block].T * solved).sum())
        return torch.stack(scores).cpu()
