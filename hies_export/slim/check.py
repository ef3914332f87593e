"""Check a plan against a model and its weights, and a cut model against the masked one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import inputs_of
from ..equal import IN_FLOAT64, SAME_CODE, SURE_IN_FLOAT32, Difference
from ..errors import CutMismatchError, PlanError, memory_failure
from ..kinds import ATTENTION, MLP, UNIT_NAMES
from ..model.copies import convert
from ..model.internals import exact_products
from ..model.modes import evaluating, intercept, output_alone
from ..model.tokens import short_samples
from ..select.plan import PruningPlan, selection_of
from ..units.units import PrunableModule, Selection, check_indices

logger = logging.getLogger(__name__)


@contextmanager
def masked_units(
    model: PreTrainedModel, plan: PruningPlan | Selection, modules: Sequence[PrunableModule]
) -> Iterator[None]:
    """Multiply the outputs of the removed units by zero where their consumers read them, inside the block.

    Args:
        model: The dense model; restored after the block.
        plan: The units that stay.
        modules: From `find_modules` on this model.

    Examples:
        >>> with masked_units(model, plan, modules):
        ...     logits = model(**batches[0]).logits
    """
    selection = selection_of(plan)
    masks = {}
    for module in modules:
        kept = selection[module.name]
        if len(kept.units) < kept.total:
            masks[module.name] = torch.zeros(module.units * module.unit_width)
            masks[module.name][module.columns(kept.units)] = 1

    def masked(name: str, x: Tensor) -> Tensor:
        return x * masks[name].to(x)

    with intercept(model, {m.name: m.consumer for m in modules if m.name in masks}, masked):
        yield


# Weights that differ by this share of their norm are different weights. Rounding to bfloat16 moves a number of a
# fingerprint by 0.001 of the norm (one standard deviation); between two fine-tunings of one model it moves by 0.04.
FINGERPRINT_TOLERANCE = 0.006

# Signs repeat after this many elements.
SIGN_PERIOD = 1 << 20
# Odd 64-bit numbers, written as signed ones.
_FACTORS = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1)
_MIX = -0x40A7B892E31B1A47


def fingerprint(model: nn.Module, modules: Sequence[PrunableModule]) -> dict[str, tuple[float, ...]]:
    """Return the fingerprints that identify a model: layer -> fingerprint, for the first and the last module."""
    names = dict.fromkeys(name for m in (modules[0], modules[-1]) for name in m.layers)
    # As it is stored, not as `weight_of` turns it.
    return {name: fingerprint_of(model.get_parameter(f"{name}.weight").detach()) for name in names}


def fingerprint_of(tensor: Tensor) -> tuple[float, ...]:
    """Return the L2 norm of a tensor, and the sums of its elements under two fixed patterns of signs.

    The norms of two fine-tunings of one model differ by less than a thousandth. Their signed sums differ by about as
    large a share of the norm as the weights do (random projections, Johnson and Lindenstrauss 1984).
    """
    squares, sums = 0.0, torch.zeros(len(_FACTORS), dtype=torch.float64)
    for part in tensor.flatten().split(SIGN_PERIOD):
        numbers = part.double()
        squares += numbers.square().sum().item()
        sums += (_signs(numbers.device)[:, : len(numbers)] @ numbers).cpu()
    return (squares**0.5, *sums.tolist())


@cache
def _signs(device: torch.device) -> Tensor:
    """Return two fixed patterns of signs, (2, SIGN_PERIOD); torch's own generators may change between versions."""
    hashed = torch.arange(SIGN_PERIOD, device=device) * torch.tensor(_FACTORS, device=device)[:, None]
    hashed = (hashed ^ (hashed >> 29)) * _MIX
    return torch.where(hashed < 0, -1.0, 1.0).double()


def check_weights(made_for: Mapping[str, Sequence[float]], found: Mapping[str, Sequence[float]]) -> None:
    """Refuse a plan that was made for a model with other weights, whose units compute other features."""
    lacking = next((name for name in made_for if name not in found), None)
    if lacking is not None:
        raise PlanError(f"a plan must be for the weights it is applied to, but this model has no {lacking}; {_ADVICE}")
    apart = {name: _distance(made, found[name]) for name, made in made_for.items()}
    others = [name for name in made_for if not apart[name] <= FINGERPRINT_TOLERANCE]  # NaN too
    if others:
        name = max(others, key=lambda name: apart[name])
        raise PlanError(
            f"a plan must be for the weights it is applied to, but those of {name} differ from the ones it was made "
            f"for, by about {apart[name]:.2g} of their norm or more; {_ADVICE}"
        )


def _distance(made: Sequence[float], here: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(made, here, strict=True)) / max(made[0], 1e-30)


_ADVICE = "make a plan for this model, or pass plan.kept (to apply_plan: force=True) to cut it all the same"


# Most bytes that a copy of a model in float64 may take; a larger model is compared in float32 alone.
LARGEST_COPY = 4 << 30

