"""Multiply the output of every unit by a gate of one, whose gradient is the one that HIS averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import NonFiniteError, UnsupportedModelError
from ..units import PrunableModule


class Gates:
    """Gates of one batch, created when a consumer is first called.

    Attributes:
        tensors: Module -> its gates, (batch, units, 1, 1).
    """

    def __init__(self, modules: Sequence[PrunableModule]):
        self._modules = {module.name: module for module in modules}
        self.tensors: dict[str, Tensor] = {}

    def apply(self, name: str, x: Tensor, *, rows: int) -> Tensor:
        """Return the input of a consumer times the gates of its module.

        Args:
            name: Name of the module.
            x: (..., units * unit_width), samples along the first axis.
            rows: Number of samples in x.
        """
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
        """Return the gradients of each sample's own loss with respect to its gates.

        Args:
            gradients: Module -> gradient of the sum over all losses of the batch; None if nothing reads the module.
            losses: (batch,) number of these losses that belong to each sample.
            index: Number of the batch, for messages.

        Returns:
            Module -> (batch, units) float64 on CPU.

        Raises:
            UnsupportedModelError: The number of rows that a module sees is not the number of samples.
            NonFiniteError: A gradient is NaN or infinite.
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
                raise NonFiniteError(
                    f"every gradient must be finite, but batch {index} gave NaN or infinity at the heads of {name}; "
                    "check the rows of that batch and the model's dtype"
                )
            found[name] = gradient[:, :, 0, 0].double().cpu() / losses.clamp(min=1).cpu()[:, None]
        return found
