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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export.progress import Track

from ..calibrate.moments import Moments, SplitMoments, _collect, check_samples
from ..errors import RecipeError, RequestError
from ..model.linear import weight_of
from ..prunable.units import head_rows
from ..values import AttentionSite, PruningPlan

METHODS = ("bias", "least_squares")
# Relative to the mean of the diagonal of C_KK; the one with the smallest error on held-out tokens is taken.
RIDGES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
ENOUGH_TOKENS_PER_INPUT = 4


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
    progress: Track | None = None,
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
    check_samples(batches)
    without = [s.output for s in cut if getattr(dense.get_submodule(s.output), "bias", None) is None]
    if method == "bias" and without:
        raise RequestError(
            f"compensation.method bias needs output projections with a bias, but {without[0]} has none; "
            "use least_squares"
        )


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
