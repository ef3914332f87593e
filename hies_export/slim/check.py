"""Check a plan against a model, and a cut model against the masked one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import inputs_of
from ..equal import IN_FLOAT64, SAME_CODE, SURE_IN_FLOAT32, Difference
from ..errors import CutMismatchError, PlanError, memory_failure
from ..kinds import ATTENTION, MLP, UNIT_NAMES
from ..model.copies import convert
from ..model.internals import exact_products
from ..model.modes import evaluating, output_alone
from ..model.tokens import short_samples
from ..units import PrunableModule, Selection, check_indices
from ..values import PruningPlan
from .mask import masked_units

logger = logging.getLogger(__name__)

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
                f"the plan is for {_counts(kept.kind, kept.total, kept.groups)} in {module.name}, but the model has "
                f"{_counts(module.kind, module.units, module.groups)}; make a plan for this model"
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


def _counts(kind: str, units: int, groups: int) -> str:
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
    found, allowed = _masked_and_cut(dense, slim, plan, modules, batch, torch.float32), SAME_CODE
    if not found.within(SURE_IN_FLOAT32) and (exact := _in_float64(dense, slim, plan, modules, batch)) is not None:
        found, allowed = exact, IN_FLOAT64
    if not found.within(allowed):
        raise CutMismatchError(
            f"the cut model must equal the masked model to {allowed:g} of the largest output, but differs by {found}; "
            f"nothing was saved. Please report this architecture ({dense.config.model_type})"
        )
    return found.max_abs


def _masked_and_cut(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    batch: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Difference:
    """Compare the first outputs of both models, computed in a dtype."""
    whole = _computing_in(dtype, dense)
    with masked_units(whole, plan, modules):
        expected = first_output(whole, batch)
    del whole  # before the other one is copied
    return Difference.of(first_output(_computing_in(dtype, slim), batch), expected)


def _in_float64(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    batch: Mapping[str, Tensor],
) -> Difference | None:
    """Compare two rows in float64; None if a model is too large for it, or its code mixes precisions."""
    if 8 * sum(parameter.numel() for parameter in dense.parameters()) > LARGEST_COPY:
        return None
    rows = {n: t.double() if t.is_floating_point() else t for n, t in short_samples(dense, batch).items()}
    try:
        return _masked_and_cut(dense, slim, plan, modules, rows, torch.float64)
    except RuntimeError as error:  # whatever a kernel or a model's own code raises on a dtype it does not expect
        logger.debug("no comparison in float64: %s", memory_failure(error) or error)
        return None


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
