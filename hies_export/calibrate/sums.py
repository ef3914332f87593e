"""Add up products of tokens, from which the moments of a consumer follow for any weight of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from .. import processes
from ..errors import RequestError
from ..model.linear import features_of, weight_of
from . import ridge
from .ridge import Moments, SplitMoments, Spread

# Rows of the products of a wide layer that are computed at once.
BLOCK = 256


class Sums:
    """Sums over the weighted tokens of one part of the samples, added up in place; named as in `Moments`."""

    def __init__(self, inputs: int, device: torch.device):
        self.tokens, self.counted = 0.0, 0
        self.x, self.xx = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in (inputs, (inputs,) * 2))
        self._dtype = torch.float64 if inputs < ridge.WIDE else torch.float32

    def add(self, x: Tensor, y: Tensor, weights: Tensor | None) -> None:
        """Add tokens x (tokens, inputs) and y (tokens, outputs), each times its weight, (tokens,); None for ones."""
        x, y = x.to(self._dtype), y.to(self._dtype)
        self.counted += len(x)
        if weights is None:
            self.tokens += len(x)
            self._add(x, y, x, y)
        else:
            self.tokens += weights.sum(dtype=torch.float64).item()
            weights = weights.to(self._dtype)[:, None]
            root = weights.sqrt()
            self._add(x * weights, y * weights, x * root, y * root)

    def _add(self, x: Tensor, y: Tensor, root_x: Tensor, root_y: Tensor) -> None:
        """Add tokens times their weights to the plain sums, and tokens times the roots of their weights to products."""
        self.x += x.sum(0, dtype=torch.float64)
        _add_products(self.xx, root_x)

    def finish(self, owner: int | None = None) -> None:
        """Complete the sums after the last token: over all processes, in one that owns them or in all."""
        counts = torch.tensor([self.tokens, self.counted], dtype=torch.float64)
        processes.add_up([counts, *self._tensors()], owner)
        self.tokens, self.counted = counts[0].item(), int(counts[1])
        if len(self.xx) >= ridge.WIDE:
            _mirror(self.xx)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.xx


class TargetSums(Sums):
    """Sums with the targets y; named as in `Moments`."""

    def __init__(self, inputs: int, outputs: int, device: torch.device):
        super().__init__(inputs, device)
        shapes: tuple[tuple[int, ...], ...] = ((outputs,), (outputs, inputs), ())
        self.y, self.yx, self.yy = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes)

    def _add(self, x: Tensor, y: Tensor, root_x: Tensor, root_y: Tensor) -> None:
        super()._add(x, y, root_x, root_y)
        self.y += y.sum(0, dtype=torch.float64)
        self.yx += root_y.T @ root_x
        self.yy += root_y.pow(2).sum(dtype=torch.float64)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.xx, self.y, self.yx, self.yy


class LayerSums(Sums):
    """Sums whose targets are the outputs W x + b of a layer, so that those over targets follow from xx."""

    def __init__(self, layer: nn.Module, device: torch.device):
        super().__init__(features_of(layer)[1], device)
        self._weight, self._bias = weight_of(layer).detach(), layer.bias

    def target(self) -> tuple[Tensor, Tensor]:
        """Return W (outputs, inputs) and b (outputs,), float64."""
        weight = self._weight.double()
        bias = self._bias
        return weight, bias.detach().double() if isinstance(bias, Tensor) else weight.new_zeros(len(weight))

    @cached_property
    def y(self) -> Tensor:
        """(outputs,), as in `Moments`."""
        weight, bias = self.target()
        return weight @ self.x + self.tokens * bias

    @cached_property
    def yy(self) -> Tensor:
        """Sum of |y|^2. It takes outputs x inputs^2 multiplications."""
        weight, bias = self.target()
        return ((weight @ self.xx) * weight).sum() + bias @ (2 * self.y - self.tokens * bias)


@dataclass(frozen=True)
class LayerMoments:
    """Sums of one consumer over fitting and over held-out samples, from which `mixed` takes moments.

    In `uniform` sums all tokens weigh one. In `weighted` ones, if they were collected, a token weighs the squared norm
    of the gradient of the sample's prediction with respect to the consumer's input there.
    """

    uniform: tuple[Sums, Sums]
    weighted: tuple[Sums, Sums] | None = None

    def finish(self, owner: int | None = None) -> None:
        """Complete all sums after the last token; see `Sums.finish`."""
        for part in (*self.uniform, *(self.weighted or ())):
            part.finish(owner)

    @property
    def counted(self) -> int:
        """Number of tokens."""
        return sum(part.counted for part in self.uniform)

    def spread(self, *, centred: bool) -> Spread:
        """Return the mean and the second moments of the inputs over all tokens, each weighing one."""
        fitting, held_out = self.uniform
        mean = (fitting.x + held_out.x) / self.counted
        found = (fitting.xx + held_out.xx).div_(self.counted)
        return Spread(mean, found.sub_(torch.outer(mean, mean)) if centred else found)

    def mixed(self, mix: float = 1.0, columns: Tensor | None = None) -> SplitMoments:
        """Return the moments in which a token weighs mix + (1 - mix) q / mean(q), which is one on average.

        Here q is the squared norm of the gradient. If nothing reads the consumer, q is zero and all weigh one. Orders
        of removal need only the inputs: `spread` leaves out the sums over targets, which take longer. With `columns`,
        (columns,) int64, the moments are of these inputs only.
        """
        check_mix(mix, weighted=self.weighted is not None)
        if self.weighted is None or mix == 1:
            return SplitMoments(*(_moments([(1.0, part)], columns) for part in self.uniform))
        mean = sum(part.tokens for part in self.weighted) / self.counted
        if mean == 0:
            return self.mixed(columns=columns)
        shares = (mix, (1 - mix) / mean)
        parts = zip(self.uniform, self.weighted, strict=True)
        return SplitMoments(*(_moments(list(zip(shares, part, strict=True)), columns) for part in parts))


def check_mix(mix: float, *, weighted: bool) -> None:
    """Refuse a mix of token weights outside (0, 1], or below 1 without weighted sums."""
    if not 0 < mix <= 1:
        raise RequestError(f"token weights must be in (0, 1], got {mix}")
    if mix < 1 and not weighted:
        raise RequestError(f"token weights of {mix:g} need moments of weighted tokens; collect them with weighted=True")


def _moments(parts: Sequence[tuple[float, Sums]], columns: Tensor | None) -> Moments:
    """Return the moments of one or two sums, each times its factor, for some of the inputs."""
    sums = parts[0][1]
    columns = None if columns is None else columns.to(sums.xx.device)

    def total(name: str, columns: Tensor | None = None) -> Tensor:
        values = [getattr(part, name) for _, part in parts]
        if columns is not None:
            values = [value[..., columns] for value in values]
        if len(parts) == 1:
            return values[0]
        (one, _), (other, _) = parts
        return (values[0] * one).add_(values[1], alpha=other)

    rows, x = total("xx", columns), total("x", columns)  # (inputs, columns), (columns,)
    if isinstance(sums, LayerSums):
        weight, bias = sums.target()
        yx = weight @ rows + torch.outer(bias, x)
    else:
        yx = total("yx", columns)
    return Moments(
        tokens=sum(factor * part.tokens for factor, part in parts),
        x=x,
        y=total("y"),
        xx=rows if columns is None else rows[columns],
        yx=yx,
        yy=total("yy"),
        counted=sums.counted,
    )


def _add_products(total: Tensor, x: Tensor) -> None:
    """Add x^T x, with x (tokens, inputs), to a total (inputs, inputs); for wide ones only from the diagonal on."""
    # For a wide layer these products are the main cost of a pass, so they are float32 for each batch, and their sum is
    # float64. On MiniLM's neurons no entry (i, j) is off by more than 1e-6 of the root of (i, i) times (j, j), and the
    # held-out error of a fit changes by 1e-6 of itself.
    if len(total) < ridge.WIDE:
        total += x.T @ x
        return
    for start in range(0, len(total), BLOCK):
        total[start : start + BLOCK, start:] += x[:, start : start + BLOCK].T @ x[:, start:]


def _mirror(total: Tensor) -> None:
    """Copy the part above the diagonal blocks to below them."""
    for start in range(0, len(total), BLOCK):
        end = start + BLOCK
        total[end:, start:end] = total[start:end, end:].T
