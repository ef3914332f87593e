"""Give back, without training, what the removed heads wrote on average: refit the output projections in closed form.

For an output projection y = W x + b with kept inputs x_K and removed inputs x_M, over calibration tokens with mean mu
and centred covariance C:

    bias           b' = b + W_M mu_M
    least_squares  W'_K = W_K + W_M C_MK (C_KK + lambda I)^-1,  b' = b + W_M mu_M + (W_K - W'_K) mu_K

A projection without a bias uses uncentred moments and stays without. Both follow from the moments of (x_K, y) alone,
and so does the error on held-out tokens; no activation is stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cut import head_rows
from .data.targets import size_of
from .errors import DataError, RecipeError, RequestError
from .model.linear import weight_of
from .model.modes import evaluating
from .values import AttentionSite, KeptHeads, PruningPlan

METHODS = ("bias", "least_squares")
# Relative to the mean of the diagonal of C_KK; the one with the smallest error on held-out tokens is taken.
RIDGES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
# Every fifth sample is held out: enough to judge a fit, few enough to leave it its tokens.
HELD_OUT_EVERY = 5
ENOUGH_TOKENS_PER_INPUT = 4

Progress = Callable[[Sequence[dict[str, Tensor]]], Iterable[dict[str, Tensor]]]


class FewTokensWarning(UserWarning):
    """Fewer calibration tokens than four times a projection's inputs: the fit may not carry over."""


class SingularInputsWarning(UserWarning):
    """Some kept inputs of a projection are the same for all tokens: least squares has no one answer."""


@dataclass(frozen=True)
class LayerFit:
    """What compensation did to one output projection.

    Attributes:
        name: Dotted name of the attention module.
        method: What was kept: "least_squares", or "bias" where that was better on held-out tokens, or "none" where
            nothing was.
        ridge: Relative ridge, None for `bias` and `none`.
        tokens: Calibration tokens, held-out ones included.
        error: Mean squared error of the projection's output on held-out tokens, relative to no compensation.
    """

    name: str
    method: str
    ridge: float | None
    tokens: int
    error: float


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


def compensate_heads(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    plan: PruningPlan,
    sites: Sequence[AttentionSite],
    batches: Sequence[dict[str, Tensor]],
    *,
    method: str = "least_squares",
    ridge: float | None = None,
    sequential: bool = False,
    progress: Progress | None = None,
) -> list[LayerFit]:
    """Refit the output projections of `slim`, in place, so that they give what the dense ones gave.

    Labels are not used. One pass over the batches serves all layers; `sequential` takes one pass of both models for
    each layer, with inputs from the layers already cut and refitted, and targets from the dense model.

    Args:
        dense: The model before the cut; not changed.
        slim: The model after it, from `prune_heads`.
        plan: The plan that was applied.
        sites: From `find_attention` on the dense model.
        batches: Inputs; padding is left out by their `attention_mask`.
        method: "bias" or "least_squares".
        ridge: Relative to the mean of the diagonal of C_KK; by default chosen on held-out samples.
        sequential: See above.
        progress: Wraps the batches, once per pass.

    Returns:
        What was done to each layer that lost heads. A fit is never worse than `bias` on held-out tokens: where it would
        be, the bias (or nothing) is kept.

    Raises:
        RecipeError: Unknown method, or a ridge that is not positive.
        RequestError: `bias` for projections that have none.
        DataError: Fewer than five samples.

    Warns:
        FewTokensWarning: Fewer tokens than four times the inputs of a projection.

    Examples:
        >>> fits = compensate_heads(model, slim, plan, sites, batches)
        >>> all(fit.error <= 1 for fit in fits)
        True
    """
    cut = [site for site in sites if len(plan.kept[site.name].query) < site.heads]
    _check(dense, cut, batches, method, ridge)
    fits = []
    for group in [[site] for site in cut] if sequential else [cut]:
        fitting, held_out = _collect(dense, slim if sequential else None, plan, group, batches, progress)
        for site in group:
            layer = slim.get_submodule(site.output)
            fits.append(_refit(layer, site.name, fitting[site.name], held_out[site.name], method, ridge))
    return fits


def collect_moments(
    dense: PreTrainedModel,
    sites: Sequence[AttentionSite],
    batches: Sequence[dict[str, Tensor]],
    *,
    progress: Progress | None = None,
) -> SplitMoments:
    """Moments of all inputs of every output projection: those of any plan are sub-blocks of them.

    So one pass serves any number of plans, and refitting for one costs a solve; see `refit_heads`. Memory is 32 bytes
    for each pair of inputs of each projection, e.g. 28 MB for 6 layers of width 384 and 17 GB for 32 of width 4096.

    Returns:
        By attention module, of the fitting and of the held-out samples.

    Raises:
        DataError: Fewer than five samples.
    """
    _check(dense, [], batches, "least_squares", None)
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


