"""Sum up the inputs of consumers by unit: norms of activations and outputs, and the error of removing a unit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.linear import weight_of
from ..model.tokens import real_tokens
from ..units.units import PrunableModule
from .readings import by_sample

# Damping of the inverse of the moments, relative to the mean of their diagonal.
RIDGE = 1e-2

STATISTICS = ("activation_l2", "output_norm", "obs")

# What a batch adds to the sums of a module: how many "tokens", the sums over them by statistic, (units,) float64, and
# for "obs" the inputs themselves, (tokens, inputs).
Added: TypeAlias = Mapping[str, Tensor]


class InputSums:
    """Sums over real tokens of the inputs x_u that every consumer W reads from its units u.

    activation_l2   E |x_u|
    output_norm     E |W_u x_u|
    obs             tr(W_u ((M + lambda I)^-1_uu)^-1 W_u^T) with M = E x x^T: the error that remains after unit u is
                    removed and the others are refitted (optimal brain surgeon, Hassibi and Stork 1992, by blocks)
    """

    def __init__(self, model: PreTrainedModel, modules: Sequence[PrunableModule], needs: Collection[str] = STATISTICS):
        self._model, self._modules, self._needs = model, modules, frozenset(needs)
        self._sums = {module.name: self._zeros(module) for module in modules}
        self._grams = {module.name: self._gram(module) for module in modules if "output_norm" in needs}

    def _zeros(self, module: PrunableModule) -> dict[str, Tensor]:
        found = {what: torch.zeros(module.units, dtype=torch.float64) for what in STATISTICS if what in self._needs}
        found["tokens"] = torch.zeros((), dtype=torch.float64)
        if "obs" in found:
            weight = weight_of(self._model.get_submodule(module.consumer))
            found["obs"] = torch.zeros((weight.shape[1],) * 2, dtype=torch.float64, device=weight.device)
        return found

    def of(self, batch: Mapping[str, Tensor], inputs: Mapping[str, Sequence[Tensor]]) -> Iterator[tuple[str, Added]]:
        """Yield a module's name and what one call of its consumer adds to its sums, for `add`; one pair per call.

        `inputs` maps a module's name to what its consumer read in each call, (batch, tokens, units * unit_width) or
        (batch * tokens, units * unit_width). Padding is left out.
        """
        for module in self._modules:
            for called_with in inputs.get(module.name, ()):  # a batch of texts alone does not reach the image tower
                x = by_sample(self._model, module.name, batch, called_with)
                real = x[real_tokens(self._model, module.name, batch, x)]  # (tokens, inputs)
                units = real.double().unflatten(1, (module.units, -1))  # (tokens, units, unit_width)
                found = {"tokens": torch.tensor(len(real), dtype=torch.float64)}
                if "activation_l2" in self._needs:
                    found["activation_l2"] = units.norm(dim=-1).sum(0).cpu()
                if "output_norm" in self._needs:
                    squares = torch.einsum("thd,hde,the->th", units, self._grams[module.name], units)
                    found["output_norm"] = squares.clamp(min=0).sqrt().sum(0).cpu()
                if "obs" in self._needs:
                    found["obs"] = real
                yield module.name, found

    def add(self, name: str, added: Added) -> None:
        """Add what `of` yielded for a module to its sums, in place."""
        for what, value in added.items():
            total = self._sums[name][what]
            if what == "obs":
                value = value.double()
                value = value.T @ value
            total += value.to(total.device)

    def tensors(self) -> list[Tensor]:
        """Return the sums that batches are added to in place, of all modules and statistics."""
        return [total for sums in self._sums.values() for total in sums.values()]

    def _gram(self, module: PrunableModule) -> Tensor:
        """Return W_u^T W_u of every unit, (units, unit_width, unit_width): |W_u x|^2 = x^T W_u^T W_u x."""
        weight = weight_of(self._model.get_submodule(module.consumer)).detach().double()
        by_unit = weight.unflatten(1, (module.units, -1))  # (outputs, units, unit_width)
        return torch.einsum("ohd,ohe->hde", by_unit, by_unit)

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return statistic -> module -> (units,) float64 on CPU."""

        def mean(module: PrunableModule, what: str) -> Tensor:
            sums = self._sums[module.name]
            return sums[what] / sums["tokens"].item()

        found: dict[str, dict[str, Tensor]] = {
            name: {module.name: mean(module, name) for module in self._modules}
            for name in ("activation_l2", "output_norm")
            if name in self._needs
        }
        if "obs" in self._needs:
            found["obs"] = {module.name: self._obs(module, mean(module, "obs")) for module in self._modules}
        return found

    def _obs(self, module: PrunableModule, moments: Tensor) -> Tensor:
        """Return the OBS score of every unit, (units,), from the mean of x x^T, (inputs, inputs)."""
        weight = weight_of(self._model.get_submodule(module.consumer)).detach().double().to(moments.device)
        damping = RIDGE * (moments.diagonal().mean().item() or 1.0)
        identity = torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        inverse = torch.linalg.inv(moments + damping * identity)
        scores = []
        for unit in range(module.units):
            block = slice(unit * module.unit_width, (unit + 1) * module.unit_width)
            solved = torch.linalg.solve(inverse[block, block], weight[:, block].T)  # (unit_width, outputs)
            scores.append((weight[:, block].T * solved).sum())
        return torch.stack(scores).cpu()
