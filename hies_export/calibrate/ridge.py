"""Fit a linear layer from moments of its inputs and targets: ridge regression without activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# From this number of inputs on, sums and fits use a faster algorithm, which rounds differently.
WIDE = 512


@dataclass
class Moments:
    """Weighted sums over tokens of inputs x (tokens, inputs) and targets y (tokens, outputs), float64."""

    tokens: float  # sum of the weights; the number of tokens if all weigh one
    x: Tensor  # (inputs,) sum of x
    y: Tensor  # (outputs,) sum of y
    xx: Tensor  # (inputs, inputs) sum of x x^T
    yx: Tensor  # (outputs, inputs) sum of y x^T
    yy: Tensor  # sum of |y|^2
    counted: int  # number of tokens

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Moments:
        """Return the moments of x (tokens, inputs) and y (tokens, outputs)."""
        x, y = x.double(), y.double()
        return cls(float(len(x)), x.sum(0), y.sum(0), x.T @ x, y.T @ x, y.pow(2).sum(), len(x))

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def fits(self, weight: Tensor, *, ridges: Sequence[float], centred: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield, for each ridge, the regression of y on x that shrinks towards `weight`, (outputs, inputs), not zero.

        Ridges are relative to the mean of the diagonal of the moments of x. If `centred`, a bias (outputs,) is fitted
        as well, from centred moments; else it is None.
        """
        mean_x, xx, yx = self.x / self.tokens, self.xx / self.tokens, self.yx / self.tokens
        if centred:
            xx = xx - torch.outer(mean_x, mean_x)
            yx = yx - torch.outer(self.y / self.tokens, mean_x)
        left = (yx - weight @ xx).T  # the part that the weight does not explain
        scale = xx.diagonal().mean()
        for ridge in ridges:
            damped = xx + ridge * scale * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
            if len(xx) < WIDE:
                change = torch.linalg.solve(damped, left)
            else:
                change = torch.cholesky_solve(left, torch.linalg.cholesky(damped))
            fitted = weight + change.T
            yield fitted, self.fit_bias(fitted) if centred else None

    def fit_bias(self, weight: Tensor) -> Tensor:
        """Return the least-squares bias (outputs,) for a weight (outputs, inputs)."""
        return (self.y - weight @ self.x) / self.tokens

    def error(self, weight: Tensor, bias: Tensor | None) -> float:
        """Return the weighted mean over tokens of |weight x + bias - y|^2."""
        total = ((weight @ self.xx) * weight).sum() - 2 * (weight * self.yx).sum() + self.yy
        if bias is not None:
            total = total + 2 * bias @ (weight @ self.x - self.y) + self.tokens * bias @ bias
        return total.clamp(min=0).item() / self.tokens


@dataclass(frozen=True)
class Spread:
    """Mean (inputs,) and second moments (inputs, inputs) of the inputs of a consumer, float64.

    The moments are the mean of x x^T over tokens; if centred, of the differences to the mean.
    """

    mean: Tensor
    moments: Tensor

    @classmethod
    def of(cls, x: Tensor, *, centred: bool) -> Spread:
        """Return the spread of x (tokens, inputs)."""
        x = x.double()
        mean = x.mean(0)
        distance = x - mean if centred else x
        return cls(mean, distance.T @ distance / len(x))


@dataclass(frozen=True)
class SplitMoments:
    """Moments of one consumer: over the samples that a fit uses, and over every fifth sample, on which it is judged."""

    fitting: Moments
    held_out: Moments