def refit_heads(
    slim: PreTrainedModel,
    plan: PruningPlan,
    sites: Sequence[AttentionSite],
    moments: SplitMoments,
    *,
    method: str = "least_squares",
    ridge: float | None = None,
) -> list[LayerFit]:
    """Do what `compensate_heads` does, from moments that were collected once for all plans.

    Args:
        slim: The cut model; its output projections are refitted in place.
        plan: The plan it was cut by.
        sites: From `find_attention` on the dense model.
        moments: From `collect_moments` on the dense model.
        method: "bias" or "least_squares".
        ridge: As in `compensate_heads`.
    """
    fits = []
    for site in sites:
        kept = plan.kept[site.name].query
        if len(kept) < site.heads:
            columns = head_rows(kept, site.value_dim).to(moments[0][site.name].xx.device)
            fitting, held_out = (part[site.name].part(columns) for part in moments)
            fits.append(_refit(slim.get_submodule(site.output), site.name, fitting, held_out, method, ridge))
    return fits


def _check(
    dense: PreTrainedModel,
    cut: Sequence[AttentionSite],
    batches: Sequence[Mapping[str, Tensor]],
    method: str,
    ridge: float | None,
) -> None:
    problems = []
    if method not in METHODS:
        problems.append(f"compensation.method must be one of {', '.join(METHODS)}, got {method!r}")
    if ridge is not None and not ridge > 0:
        problems.append(f"compensation.ridge must be above 0, got {ridge}")
    if problems:
        raise RecipeError(problems)
    samples = sum(map(size_of, batches))
    if samples < HELD_OUT_EVERY:
        raise DataError(
            f"compensation needs at least {HELD_OUT_EVERY} samples, one of them to hold out, got {samples}; "
            "raise compensation.samples"
        )
    without = [s.output for s in cut if getattr(dense.get_submodule(s.output), "bias", None) is None]
    if method == "bias" and without:
        raise RequestError(
            f"compensation.method bias needs output projections with a bias, but {without[0]} has none; "
            "use least_squares"
        )


def _collect(
    dense: PreTrainedModel,
    slim: PreTrainedModel | None,
    plan: PruningPlan,
    sites: Sequence[AttentionSite],
    batches: Sequence[dict[str, Tensor]],
    progress: Progress | None,
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


def real_tokens(model: PreTrainedModel, name: str, batch: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """Which tokens of an attention module's output are no padding.

    Args:
        model: The whole model.
        name: Dotted name of the attention module.
        batch: What the model was given.
        y: (batch, tokens, width)

    Returns:
        (batch, tokens) bool. The `attention_mask` is that of the text: patches of an image are all real, even where
        there happen to be as many of them as of text tokens.
    """
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == y.shape[:2] and _reads_text(model, name):
        return mask.bool().to(y.device)
    return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)


def _reads_text(model: PreTrainedModel, name: str) -> bool:
    """Whether the model, or the innermost model inside it, that a module belongs to is fed with text."""
    while name:
        owner = model.get_submodule(name)
        if isinstance(owner, PreTrainedModel):
            return owner.main_input_name == "input_ids"
        name = name.rpartition(".")[0]
    return model.main_input_name == "input_ids"


def _refit(
    layer: nn.Module, name: str, fitting: Moments, held_out: Moments, method: str, ridge: float | None
) -> LayerFit:
    weight = weight_of(layer).detach().double()
    bias = layer.bias.detach().double() if isinstance(layer.bias, Tensor) else None
    centred = bias is not None
    everything = fitting + held_out
    if method == "least_squares" and everything.tokens < ENOUGH_TOKENS_PER_INPUT * len(everything.x):
        warnings.warn(
            f"{everything.tokens} calibration tokens are few for the {len(everything.x)} inputs of {name}; "
            f"{ENOUGH_TOKENS_PER_INPUT} times as many are advised: raise compensation.samples",
            FewTokensWarning,
            stacklevel=3,
        )
    untouched = held_out.error(weight, bias)
    # (error on held-out tokens, method, ridge); what is tried is judged before the held-out tokens join the fit.
    tried: list[tuple[float, str, float | None]] = []
    if centred:
        tried.append((held_out.error(weight, fitting.fit_bias(weight)), "bias", None))
    if method == "least_squares":
        tried.append((untouched, "none", None))
        for candidate in RIDGES if ridge is None else (ridge,):
            try:
                error = held_out.error(*fitting.fit(weight, ridge=candidate, centred=centred))
                tried.append((error, "least_squares", candidate))
            except torch.linalg.LinAlgError:
                instead = "its bias is refitted" if centred else "it is left as it was cut"
                warnings.warn(
                    f"the covariance of the inputs of {name} is singular (what they give is the same for all tokens), "
                    f"so least squares cannot be fitted and {instead}; check that layer's weights",
                    SingularInputsWarning,
                    stacklevel=3,
                )
                break
    error, chosen, chosen_ridge = min(tried, key=lambda item: item[0])
    with torch.no_grad():
        if chosen_ridge is not None:
            weight, _ = everything.fit(weight, ridge=chosen_ridge, centred=centred)
            weight_of(layer).copy_(weight)
        if centred and chosen != "none":
            layer.bias.copy_(everything.fit_bias(weight))  # type: ignore[operator]
    share = error / untouched if untouched > 0 else 1.0
    return LayerFit(name=name, method=chosen, ridge=chosen_ridge, tokens=everything.tokens, error=share)
