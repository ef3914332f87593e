"""Refit the consumers in closed form to make up for the removed units, without training.

For a consumer y = W x + b with kept inputs x_K and removed inputs x_M, over calibration tokens with mean mu and centred
covariance C:

    bias           b' = b + W_M mu_M
    least_squares  W'_K = W_K + W_M C_MK (C_KK + lambda I)^-1,  b' = b + W_M mu_M + (W_K - W'_K) mu_K
    scalars        W'_u = s_u W_u for every kept unit u, where s minimises E |sum_u s_u W_u x_u + b - y|^2

A consumer without a bias gets none, and its moments are not centred. All methods, and the error on held-out tokens,
need only the moments of (x_K, y). With token weights, mu and C are weighted means over tokens. Scalars are the mask
tuning of Kwon et al. 2022 (https://arxiv.org/abs/2204.09656, section 4.4), folded into the weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibrate.moments import (
    LayerMoments,
    Moments,
    MomentStore,
    Solve,
    SplitMoments,
    add_reading,
    check_mix,
    check_samples,
    collect_moments,
    new_sums,
)
from ..calibrate.readings import Reading, by_sample, walk_forward, walking
from ..calibrate.residual import residual_places, streams
from ..calibrate.walk import Call, Steps, Walk, blocks_of
from ..data.batches import size_of
from ..errors import NonFiniteError, RecipeError, RequestError, refusing
from ..model.linear import weight_of
from ..model.tokens import real_tokens
from ..processes import added_up, mapped
from ..progress import SILENT, Progress
from ..recipe.sections import CompensationSection
from ..select.plan import PruningPlan, selection_of
from ..units.units import PrunableModule, Selection

# Candidates for lambda, relative to the mean of the diagonal of C_KK, or of the matrix that scalars solve; the error on
# held-out tokens decides.
RIDGES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
ENOUGH_TOKENS_PER_INPUT = 4
# Share of the difference between both models' residual streams that a sequential refit of a layer makes up for. All of
# it is more than a layer can learn: on SmolLM2 at 0.8 of the FLOPs, half gave 37.8 perplexity, all 38.5, none 40.6.
DRIFT = 0.5


class FewTokensWarning(UserWarning):
    """There are fewer calibration tokens than four times the inputs of a projection, so the fit may not generalise."""


class SingularInputsWarning(UserWarning):
    """Some kept inputs of a projection are the same for all tokens, so least squares has no unique solution."""


@dataclass(frozen=True)
class Compensation:
    """Options for refitting the consumers, by the fields of `CompensationSection`.

    `method` says what is fitted. `ridge` is relative to the mean of the diagonal of C_KK, and pulls scalars towards
    one. If `sequential`, layers are refitted one after the other while both models run once. A layer's target is then
    the dense model's output plus half of the difference between both models' residual streams there (`DRIFT`). With
    `token_weights` w, each token weighs w + (1 - w) q / mean(q), where q is the squared norm of the gradient of the
    sample's prediction with respect to the consumer's input at that token.

    Raises:
        RecipeError: An option is out of range.
    """

    method: str = "least_squares"
    ridge: float | None = None
    sequential: bool = False
    token_weights: float = 1.0

    def __post_init__(self) -> None:
        with refusing("a compensation must be as in a recipe", kind=RecipeError):
            CompensationSection(**vars(self))


@dataclass(frozen=True)
class LayerFit:
    """The refit of one consumer, by the method with the smallest error on held-out tokens.

    That is "least_squares", "scalars" or "bias", or "none" if the consumer was left as it was cut. `error` is the mean
    squared error of its output on held-out tokens, as a share of the error without a refit.
    """

    name: str  # of the module
    method: str
    ridge: float | None  # of "least_squares" or "scalars", as in `Compensation`
    tokens: int  # including held-out ones
    error: float


Refits: TypeAlias = MutableMapping[str, tuple[Mapping[str, Tensor], LayerFit]]
"""Module -> the parameters of its consumer after the refit, by their names there, and how it was refitted."""

# Of one consumer: its name, its parameters, how it was refitted, and what to warn of.
_Refitted: TypeAlias = tuple[str, Mapping[str, nn.Parameter], LayerFit, Sequence[Warning]]

LEAST_SQUARES = Compensation()


def compensate(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    how: Compensation = LEAST_SQUARES,
    *,
    known: Refits | None = None,
    progress: Progress = SILENT,
) -> list[LayerFit]:
    """Refit the consumers of `slim` in place, so that their outputs come closest to those of the dense model.

    Labels are not used, except those of language models if tokens are weighted. All batches walk through the dense
    model, and if `how` is sequential through both models side by side, one block after the other.

    Args:
        dense: The model before the cut; not changed.
        slim: The model after it, from `prune_units`.
        plan: The units that stayed.
        modules: From `find_attention` on the dense model.
        batches: Inputs of the model; padding is excluded by their `attention_mask`.
        how: Method, ridge, order and weights of tokens.
        known: What was refitted before by a sequential `how` and is taken as it is; what is refitted is put in.
        progress: Shows the loop over the blocks.

    Returns:
        One fit per module that lost units. If least squares is worse than `bias` on held-out tokens, only the bias is
        refitted, or nothing.

    Raises:
        RequestError: The method is `bias`, and a consumer has no bias.
        DataError: Fewer than five samples.
        NonFiniteError: An input or output of a consumer is NaN or infinite; that consumer is left as it was cut.

    Warns:
        FewTokensWarning: Fewer tokens than four times the inputs of a consumer.

    Examples:
        >>> fits = compensate(model, slim, plan, modules, batches)
        >>> all(fit.error <= 1 for fit in fits)
        True
    """
    selection = selection_of(plan)
    cut = [module for module in modules if selection[module.name].removed]
    check_samples(batches)
    check_biases(dense, cut, how.method)
    if how.sequential:
        fits = _in_order(dense, slim, selection, cut, batches, how, {} if known is None else known, progress)
    else:
        fits = []

        def block(inside: Sequence[PrunableModule], sums: Mapping[str, LayerMoments]) -> None:
            fits.extend(_refit_all(slim, inside, sums, how))

        if cut:
            weighted = how.token_weights < 1
            collect_moments(dense, cut, batches, block, selection=selection, weighted=weighted, progress=progress)
    return _in_order_of(cut, fits)


def check_biases(model: PreTrainedModel, modules: Sequence[PrunableModule], method: str) -> None:
    """Refuse the method `bias` for modules whose consumer has no bias."""
    if method != "bias":
        return
    without = [m.consumer for m in modules if getattr(model.get_submodule(m.consumer), "bias", None) is None]
    if without:
        raise RequestError(
            f"compensation.method bias needs output projections with a bias, but {without[0]} has none; "
            "use least_squares"
        )


def refit(
    slim: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    moments: MomentStore,
    how: Compensation = LEAST_SQUARES,
) -> list[LayerFit]:
    """Refit the consumers of `slim` in place from the dense model's moments of all inputs, which fit any plan."""
    selection = selection_of(plan)
    cut = {module.name: module.columns(selection[module.name].units) for module in modules}
    cut = {name: columns for name, columns in cut.items() if selection[name].removed}
    check_mix(how.token_weights, weighted=moments.weighted)
    fits: list[LayerFit] = []
    moments.each(lambda inside, sums: fits.extend(_refit_all(slim, inside, sums, how, cut)), cut)
    return _in_order_of([module for module in modules if module.name in cut], fits)


