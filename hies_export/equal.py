"""Decide whether two computations of the same tensor agree up to rounding.

Another kernel, batch, thread or memory layout takes sums in another order, and each step rounds in proportion to its
numbers. So no fixed difference suits all models: logits of a LLaMA of 30 layers reach 40 and move by 1e-4 where nothing
is wrong. Every comparison of the package is relative to the largest absolute value of the expected tensor, or to one if
that is smaller, so that outputs near zero are not held to digits that nobody reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Largest allowed differences, as shares of the largest expected number.
# The same operations on the same weights, up to the order of sums: a cut model and the masked one, a reloaded model.
SAME_CODE = 1e-4
# Two runs of few operations, such as a block of a model without its weights.
FEW_STEPS = 1e-5
# Below this share, float32 tells equal from wrong. Above it, either is possible in a deep model, and float64 decides.
SURE_IN_FLOAT32 = 1e-6
# In float64. Some layers, such as norms, round to float32 whatever they are given.
IN_FLOAT64 = 1e-7
# Another program on the same weights (ONNX Runtime, llama.cpp), by the dtype of its products. llama.cpp rounds
# activations too: in float16 and bfloat16 to the same type, in q8_0 and q4_0 to q8_0.
OTHER_PROGRAM = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 0.1, "q8_0": 0.2, "q4_0": 0.2}
# A graph in 8 or 4 bits and the float32 graph, as root mean squares. Rounding errors are at most 0.05 on the models
# tried; an overflowing kernel or a wrong scale gives 1 and more.
FEWER_BITS = 0.3


@dataclass(frozen=True)
class Difference:
    """How far a computation is from what was expected of it."""

    max_abs: float  # largest absolute difference of an element; infinite if shapes differ, or if either has a NaN
    largest: float  # largest absolute value of what was expected

    @classmethod
    def of(cls, actual: Tensor, expected: Tensor) -> Difference:
        """Compare two tensors of any floating dtype on one device, element by element."""
        import torch

        if actual.shape != expected.shape:
            return cls(float("inf"), 0.0)
        if not expected.numel():
            return cls(0.0, 0.0)
        dtype = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
        actual, expected = actual.to(dtype), expected.to(dtype)
        max_abs = (actual - expected).abs().max().item()
        return cls(float("inf") if math.isnan(max_abs) else max_abs, expected.abs().max().item())

    @property
    def scale(self) -> float:
        """The divisor of `share`: the largest absolute value of what was expected, but at least one."""
        return max(1.0, self.largest)

    @property
    def share(self) -> float:
        """The largest difference as a share of the scale."""
        return self.max_abs / self.scale

    def within(self, share: float) -> bool:
        """Return whether the largest difference is at most a share of the scale."""
        return self.max_abs <= share * self.scale

    def __str__(self) -> str:
        """Return both numbers for a message, such as "0.02, where the largest number is 3.1"."""
        return f"{self.max_abs:.3g}, where the largest number is {self.largest:.3g}"
