"""Check a cut model against the masked one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from transformers import PreTrainedModel

from ..calibrate.readings import walking
from ..calibrate.walk import Call, Walk, blocks_of, is_float
from ..data.batches import inputs_of
from ..equal import IN_FLOAT64, SAME_CODE, SURE_IN_FLOAT32, Difference
from ..errors import CutMismatchError, memory_failure
from ..model.internals import exact_products
from ..model.modes import intercept
from ..select.plan import PruningPlan, selection_of
from ..units.units import PrunableModule, Selection

logger = logging.getLogger(__name__)


def masked_units(
    model: PreTrainedModel, plan: PruningPlan | Selection, modules: Sequence[PrunableModule]
) -> AbstractContextManager[None]:
    """Zero the outputs of the removed units in front of their consumers, inside the `with` block.

    Args:
        model: The dense model; restored after the block.
        plan: The units that stay.
        modules: From `find_modules` on this model.

    Examples:
        >>> with masked_units(model, plan, modules):
        ...     logits = model(**batches[0]).logits
    """
    selection = selection_of(plan)
    cut = [module for module in modules if selection[module.name].removed]
    masks = {module.name: torch.zeros(module.units * module.unit_width) for module in cut}
    for module in cut:
        masks[module.name][module.columns(selection[module.name].units)] = 1
    return intercept(model, {module.name: module.consumer for module in cut}, lambda name, x: x * masks[name].to(x))


def compare_cut(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    batch: Mapping[str, Tensor],
) -> float:
    """Compare the cut model with the dense model with the same units masked, block by block.

    Both models go through the rows side by side, in float32. A block gets the same input in both, so that rounding does
    not add up. Where its outputs are not clearly equal, the block is computed once more in float64.

    Args:
        dense: The model before the cut.
        slim: The model after it.
        plan: The units that stayed.
        modules: From `find_modules` on the dense model.
        batch: Inputs of the model.

    Returns:
        The largest absolute difference of a block's output, or the model's first one, in the precision that decided.

    Raises:
        CutMismatchError: A difference is more than a share of the largest output, or of 1 if that is more: 1e-7 in
            float64, 1e-6 in float32 after the blocks, or 1e-4 for a block that cannot run in float64.

    Examples:
        >>> compare_cut(model, slim, plan, modules, batches[0]) < 1e-4
        True
    """
    blocks = blocks_of(dense, modules, batch)
    inputs = {key: value.to(next(dense.parameters()).device) for key, value in inputs_of(batch).items()}
    largest, outputs = 0.0, dict[int, Tensor]()

    def run(model: PreTrainedModel, side: int, inputs: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            outputs[side] = model(**inputs)[0]

    walks = [Walk(model, {side: inputs}, [*blocks], partial(run, model)) for side, model in enumerate((dense, slim))]
    with masked_units(dense, plan, modules), exact_products(), walking(dense), walking(slim), ExitStack() as stack:
        masked, cut = (stack.enter_context(closing(walk.forward())) for walk in walks)
        for (block, masked_calls), (_, cut_calls) in zip(masked, cut, strict=True):
            for masked_call, cut_call in zip(masked_calls, cut_calls, strict=True):
                difference, allowed, expected = _compared(walks, masked_call, cut_call)
                masked_call.output = tree.tree_map_only(is_float, lambda t: t.to(dense.dtype), expected)
                largest = max(largest, _checked(difference, allowed, block or "the model", dense))
                cut_call.output = masked_call.output  # so that the next block has the same input in both
    # After the blocks, both models run the same code on the same numbers.
    return max(largest, _checked(Difference.of(outputs[1], outputs[0]), SURE_IN_FLOAT32, "the model", dense))


def _compared(walks: Sequence[Walk], masked: Call, cut: Call) -> tuple[Difference, float, Any]:
    """Return how far the cut block is from the masked one, the share that is allowed, and the masked one's output."""

    def compare_in(dtype: torch.dtype) -> tuple[Difference, Any]:
        outputs = [walk.compute(call, dtype) for walk, call in zip(walks, (masked, cut), strict=True)]
        expected, actual = (next(t for t in tree.tree_leaves(output) if isinstance(t, Tensor)) for output in outputs)
        return Difference.of(actual, expected), outputs[0]

    difference, output = compare_in(torch.float32)
    if not difference.within(SURE_IN_FLOAT32):
        try:
            return compare_in(torch.float64)[0], IN_FLOAT64, output
        except RuntimeError as error:  # whatever a kernel or a model's own code raises on a dtype it does not expect
            logger.debug("no comparison in float64: %s", memory_failure(error) or error)
    return difference, SAME_CODE, output


def _checked(difference: Difference, allowed: float, where: str, dense: PreTrainedModel) -> float:
    """Return the largest difference of an element; refuse one above the allowed share of the largest output."""
    if not difference.within(allowed):
        raise CutMismatchError(
            f"the cut model must equal the masked model to {allowed:g} of the largest output, but {where} differs by "
            f"{difference}; nothing was saved. Please report this architecture ({dense.config.model_type})"
        )
    return difference.max_abs
