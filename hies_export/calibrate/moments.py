"""Collect the moments of the inputs and outputs of consumers: all that least squares needs, without activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.targets import size_of
from ..errors import DataError
from ..model.modes import evaluating
from ..model.tokens import real_tokens
from ..model.watch import watch
from ..progress import SILENT, Progress
from ..units import PrunableModule, Selection

# Every fifth sample is held out: enough to judge a fit, and most tokens are left to fit it.
HELD_OUT_EVERY = 5


@dataclass
class Moments:
    """Sums over tokens of inputs x (tokens, inputs) and targets y (tokens, outputs), float64.

    Attributes:
        tokens: Number of tokens.
        x: (inputs,) sum of x.
        y: (outputs,) sum of y.
        xx: (inputs, inputs) sum of x x^T.
        yx: (outputs, inputs) sum of y x^T.
        yy: Sum of |y|^2.
    """

    tokens: int
    x: Tensor
    y: Tensor
    xx: Tensor
    yx: Tensor
    yy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Moments:
        """Return the moments of x (tokens, inputs) and y (tokens, outputs)."""
        x, y = x.double(), y.double()
        return cls(len(x), x.sum(0), y.sum(0), x.T @ x, y.T @ x, y.pow(2).sum())

    def part(self, columns: Tensor) -> Moments:
        """Return the moments of the inputs with the given indices, (columns,) int64, and of all targets."""
        return replace(self, x=self.x[columns], xx=self.xx[columns][:, columns], yx=self.yx[:, columns])

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def fit(self, weight: Tensor, *, ridge: float, centred: bool) -> tuple[Tensor, Tensor | None]:
        """Return the ridge regression of y on x, which shrinks towards `weight` instead of zero.

        Args:
            weight: (outputs, inputs)
            ridge: Relative to the mean of the diagonal of the moments of x.
            centred: Whether to fit a bias as well, from centred moments.

        Returns:
            The weight (outputs, inputs), and the bias (outputs,), or None if not `centred`.
        """
        mean_x, xx, yx = self.x / self.tokens, self.xx / self.tokens, self.yx / self.tokens
        if centred:
            xx = xx - torch.outer(mean_x, mean_x)
            yx = yx - torch.outer(self.y / self.tokens, mean_x)
        damped = xx + ridge * xx.diagonal().mean() * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        fitted = weight + torch.linalg.solve(damped, (yx - weight @ xx).T).T
        return fitted, self.fit_bias(fitted) if centred else None

    def fit_bias(self, weight: Tensor) -> Tensor:
        """Return the least-squares bias (outputs,) for a weight (outputs, inputs)."""
        return (self.y - weight @ self.x) / self.tokens

    def error(self, weight: Tensor, bias: Tensor | None) -> float:
        """Return the mean over tokens of |weight x + bias - y|^2."""
        total = ((weight @ self.xx) * weight).sum() - 2 * (weight * self.yx).sum() + self.yy
        if bias is not None:
            total = total + 2 * bias @ (weight @ self.x - self.y) + self.tokens * bias @ bias
        return total.clamp(min=0).item() / self.tokens


@dataclass(frozen=True)
class SplitMoments:
    """Moments of one consumer, split by sample.

    Attributes:
        fitting: Moments of the samples that a fit uses.
        held_out: Moments of every fifth sample, on which the fit is judged.
    """

    fitting: Moments
    held_out: Moments

    def part(self, columns: Tensor) -> SplitMoments:
        """Return the moments of the inputs with the given indices, (columns,) int64, and of all targets."""
        columns = columns.to(self.fitting.xx.device)
        return SplitMoments(self.fitting.part(columns), self.held_out.part(columns))

    def __add__(self, other: SplitMoments) -> SplitMoments:
        return SplitMoments(self.fitting + other.fitting, self.held_out + other.held_out)


def collect_moments(
    dense: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    *,
    selection: Selection | None = None,
    slim: PreTrainedModel | None = None,
    progress: Progress = SILENT,
) -> dict[str, SplitMoments]:
    """Collect the moments of every consumer's inputs and dense outputs, in one pass over the batches.

    Without a selection, the moments cover all inputs. Those of any selection are sub-blocks of them, so one pass serves
    any number of plans. Memory is then 32 bytes for each pair of inputs of each consumer, e.g. 28 MB for 6 layers of
    width 384 and 17 GB for 32 of width 4096.

    Args:
        dense: The dense model.
        modules: The modules whose consumers to watch.
        batches: Inputs of the model; labels are not used, and padding is excluded by the `attention_mask`.
        selection: Cover the inputs of the kept units only.
        slim: Take the inputs from this model, cut by `selection`, and only the outputs from the dense one.
        progress: Shows the loop over the batches.

    Returns:
        Module -> moments of its consumer.

    Raises:
        DataError: Fewer than five samples.
    """
    check_samples(batches)
    consumers = {module.name: module.consumer for module in modules}
    sums: dict[str, SplitMoments] = {}
    seen = 0
    with ExitStack() as stack:
        stack.enter_context(evaluating(dense))
        written = stack.enter_context(watch(dense, consumers, outputs=True))
        read = written
        if slim is not None:
            stack.enter_context(evaluating(slim))
            read = stack.enter_context(watch(slim, consumers))
        stack.enter_context(torch.no_grad())
        for batch in progress.track(batches, "moments"):
            on_device = {k: v.to(dense.device) for k, v in batch.items() if k != "labels"}
            written.clear()
            read.clear()
            dense(**on_device)
            if slim is not None:
                slim(**on_device)
            size = size_of(batch)
            held = (torch.arange(seen, seen + size) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1).to(dense.device)
            seen += size
            for module in modules:
                name = module.name
                inputs = read.inputs[name]
                if selection is not None and slim is None:
                    columns = module.columns(selection[name].units).to(inputs[0].device)
                    inputs = [x[..., columns] for x in inputs]
                for x, y in zip(inputs, written.outputs[name], strict=True):
                    real = real_tokens(dense, name, on_device, y)
                    found = _split(x, y, real, held.to(real.device))
                    sums[name] = sums[name] + found if name in sums else found
    return sums


def _split(x: Tensor, y: Tensor, real: Tensor, held: Tensor) -> SplitMoments:
    """Return the moments of one batch; `real` (batch, tokens) marks real tokens, `held` (batch,) held-out samples."""
    fitting, held_out = (Moments.of(x[rows], y[rows]) for rows in (real & ~held[:, None], real & held[:, None]))
    return SplitMoments(fitting, held_out)


def moment_bytes(modules: Sequence[PrunableModule]) -> int:
    """Return the bytes of memory that `collect_moments` needs without a selection.

    It assumes square consumers, which the output projections of most models are. Each has two float64 matrices for
    fitting and two held out.
    """
    return sum(2 * 2 * 8 * (module.units * module.unit_width) ** 2 for module in modules)


def check_samples(batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse batches with too few samples to hold one out.

    Raises:
        DataError: Fewer than five samples.
    """
    samples = sum(map(size_of, batches))
    if samples < HELD_OUT_EVERY:
        raise DataError(
            f"compensation needs at least {HELD_OUT_EVERY} samples, one of them to hold out, got {samples}; "
            "raise compensation.samples"
        )