def _in_order_of(modules: Sequence[PrunableModule], fits: Sequence[LayerFit]) -> list[LayerFit]:
    """Return the fits in the order of their modules; they were made in that of the model."""
    by_name = {fit.name: fit for fit in fits}
    return [by_name[module.name] for module in modules]


def _refit_all(
    slim: PreTrainedModel,
    modules: Sequence[PrunableModule],
    moments: Mapping[str, LayerMoments],
    how: Compensation,
    columns: Mapping[str, Tensor] | None = None,
) -> list[LayerFit]:
    """Refit consumers in place, each from its moments of all inputs, or of those in `columns`."""

    def work(_: int, module: PrunableModule) -> _Refitted:
        consumer = slim.get_submodule(module.consumer)
        found = moments[module.name].mixed(how.token_weights, None if columns is None else columns[module.name])
        return (module.consumer, dict(consumer.named_parameters(recurse=False)), *_refit(consumer, module, found, how))

    fits = []
    for consumer, refitted, fit, notes in mapped(modules, work):
        for note in notes:
            warnings.warn(note, stacklevel=3)
        with torch.no_grad():
            # What another process refitted; a process's own are the same tensors.
            for name, parameter in slim.get_submodule(consumer).named_parameters(recurse=False):
                parameter.copy_(refitted[name])
        fits.append(fit)
    return fits


