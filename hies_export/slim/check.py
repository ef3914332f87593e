"""Check a plan against a model, and a cut model against the masked one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.targets import inputs_of
from ..errors import CutMismatchError, PlanError
from ..kinds import ATTENTION, MLP, UNIT_NAMES
from ..model.copies import convert
from ..model.internals import exact_products
from ..model.modes import evaluating, output_alone
from ..units import PrunableModule, Selection, check_indices
from ..values import PruningPlan
from .mask import masked_units

TOLERANCE = 1e-4

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
    """Compare the cut model with the dense model with the same units masked, in float32.

    Args:
        dense: The model before the cut.
        slim: The model after it.
        plan: The units that stayed.
        modules: From `find_modules` on the dense model.
        batch: Inputs of the model.

    Returns:
        The largest absolute difference between elements of the first output.

    Raises:
        CutMismatchError: The difference is not below 1e-4.

    Examples:
        >>> compare_cut(model, slim, plan, modules, batches[0]) < 1e-4
        True
    """
    whole = _in_float32(dense)
    with masked_units(whole, plan, modules):
        expected = first_output(whole, batch)
    del whole  # before the other one is copied
    difference = max_abs(first_output(_in_float32(slim), batch), expected)
    if not difference < TOLERANCE:
        raise CutMismatchError(
            f"the cut model must equal the masked model to {TOLERANCE:g}, but differs by {difference:.3g}; nothing was "
            f"saved. Please report this architecture ({dense.config.model_type})"
        )
    return difference


def _in_float32(model: PreTrainedModel) -> PreTrainedModel:
    return model if model.dtype == torch.float32 else convert(model, dtype=torch.float32)


def first_output(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a model's first output (logits, or the last hidden state) in evaluation mode, without labels, on CPU."""
    device = next(model.parameters()).device
    with evaluating(model), output_alone(model), exact_products(), torch.inference_mode():
        outputs = model(**{key: value.to(device) for key, value in inputs_of(batch).items()})
    return outputs[0].float().cpu()


def max_abs(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinite if shapes differ or either has a NaN."""
    if one.shape != other.shape:
        return float("inf")
    difference = (one - other).abs().max().item() if one.numel() else 0.0
    return difference if difference == difference else float("inf")
