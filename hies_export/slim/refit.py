"""Refit the consumers in closed form to make up for the removed units, without training.

For a consumer y = W x + b with kept inputs x_K, removed x_M, mean mu and covariance C over calibration tokens:

    bias           b' = b + W_M mu_M
    least_squares  W'_K = W_K + W_M C_MK (C_KK + lambda I)^-1,  b' = b + W_M mu_M + (W_K - W'_K) mu_K

A consumer without a bias gets none, and its moments are not centred. All methods, and the error on held-out tokens,
need only the moments of (x_K, y). lambda is relative to the mean of the diagonal of C_KK. With token weights w, mu and
C are weighted means, in which each token weighs w + (1 - w) q / mean(q), where q is the squared norm of the gradient of
the sample's prediction with respect to the consumer's input at that token.

Sequential refits go from layer to layer while both models run once. A layer's target is then the dense model's output
plus the difference between both models' residual streams there, so that it also makes up for what those before it lack.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibrate.moments import LayerMoments, Moments, MomentStore, add_reading, check_samples
from ..calibrate.readings import by_sample, reading_of, walk_forward, walking
from ..calibrate.residual import residual_places, streams
from ..calibrate.walk import Call, Walk, blocks_of
from ..data.batches import size_of
from ..errors import RequestError
from ..model.linear import weight_of
from ..processes import mapped
from ..progress import SILENT, Progress
from ..recipe.sections import CompensationSection
from ..select.plan import PruningPlan, selection_of
from ..units.units import PrunableModule, Selection

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # candidates for lambda; the error on held-out tokens decides


@dataclass(frozen=True)
class LayerFit:
    """The refit of one consumer, by the method with the smallest error on held-out tokens."""

    name: str  # of the module
    method: str  # "least_squares" or "bias", or "none" if the consumer was left as it was cut
    ridge: float | None  # of "least_squares"
    tokens: int  # including held-out ones
    error: float  # mean squared error of the output on held-out tokens, as a share of the error without a refit


Refits: TypeAlias = MutableMapping[str, tuple[Mapping[str, Tensor], LayerFit]]
"""Module -> the parameters of its consumer after the refit, by their names there, and how it was refitted."""

LEAST_SQUARES = CompensationSection()


def compensate(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    how: CompensationSection = LEAST_SQUARES,
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
        how: Method, ridge, order and weights of tokens; by default all layers are refitted independently.
        known: Earlier refits by a sequential `how`, which are used as they are; new ones are added.
        progress: Shows the loop over the blocks.

    Returns:
        One fit per module that lost units, in the order of `modules`. If least squares is worse than `bias` on held-out
        tokens, only the bias is refitted, or nothing.

    Raises:
        RequestError: The method is `bias`, and a consumer has no bias.
        DataError: Fewer than five samples.
        NonFiniteError: An input or output of a consumer is NaN or infinite; that consumer is left as it was cut.

    Examples:
        >>> fits = compensate(model, slim, plan, modules, batches)
        >>> all(fit.error <= 1 for fit in fits)
        True
    """
    selection = selection_of(plan)
    cut = [module for module in modules if selection[module.name].removed]
    check_samples(batches)
    check_biases(dense, cut, how.method)
    if not how.sequential:
        moments = MomentStore(dense, cut, batches, weighted=(how.token_weights or 1) < 1, keep=False)
        return refit(slim, selection, cut, moments, how, progress)
    if not cut:
        return []
    return _refit_in_order(dense, slim, cut, batches, how, {} if known is None else known, progress)


def check_biases(model: PreTrainedModel, modules: Sequence[PrunableModule], method: str) -> None:
    """Refuse the method `bias` for modules whose consumer has no bias."""
    without = [m.consumer for m in modules if getattr(model.get_submodule(m.consumer), "bias", None) is None]
    if method == "bias" and without:
        raise RequestError(
            f"compensation.method bias needs output projections with a bias, but {without[0]} has none; "
            "use least_squares"
        )


def refit(
    slim: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    moments: MomentStore,
    how: CompensationSection = LEAST_SQUARES,
    progress: Progress = SILENT,
) -> list[LayerFit]:
    """Refit the consumers of `slim` in place from the dense model's moments of all inputs, which fit any plan."""
    selection = selection_of(plan)
    columns = {m.name: m.columns(selection[m.name].units) for m in modules if selection[m.name].removed}
    if (mix := how.token_weights or 1) < 1 and not moments.weighted:
        raise RequestError(f"token weights of {mix:g} need moments of weighted tokens; collect them with weighted=True")
    fits: dict[str, LayerFit] = {}

    def refit_some(some: Sequence[PrunableModule], sums: Mapping[str, LayerMoments]) -> None:
        fits.update({name: fit for name, (_, fit) in _refit_all(slim, some, sums, columns, how).items()})

    if columns:
        moments.each(refit_some, columns, progress=progress)
    return [fits[name] for name in columns]


def _refit_all(
    slim: PreTrainedModel,
    modules: Sequence[PrunableModule],
    moments: Mapping[str, LayerMoments],
    columns: Mapping[str, Tensor | None],
    how: CompensationSection,
) -> Refits:
    """Refit consumers in place, each from its moments of the inputs in `columns`; None if these are all it has."""

    def refit_one(_: int, module: PrunableModule) -> tuple[dict[str, nn.Parameter], LayerFit]:
        consumer = slim.get_submodule(module.consumer)
        fitting, held_out = moments[module.name].mixed(how.token_weights or 1, columns[module.name])
        fit = _refit(consumer, module, fitting, held_out, how)
        return dict(consumer.named_parameters(recurse=False)), fit

    refits = zip(modules, mapped(modules, refit_one), strict=True)
    # Set again, as another process may have refitted the consumer.
    return {module.name: (_set_parameters(slim, module, parameters), fit) for module, (parameters, fit) in refits}