def _in_order(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    selection: Selection,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    how: Compensation,
    known: Refits,
    progress: Progress,
) -> list[LayerFit]:
    """Refit modules in the order of their calls, each by what its consumer reads in the slim model then."""
    if not modules:
        return []
    places, by_name = residual_places(dense, modules, batches[0]), {module.name: module for module in modules}
    blocks, first = blocks_of(dense, modules, batches[0]), [0, *accumulate(map(size_of, batches))]
    models, fits = (dense, slim), list[LayerFit]()
    with ExitStack() as stack:
        walks, steps, residual = [], [], []
        for model in models:
            stack.enter_context(walking(model, batches))
            residual.append(stack.enter_context(streams(model, places)))
            walks.append(walk_forward(model, batches, [*blocks]))
            steps.append(stack.enter_context(closing(walks[-1].forward(to_the_end=False))))
        for block in progress.track([*blocks], "blocks refitted"):
            calls = [next(of_model)[1] for of_model in steps]
            inside = [by_name[name] for name in places if by_name[name] in blocks[block]]
            with ExitStack() as within:
                paused = [_paused(*of, [m.consumer for m in inside]) for of in zip(models, walks, calls, strict=True)]
                for _, consumers in paused:
                    within.enter_context(closing(consumers))
                (there, of_dense), (here, of_slim) = paused
                waiting = next(of_dense, None)
                for module in inside:
                    assert waiting is not None
                    wanted = {}
                    for call in waiting[1]:
                        call.output = there.compute(call)
                        wanted[call.batch] = call.output, residual[0].pop(call.batch, None)
                    # The dense model goes on before the slim one, so only one holds what its next consumer reads.
                    waiting = next(of_dense, None)
                    calls_here = next(of_slim)[1]
                    sums = None if module.name in known else new_sums(dense, module, selection)
                    for call in calls_here:
                        number, (y, stream) = call.batch, wanted.pop(call.batch)
                        both = stream, residual[1].pop(number, None)
                        if sums is not None:
                            found = _reading(dense, module, batches[number], call.args[0], y, *both)
                            add_reading(sums, found, first[number])
                    if sums is None:
                        fits.append(_put_back(slim, module, known[module.name]))
                    else:
                        added_up(sums.tensors())
                        fits += _refit_all(slim, [module], {module.name: sums}, how)
                        parameters = dict(slim.get_submodule(module.consumer).named_parameters(recurse=False))
                        known[module.name] = parameters, fits[-1]
                    for call in calls_here:
                        call.output = here.compute(call)
                next(of_slim, None)  # to the end of the block
    return fits


def _put_back(slim: PreTrainedModel, module: PrunableModule, known: tuple[Mapping[str, Tensor], LayerFit]) -> LayerFit:
    """Give a consumer the parameters that it was refitted to before; return that fit."""
    stored, fit = known
    with torch.no_grad():
        for name, parameter in slim.get_submodule(module.consumer).named_parameters(recurse=False):
            parameter.copy_(stored[name])
    return fit


def _reading(
    dense: PreTrainedModel,
    module: PrunableModule,
    batch: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    there: Tensor | None,
    here: Tensor | None,
) -> Reading:
    """Return what the slim consumer reads of a batch, x, with the dense one's output y and a share of the drift.

    `there` and `here` are the residual streams of the dense and the slim model; None where one is not known, or where
    the layer that shows it was removed as a whole.
    """
    x, y = (by_sample(dense, module.name, batch, t) for t in (x, y))
    if there is not None and here is not None:
        y = y + DRIFT * by_sample(dense, module.name, batch, there - here).to(y)
    return Reading(module.name, x, y, None, real_tokens(dense, module.name, batch, x))


def _paused(model: PreTrainedModel, walk: Walk, calls: Sequence[Call], consumers: Sequence[str]) -> tuple[Walk, Steps]:
    """Return a walk of the calls of a block, which pause at its consumers, and its steps."""

    def run(_: int, call: Call) -> None:
        call.output = walk.compute(call)

    inner = Walk(model, {call.batch: call for call in calls}, consumers, run)
    return inner, inner.forward()


def _refit(
    layer: nn.Module, module: PrunableModule, moments: SplitMoments, how: Compensation
) -> tuple[LayerFit, list[Warning]]:
    """Refit one consumer in place, unless no fit is better on held-out tokens; return what to warn of, too."""
    name, fitting, held_out = module.name, moments.fitting, moments.held_out
    # The moments are where the dense block computes; the slim one may be elsewhere.
    weight = weight_of(layer).detach().to(fitting.x)
    bias = layer.bias.detach().to(weight) if isinstance(layer.bias, Tensor) else None
    everything = fitting + held_out
    _check_finite(module, everything)
    notes: list[Warning] = _few_tokens(name, everything, how, width=module.unit_width)

    def solver(of: Moments) -> Solve:
        if how.method == "scalars":
            return _scaling(of, weight, bias, width=module.unit_width)
        return of.solver(weight, centred=bias is not None)

    untouched = held_out.error(weight, bias)
    # (error on held-out tokens, method, ridge). The method chosen is then fitted again on all tokens.
    tried: list[tuple[float, str, float | None]] = []
    if bias is not None and how.method != "scalars":
        tried.append((held_out.error(weight, fitting.fit_bias(weight)), "bias", None))
    if how.method != "bias":
        tried.append((untouched, "none", None))
        solve = solver(fitting)

        def held_out_error(ridge: float) -> float:
            found = solve(ridge, quick=True)
            return math.inf if found is None else held_out.error(*found)

        least, ridge = _downhill(RIDGES if how.ridge is None else (how.ridge,), held_out_error)
        if least == math.inf:
            instead = "its bias is refitted" if len(tried) > 1 else "it is left as it was cut"
            notes.append(
                SingularInputsWarning(
                    f"the covariance of the inputs of {name} is singular with every ridge (they may be the same for "
                    f"all tokens), so least squares cannot be fitted and {instead}; check that layer's weights"
                )
            )
        tried.append((least, how.method, ridge))
    error, chosen, chosen_ridge = min(tried, key=lambda item: item[0])
    with torch.no_grad():
        refitted = bias
        if chosen_ridge is not None:
            # Of all tokens, the matrix may need a larger ridge.
            solve, larger = solver(everything), (ridge for ridge in RIDGES if ridge > chosen_ridge)
            solved = ((ridge, solve(ridge)) for ridge in (chosen_ridge, *larger))
            chosen_ridge, (weight, refitted) = next((ridge, fit) for ridge, fit in solved if fit is not None)
            weight_of(layer).copy_(weight)
        elif chosen == "bias":
            refitted = everything.fit_bias(weight)
        if refitted is not None and refitted is not bias:
            layer.bias.copy_(refitted)  # type: ignore[operator]
    share = error / untouched if untouched > 0 else 1.0
    return LayerFit(name=name, method=chosen, ridge=chosen_ridge, tokens=everything.counted, error=share), notes


