"""Multiply the output of every unit by a gate of one, whose gradient is the one that HIS averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import NonFiniteError, UnsupportedModelError
from ..kinds import UNIT_NAMES
from ..units.units import PrunableModule


class Gates:
    """Gates of one batch, created when a consumer is first called: module -> (batch, units, 1, 1)."""

    def __init__(self, modules: Sequence[PrunableModule]):
        self._modules = {module.name: module for module in modules}
        self.tensors: dict[str, Tensor] = {}

    def apply(self, name: str, x: Tensor, *, samples: int, rows: int | None = None, even: bool = False) -> Tensor:
        """Return the input of a consumer, (..., units * unit_width), times the gates of its module.

        `rows` is the number of samples in x if it is known. By default it is the length of x, or `samples` if x is
        flat: some models flatten (samples, tokens) in front of their feed-forward blocks. If the samples are `even`, of
        one shape, a module that sees each of them in several windows sees as many of every one.
        """
        if rows is None:
            rows = samples if x.dim() == 2 else len(x)
        if even and rows % samples == 0:
            rows = samples
        module = self._modules[name]
        gate = self.tensors.get(name)
        if gate is None:
            # Autograd sums a gate's gradient in the gate's dtype; half precision would round it.
            dtype = torch.promote_types(x.dtype, torch.float32)
            gate = torch.ones(rows, module.units, 1, 1, dtype=dtype, device=x.device).requires_grad_()
            self.tensors[name] = gate
        units = x.reshape(rows, -1, module.units, module.unit_width).transpose(1, 2)  # (batch, units, tokens, width)
        return (units * gate).to(x.dtype).transpose(1, 2).reshape(x.shape)

    def per_sample(self, gradients: Mapping[str, Tensor | None], losses: Tensor, index: int) -> dict[str, Tensor]:
        """Return module -> gradients of each sample's own loss to its gates, (batch, units) float64 on CPU.

        `gradients` are those of the sum over all losses of the batch, None if nothing reads the module. `losses` is
        the number of these losses that belong to each sample, (batch,).
        """
        found = {}
        for name, gate in self.tensors.items():
            if len(gate) != len(losses):
                raise UnsupportedModelError(
                    f"every sample must be one row of an attention module, but {name} sees {len(gate)} rows for "
                    f"{len(losses)} samples; give every sample one image of one tile, or score the other tower only"
                )
            gradient = gradients[name]
            gradient = torch.zeros_like(gate) if gradient is None else gradient
            if not torch.isfinite(gradient).all():
                units = UNIT_NAMES[self._modules[name].kind] + "s"
                raise NonFiniteError(
                    f"every gradient must be finite, but batch {index} gave NaN or infinity at the {units} of {name}; "
                    "check the rows of that batch and the model's dtype"
                )
            found[name] = gradient[:, :, 0, 0].double().cpu() / losses.clamp(min=1).cpu()[:, None]
        return found
