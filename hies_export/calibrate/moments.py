"""Collect the moments of the consumers' inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export.progress import Track

from ..data.targets import size_of
from ..errors import DataError
from ..model.modes import evaluating
from ..model.tokens import real_tokens
from ..prunable.units import head_rows
from ..values import AttentionSite, KeptHeads, PruningPlan

# Every fifth sample is held out: enough to judge a fit, few enough to leave it its tokens.
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
        """Moments of (tokens, inputs) and (tokens, outputs)."""
        x, y = x.double(), y.double()
        return cls(len(x), x.sum(0), y.sum(0), x.T @ x, y.T @ x, y.pow(2).sum())

    def part(self, columns: Tensor) -> Moments:
        """The moments of some inputs, (columns,) of their indices, with the same targets."""
        return replace(self, x=self.x[columns], xx=self.xx[columns][:, columns], yx=self.yx[:, columns])

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def fit(self, weight: Tensor, *, ridge: float, centred: bool) -> tuple[Tensor, Tensor | None]:
        """The weight nearest to `weight` (outputs, inputs), in the sense of the ridge, that maps x to y.

        Returns:
            Weight (outputs, inputs), and bias (outputs,) or None when not `centred`.
        """
        mean_x, xx, yx = self.x / self.tokens, self.xx / self.tokens, self.yx / self.tokens
        if centred:
            xx = xx - torch.outer(mean_x, mean_x)
            yx = yx - torch.outer(self.y / self.tokens, mean_x)
        damped = xx + ridge * xx.diagonal().mean() * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        fitted = weight + torch.linalg.solve(damped, (yx - weight @ xx).T).T
        return fitted, self.fit_bias(fitted) if centred else None

    def fit_bias(self, weight: Tensor) -> Tensor:
        """The best bias (outputs,) for a weight (outputs, inputs)."""
        return (self.y - weight @ self.x) / self.tokens

    def error(self, weight: Tensor, bias: Tensor | None) -> float:
        """Mean over tokens of |weight x + bias - y|^2."""
        total = ((weight @ self.xx) * weight).sum() - 2 * (weight * self.yx).sum() + self.yy
        if bias is not None:
            total = total + 2 * bias @ (weight @ self.x - self.y) + self.tokens * bias @ bias
        return total.clamp(min=0).item() / self.tokens


# Of the fitting and of the held-out samples, by attention module.
SplitMoments = tuple[dict[str, Moments], dict[str, Moments]]


def collect_moments(
    dense: PreTrainedModel,
    sites: Sequence[AttentionSite],
    batches: Sequence[dict[str, Tensor]],
    *,
    progress: Track | None = None,
) -> SplitMoments:
    """Moments of all inputs of every output projection: those of any plan are sub-blocks of them.

    So one pass serves any number of plans, and refitting for one costs a solve; see `refit_heads`. Memory is 32 bytes
    for each pair of inputs of each projection, e.g. 28 MB for 6 layers of width 384 and 17 GB for 32 of width 4096.

    Returns:
        By attention module, of the fitting and of the held-out samples.

    Raises:
        DataError: Fewer than five samples.
    """
    check_samples(batches)
    everything = {
        s.name: KeptHeads(tuple(range(s.heads)), tuple(range(s.key_value_heads)), s.heads, s.key_value_heads)
        for s in sites
    }
    plan = PruningPlan(kept=everything, criterion="", alpha=None, seed=0)
    return _collect(dense, None, plan, sites, batches, progress)


def moment_bytes(sites: Sequence[AttentionSite]) -> int:
    """Bytes that `collect_moments` holds: two float64 matrices of every projection, fitting and held out.

    Projections are taken to be square, as those of most models are.
    """
    return sum(2 * 2 * 8 * (site.heads * site.value_dim) ** 2 for site in sites)


def _collect(
    dense: PreTrainedModel,
    slim: PreTrainedModel | None,
    plan: PruningPlan,
    sites: Sequence[AttentionSite],
    batches: Sequence[dict[str, Tensor]],
    progress: Track | None,
) -> SplitMoments:
    """Moments of kept inputs and dense outputs of each projection: of the fitting and of the held-out samples."""
    sums: SplitMoments = ({}, {})
    seen = 0
    with _watching(dense, sites) as (inputs, targets), _watching(slim, sites) as (slim_inputs, _), torch.no_grad():
        for batch in progress(batches) if progress else batches:
            on_device = {k: v.to(dense.device) for k, v in batch.items() if k != "labels"}
            for records in (inputs, targets, slim_inputs):
                records.clear()
            dense(**on_device)
            if slim is not None:
                slim(**on_device)
            size = size_of(batch)
            held = (torch.arange(seen, seen + size) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1).to(dense.device)
            seen += size
            for site in sites:
                columns = head_rows(plan.kept[site.name].query, site.value_dim).to(targets[site.name][0].device)
                kept = slim_inputs[site.name] if slim is not None else [x[..., columns] for x in inputs[site.name]]
                for x, y in zip(kept, targets[site.name], strict=True):
                    real = real_tokens(dense, site.name, on_device, y)
                    for part, rows in zip(sums, (~held, held), strict=True):
                        chosen = real & rows[:, None].to(real.device)
                        moments = Moments.of(x[chosen], y[chosen])
                        part[site.name] = part[site.name] + moments if site.name in part else moments
    return sums


@contextmanager
def _watching(
    model: PreTrainedModel | None, sites: Sequence[AttentionSite]
) -> Iterator[tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]]:
    """Record, in evaluation mode, inputs and outputs of the output projections; a shared layer is called many times."""
    inputs: dict[str, list[Tensor]] = {}
    outputs: dict[str, list[Tensor]] = {}
    if model is None:
        yield inputs, outputs
        return

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs.setdefault(name, []).append(args[0])
            outputs.setdefault(name, []).append(output)

        return hook

    handles: list[Any] = [model.get_submodule(s.output).register_forward_hook(record(s.name)) for s in sites]
    try:
        with evaluating(model):
            yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def check_samples(batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse too few samples to fit on some and judge the fit on others.

    Raises:
        DataError: Fewer than five samples.
    """
    samples = sum(map(size_of, batches))
    if samples < HELD_OUT_EVERY:
        raise DataError(
            f"compensation needs at least {HELD_OUT_EVERY} samples, one of them to hold out, got {samples}; "
            "raise compensation.samples"
        )