def _downhill(ridges: Sequence[float], error: Callable[[float], float]) -> tuple[float, float]:
    """Return the least error and its ridge, found from the middle one on as long as a neighbour is better."""
    found: dict[int, float] = {}

    def known(place: int) -> tuple[float, int]:
        if place not in found:
            found[place] = error(ridges[place])
        return found[place], -place  # where several fail, towards the larger ridge

    place = len(ridges) // 2
    while (best := min(range(max(0, place - 1), min(len(ridges), place + 2)), key=known)) != place:
        place = best
    return found[place], ridges[place]


def _scaling(moments: Moments, weight: Tensor, bias: Tensor | None, *, width: int) -> Solve:
    """Return what gives the weight with every unit times its scalar, with a ridge that pulls scalars towards one.

    The squared error is s^T A s - 2 s^T c + const, with A_uv = tr(W_u^T W_v E x_v x_u^T) and
    c_u = tr(W_u^T E (y - b) x_u^T). Moments are of the kept inputs, `weight` is (outputs, inputs), a unit has `width`
    inputs, and ridges are relative to the mean of the diagonal of A.
    """
    xx, yx = moments.xx / moments.tokens, moments.yx / moments.tokens
    if bias is not None:
        yx = yx - torch.outer(bias, moments.x / moments.tokens)
    units = len(xx) // width
    products = (weight.T @ weight * xx).view(units, width, units, width).sum((1, 3))  # A, (units, units)
    wanted = (weight * yx).sum(0).view(units, width).sum(1)  # c, (units,)
    scale = products.diagonal().mean()

    def solve(ridge: float, *, quick: bool = False) -> tuple[Tensor, Tensor | None] | None:
        damped = products + ridge * scale * torch.eye(units, dtype=xx.dtype, device=xx.device)
        try:
            factor = torch.linalg.cholesky(damped)
        except torch.linalg.LinAlgError:
            return None
        change = torch.cholesky_solve((wanted - products.sum(1))[:, None], factor)[:, 0]
        return weight * (1 + change).repeat_interleave(width), bias

    return solve


def _check_finite(module: PrunableModule, moments: Moments) -> None:
    """Refuse moments of tokens that are no numbers: of errors that are NaN, none is the least, and a fit is NaN too."""
    found = (moments.x, moments.y, moments.xx, moments.yx, moments.yy)
    if not all(values.isfinite().all() for values in found):
        raise NonFiniteError(
            f"every input and output of {module.consumer} must be finite to refit it, but over {moments.counted} "
            "calibration tokens they add up to NaN or infinity; check the weights before it, the compensation rows and "
            "the model's dtype (float16 overflows where bfloat16 does not), or leave compensation out"
        )


def _few_tokens(name: str, moments: Moments, how: Compensation, *, width: int) -> list[Warning]:
    """Return a warning if there are fewer tokens than four times the unknowns of an output."""
    unknowns = {"bias": 0, "least_squares": len(moments.x), "scalars": len(moments.x) // width}[how.method]
    wanted = ENOUGH_TOKENS_PER_INPUT * unknowns
    if moments.counted >= wanted:
        return []
    what = "units" if how.method == "scalars" else "inputs"
    return [
        FewTokensWarning(
            f"{moments.counted} calibration tokens are too few for the {unknowns} {what} of {name}, which need at "
            f"least {wanted}: raise compensation.samples"
        )
    ]