def _set_parameters(slim: PreTrainedModel, module: PrunableModule, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy values into the parameters of a module's consumer, and return these parameters by name."""
    parameters: dict[str, Tensor] = dict(slim.get_submodule(module.consumer).named_parameters(recurse=False))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    return parameters


def _refit_in_order(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    how: CompensationSection,
    known: Refits,
    progress: Progress,
) -> list[LayerFit]:
    """Refit modules in the order of their calls, each by what its consumer reads in the slim model by then."""
    places, by_name = residual_places(dense, modules, batches[0]), {module.name: module for module in modules}
    blocks, first_samples = blocks_of(dense, modules, batches[0]), [0, *accumulate(map(size_of, batches))]
    models, fits = (dense, slim), dict[str, LayerFit]()
    walks = [walk_forward(model, batches, [*blocks]) for model in models]
    with walking(dense), walking(slim), ExitStack() as stack:
        residual = [stack.enter_context(streams(model, places)) for model in models]
        steps = [stack.enter_context(closing(walk.forward())) for walk in walks]
        for block in progress.track([*blocks], "blocks refitted"):
            block_modules = [by_name[name] for name in places if by_name[name] in blocks[block]]
            both = zip(models, walks, [next(of_model)[1] for of_model in steps], strict=True)
            dense_walk, slim_walk = (_walk_inside(model, walk, calls, block_modules) for model, walk, calls in both)
            with closing(dense_walk.forward()) as dense_steps, closing(slim_walk.forward()) as slim_steps:
                dense_step = next(dense_steps, None)
                for module in block_modules:
                    assert dense_step is not None
                    targets = {}  # batch -> the consumer's output in the dense model, and the residual stream there
                    for call in dense_step[1]:
                        call.output = dense_walk.compute(call)
                        targets[call.batch] = call.output, residual[0].pop(call.batch, None)
                    # The dense model goes on before the slim one, so only one holds what its next consumer reads.
                    dense_step = next(dense_steps, None)
                    slim_calls = next(slim_steps)[1]
                    consumer = slim.get_submodule(module.consumer)
                    sums = None if module.name in known else LayerMoments.zeros(consumer, targets=True)
                    for call in slim_calls:
                        number, (y, dense_stream) = call.batch, targets.pop(call.batch)
                        slim_stream = residual[1].pop(number, None)
                        if sums is not None:
                            source = dense, module.name, batches[number]
                            reading, target = reading_of(*source, call.args[0]), by_sample(*source, y)
                            if dense_stream is not None and slim_stream is not None:
                                target = target + by_sample(*source, dense_stream - slim_stream).to(target)
                            add_reading(sums, reading, first_samples[number], target)
                    if sums is None:
                        parameters, fits[module.name] = known[module.name]
                        _set_parameters(slim, module, parameters)
                    else:
                        sums.add_up(module.name)
                        refits = _refit_all(slim, [module], {module.name: sums}, {module.name: None}, how)
                        known.update(refits)
                        fits[module.name] = refits[module.name][1]
                    for call in slim_calls:
                        call.output = slim_walk.compute(call)
                next(slim_steps, None)  # to the end of the block
    return [fits[module.name] for module in modules]


def _walk_inside(model: PreTrainedModel, walk: Walk, calls: Sequence[Call], modules: Sequence[PrunableModule]) -> Walk:
    """Return a walk through one block, with its calls as batches, that waits in front of its modules' consumers."""

    def run(_: int, call: Call) -> None:
        call.output = walk.compute(call)

    return Walk(model, {call.batch: call for call in calls}, [m.consumer for m in modules], run)


def _refit(
    layer: nn.Module, module: PrunableModule, fitting: Moments, held_out: Moments, how: CompensationSection
) -> LayerFit:
    """Refit one consumer in place, unless no fit is better on held-out tokens."""
    # The moments are on the device where the block that was read computes; the slim layer may be on another.
    weight = weight_of(layer).detach().to(fitting.x)
    bias = layer.bias.detach().to(weight) if isinstance(layer.bias, Tensor) else None
    everything = fitting + held_out
    untouched = held_out.error(weight, bias)
    # (error on held-out tokens, method, ridge). The method chosen is then fitted again on all tokens.
    tried: list[tuple[float, str, float | None]] = []
    if bias is not None:
        tried.append((held_out.error(weight, fitting.fit_bias(weight)), "bias", None))
    if how.method != "bias":
        tried.append((untouched, "none", None))
        ridges = [*RIDGES] if how.ridge is None else [how.ridge]
        for ridge, fitted, fitted_bias in fitting.ridge_fits(weight, ridges, centred=bias is not None, quick=True):
            tried.append((held_out.error(fitted, fitted_bias), "least_squares", ridge))
    error, method, best_ridge = min(tried, key=lambda item: item[0])
    with torch.no_grad():
        new_bias = bias
        if best_ridge is not None:
            # The matrix over all tokens may need a larger ridge.
            ridges = [best_ridge, *(ridge for ridge in RIDGES if ridge > best_ridge)]
            best_ridge, weight, new_bias = next(everything.ridge_fits(weight, ridges, centred=bias is not None))
            weight_of(layer).copy_(weight)
        elif method == "bias":
            new_bias = everything.fit_bias(weight)
        if new_bias is not None and new_bias is not bias:
            layer.bias.copy_(new_bias)  # type: ignore[operator]
    share = error / untouched if untouched > 0 else 1.0
    return LayerFit(module.name, method, best_ridge, round(everything.tokens.item()), share)
