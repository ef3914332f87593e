"""Tell whether a plan is for a model: by its modules, and by numbers that follow from its weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest

import torch
from torch import Tensor, nn

from ..errors import PlanError, quoted
from ..kinds import KINDS
from ..units.units import PrunableModule, Selection, check_indices

# Weights that differ by this share of their norm are different weights. Rounding to bfloat16 moves a number of a
# fingerprint by 0.001 of the norm (one standard deviation); between two fine-tunings of one model it moves by 0.04.
FINGERPRINT_TOLERANCE = 0.006

# Signs repeat after this many elements.
SIGN_PERIOD = 1 << 20
# Odd 64-bit numbers, written as signed ones, which hash an index: one factor for each pattern of signs.
_FACTORS = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1)
_MIX = -0x40A7B892E31B1A47


def fingerprint(model: nn.Module, modules: Sequence[PrunableModule]) -> dict[str, tuple[float, ...]]:
    """Return layer -> fingerprint of its weight, for the layers of the first and the last module."""
    names = dict.fromkeys(name for m in (modules[0], modules[-1]) for name in m.layers)
    # As it is stored, not as `weight_of` turns it.
    return {name: fingerprint_of(model.get_parameter(f"{name}.weight").detach()) for name in names}


def fingerprint_of(tensor: Tensor) -> tuple[float, ...]:
    """Return the L2 norm of a tensor, and the sums of its elements under two fixed patterns of signs.

    The norms of two fine-tunings of one model differ by less than a thousandth. Their signed sums differ by about as
    large a share of the norm as the weights do (random projections, Johnson and Lindenstrauss 1984).
    """
    squares, sums = 0.0, torch.zeros(len(_FACTORS), dtype=torch.float64)
    for elements in tensor.flatten().split(SIGN_PERIOD):
        numbers = elements.double()
        squares += numbers.square().sum().item()
        sums += (_signs(numbers.device)[:, : len(numbers)] @ numbers).cpu()
    return (squares**0.5, *sums.tolist())


@cache
def _signs(device: torch.device) -> Tensor:
    """Return two fixed patterns of signs, (2, SIGN_PERIOD); torch's own generators may change between versions."""
    hashed = torch.arange(SIGN_PERIOD, device=device) * torch.tensor(_FACTORS, device=device)[:, None]
    hashed = (hashed ^ (hashed >> 29)) * _MIX
    return torch.where(hashed < 0, -1.0, 1.0).double()


def check_selection(selection: Selection, modules: Sequence[PrunableModule]) -> None:
    """Refuse, by a `PlanError`, a selection that does not fit the modules of a model."""
    planned = [(name, kept.kind, kept.total, kept.groups) for name, kept in selection.items()]
    actual = [(module.name, module.kind, module.units, module.groups) for module in modules]
    for in_plan, in_model in zip_longest(planned, actual):
        if in_plan != in_model:
            raise PlanError(
                "a plan must name the modules of its model with their kinds, units and groups, in the model's order, "
                f"but it has {quoted(in_plan)} where the model has {in_model}; make a plan for this model"
            )
    for module in modules:
        units = selection[module.name].units
        try:
            check_indices(units, module.units, what=f"kept {KINDS[module.kind].units}")
        except ValueError as error:
            raise PlanError(f"{error} for {module.name}") from error
        sizes = [*Counter(unit // module.group_size for unit in units).values()]  # heads kept in each group
        if len(set(sizes)) > 1:
            raise PlanError(
                f"every key/value head that stays must keep as many query heads as the others, but {module.name} keeps "
                f"{sizes}; cut whole groups (unit: group) or the same number in every group (unit: query)"
            )


def check_weights(made_for: Mapping[str, Sequence[float]], model: Mapping[str, Sequence[float]]) -> None:
    """Refuse, by a PlanError, a plan made for weights other than the model's; both are layer -> fingerprint."""
    lacking = next((name for name in made_for if name not in model), None)
    if lacking is not None:
        raise PlanError(f"a plan must be for the weights it is applied to, but this model has no {lacking}; {_ADVICE}")
    distances = {name: _distance(made, model[name]) for name, made in made_for.items()}
    others = [name for name in made_for if not distances[name] <= FINGERPRINT_TOLERANCE]  # NaN too
    if others:
        name = max(others, key=distances.__getitem__)
        raise PlanError(
            f"a plan must be for the weights it is applied to, but those of {name} differ from the ones it was made "
            f"for, by about {distances[name]:.2g} of their norm or more; {_ADVICE}"
        )


def _distance(made: Sequence[float], here: Sequence[float]) -> float:
    """Return the largest difference of two fingerprints, as a share of the first one's norm (which may be 0)."""
    return max(abs(number - other) for number, other in zip(made, here, strict=True)) / max(made[0], 1e-30)


_ADVICE = "make a plan for this model; to cut it all the same, give --force (in Python force=True, or plan.kept)"


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of tensors, in the order of their names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
