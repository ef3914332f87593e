"""Check a plan against a model, and a cut against the masked model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import CutMismatchError, PlanError
from ..model.linear import weight_of
from ..model.modes import evaluating
from ..values import AttentionSite, PruningPlan
from .mask import masked_heads

TOLERANCE = 1e-4


def check_plan(plan: PruningPlan, sites: tuple[AttentionSite, ...]) -> None:
    """Refuse a plan that is not for this model.

    Raises:
        PlanError: Names or head counts differ, or an index is out of range, repeated or out of order.
    """
    if list(plan.kept) != [s.name for s in sites]:
        missing = [s.name for s in sites if s.name not in plan.kept]
        extra = [name for name in plan.kept if name not in {s.name for s in sites}]
        raise PlanError(
            f"a plan must name the attention modules of its model, but {len(missing)} are missing from it "
            f"{missing[:2]} and {len(extra)} are not in the model {extra[:2]}; make a plan for this model"
        )
    for site in sites:
        kept = plan.kept[site.name]
        if (kept.heads, kept.key_value_heads) != (site.heads, site.key_value_heads):
            raise PlanError(
                f"the plan is for {kept.heads} query and {kept.key_value_heads} key/value heads in {site.name}, but "
                f"the model has {site.heads} and {site.key_value_heads}; make a plan for this model"
            )
        for indices, count in ((kept.query, site.heads), (kept.key_value, site.key_value_heads)):
            if not indices or list(indices) != sorted(set(indices)) or not 0 <= indices[0] <= indices[-1] < count:
                raise PlanError(
                    f"kept heads must be ascending indices in [0, {count}), at least one, got {list(indices)} for "
                    f"{site.name}"
                )
        per_group = [[q for q in kept.query if q // site.group_size == g] for g in range(site.key_value_heads)]
        if tuple(g for g, heads in enumerate(per_group) if heads) != kept.key_value:
            raise PlanError(
                f"a key/value head goes when, and only when, its {site.group_size} query heads go, but in {site.name} "
                f"the plan keeps query heads {list(kept.query)} with key/value heads {list(kept.key_value)}"
            )
        if len({len(heads) for heads in per_group if heads}) > 1:
            raise PlanError(
                f"every key/value head that stays must keep as many query heads as the others, but in {site.name} the "
                f"plan keeps query heads {list(kept.query)}, {[len(h) for h in per_group]} per key/value head; cut "
                "whole groups (unit: group) or the same number in every group (unit: query)"
            )


def weight_norms(model: nn.Module, sites: tuple[AttentionSite, ...]) -> dict[str, float]:
    """What a plan remembers of its model: L2 norms of the first and the last output projection."""
    names = dict.fromkeys(site.output for site in (sites[0], sites[-1]))
    return {name: weight_of(model.get_submodule(name)).detach().double().norm().item() for name in names}


def check_weights(plan: PruningPlan, norms: Mapping[str, float]) -> None:
    """Refuse a plan made for other weights: where heads have learnt other things, what it keeps is arbitrary.

    Args:
        plan: The plan.
        norms: From `weight_norms` of the model it is to be applied to.

    Raises:
        PlanError: A norm differs by more than rounding to another dtype could make it.
    """
    for name, norm in plan.model.items():
        here = norms.get(name, math.nan)
        if not math.isclose(norm, here, rel_tol=1e-3):
            raise PlanError(
                f"a plan must be for the weights it is applied to, but {name} had an L2 norm of {norm:.6g} where "
                f"the plan was made and has {here:.6g} here; make a plan for this model"
            )


def check_cut(dense: PreTrainedModel, slim: PreTrainedModel, plan: PruningPlan, batch: Mapping[str, Tensor]) -> float:
    """Compare the cut model with the dense model whose removed heads are masked, in float32.

    Args:
        dense: The model before the cut.
        slim: The model after it.
        plan: The plan that was applied.
        batch: Inputs of the model.

    Returns:
        The largest absolute difference of any element of the output.

    Raises:
        CutMismatchError: The difference is not below 1e-4.

    Examples:
        >>> check_cut(model, slim, plan, batches[0]) < 1e-4
        True
    """
    if dense.dtype != torch.float32:
        dense, slim = copy.deepcopy(dense).float(), copy.deepcopy(slim).float()
    with masked_heads(dense, plan):
        expected = first_output(dense, batch)
    difference = max_abs(first_output(slim, batch), expected)
    if not difference < TOLERANCE:
        raise CutMismatchError(
            f"the cut model must equal the masked model to {TOLERANCE:g}, but differs by {difference:.3g}; nothing was "
            f"saved. Please report this architecture ({dense.config.model_type})"
        )
    return difference


def first_output(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The model's first output (logits, or the last hidden state), in evaluation mode, without labels; on CPU."""
    device = next(model.parameters()).device
    with evaluating(model), torch.inference_mode():
        outputs = model(**{k: v.to(device) for k, v in batch.items() if k != "labels"})
    return outputs[0].float().cpu()


def max_abs(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; infinite when shapes differ or either has a NaN."""
    if one.shape != other.shape:
        return float("inf")
    difference = (one - other).abs().max().item() if one.numel() else 0.0
    return difference if difference == difference else float("inf")