_MODULES = {ATTENTION: "attention modules", MLP: "feed-forward blocks"}


def check_selection(selection: Selection, modules: Sequence[PrunableModule]) -> None:
    """Refuse, by a `PlanError`, a selection that does not fit the modules of a model."""
    if list(selection) != [module.name for module in modules]:
        names = {module.name for module in modules}
        missing = [module.name for module in modules if module.name not in selection]
        extra = [name for name in selection if name not in names]
        kinds = " and ".join(_MODULES[kind] for kind in dict.fromkeys(module.kind for module in modules))
        raise PlanError(
            f"a plan must name the {kinds} of its model, in the model's order, but {len(missing)} are missing from it "
            f"{missing[:2]} and {len(extra)} are not in the model {extra[:2]}; make a plan for this model"
        )
    for module in modules:
        kept = selection[module.name]
        if (kept.total, kept.groups, kept.kind) != (module.units, module.groups, module.kind):
            raise PlanError(
                f"the plan is for {_in_words(kept.kind, kept.total, kept.groups)} in {module.name}, but the model has "
                f"{_in_words(module.kind, module.units, module.groups)}; make a plan for this model"
            )
        _check_units(kept.units, module)


def _check_units(units: Sequence[int], module: PrunableModule) -> None:
    """Refuse the kept units of one module if they are out of range or order, or uneven over its groups."""
    try:
        check_indices(units, module.units, what=f"kept {UNIT_NAMES[module.kind]}s")
    except ValueError as error:
        raise PlanError(f"{error} for {module.name}") from error
    if module.group_size == 1:
        return
    sizes = list(Counter(number // module.group_size for number in units).values())
    if len(set(sizes)) > 1:
        raise PlanError(
            f"every key/value head that stays must keep as many query heads as the others, but in {module.name} "
            f"the plan keeps query heads {list(units)}, {sizes} per key/value head; cut whole groups (unit: group) "
            "or the same number in every group (unit: query)"
        )


def _in_words(kind: str, units: int, groups: int) -> str:
    return f"{units} query and {groups} key/value heads" if kind == ATTENTION else f"{units} {UNIT_NAMES[kind]}s"


def compare_cut(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    batch: Mapping[str, Tensor],
) -> float:
    """Compare the cut model with the dense model with the same units masked.

    Both run in float32. In a deep model rounding may hide a wrong cut there, or look like one, so where the outputs are
    not clearly equal, both run once more in float64 on two rows.

    Args:
        dense: The model before the cut.
        slim: The model after it.
        plan: The units that stayed.
        modules: From `find_modules` on the dense model.
        batch: Inputs of the model.

    Returns:
        The largest absolute difference between elements of the first output, in the precision that decided.

    Raises:
        CutMismatchError: The difference is more than a share of the largest output, or of 1 if that is more: 1e-7 in
            float64, or 1e-4 in float32 for a model that is too large, or cannot run, in float64.

    Examples:
        >>> compare_cut(model, slim, plan, modules, batches[0]) < 1e-4
        True
    """

    def compared(dtype: torch.dtype, rows: Mapping[str, Tensor]) -> Difference:
        whole = _computing_in(dtype, dense)
        with masked_units(whole, plan, modules):
            expected = first_output(whole, rows)
        del whole  # before the other one is copied
        return Difference.of(first_output(_computing_in(dtype, slim), rows), expected)

    found, allowed = compared(torch.float32, batch), SAME_CODE
    small = 8 * sum(parameter.numel() for parameter in dense.parameters()) <= LARGEST_COPY
    if small and not found.within(SURE_IN_FLOAT32):
        rows = {n: t.double() if t.is_floating_point() else t for n, t in short_samples(dense, batch).items()}
        try:
            found, allowed = compared(torch.float64, rows), IN_FLOAT64
        except RuntimeError as error:  # whatever a kernel or a model's own code raises on a dtype it does not expect
            logger.debug("no comparison in float64: %s", memory_failure(error) or error)
    if not found.within(allowed):
        raise CutMismatchError(
            f"the cut model must equal the masked model to {allowed:g} of the largest output, but differs by {found}; "
            f"nothing was saved. Please report this architecture ({dense.config.model_type})"
        )
    return found.max_abs


def _computing_in(dtype: torch.dtype, model: PreTrainedModel) -> PreTrainedModel:
    return model if model.dtype == dtype else convert(model, dtype=dtype)


def first_output(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a model's first output (logits, or the last hidden state) in evaluation mode, without labels, on CPU.

    It is float32, or float64 if the model computes in that.
    """
    device = next(model.parameters()).device
    with evaluating(model), output_alone(model), exact_products(), torch.inference_mode():
        outputs = model(**{key: value.to(device) for key, value in inputs_of(batch).items()})
    return outputs[0].to("cpu", torch.promote_types(outputs[0].dtype, torch.float32))
