"""Write the refitted layers of a compensated model beside its plan, and read them back.

A plan lists the units that stay. The compensated consumers are in `refit.safetensors`: the changed parameters, under
their names in the model and in the shapes and the dtype of the slim checkpoint. The plan has its digest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import PlanError, refusing
from ..values import PruningPlan

REFIT = "refit.safetensors"

logger = logging.getLogger(__name__)

_CARD = """\
# Cut without its compensation

The plan of this checkpoint was made for a model whose output projections are refitted after the cut ({method}). They
were **not** refitted here: the files hold the weights of the dense model, without the units that were removed.
Measurements of the refitted model do not hold for this one.

`hies-export apply PLAN MODEL -o DIR --refit FILE` cuts and uses the refitted layers, which a compensated run writes
beside its plan as `refit.safetensors`. `prune(model, batches, plan=PLAN, compensation=...)` in Python refits them anew.
"""


@dataclass(frozen=True)
class RefittedLayers:
    """The refitted parameters of a compensated model, by name, and the file that they were read from."""

    file: Path
    tensors: Mapping[str, Tensor]


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of tensors, in the order of their names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def refit_beside(plan: PruningPlan, file: Path) -> Path | None:
    """Return the refitted layers beside the file of a plan; None if there are none, or the plan names none."""
    beside = file.parent / REFIT
    return beside if plan.refit is not None and beside.is_file() else None


def read_refit(plan: PruningPlan, file: Path) -> RefittedLayers:
    """Return a plan's refitted parameters, after checking that the plan was written with this file."""
    if plan.refit is None:
        raise PlanError(
            f"refitted layers must be those of the plan, but this plan names none, got {file}; leave them out "
            "(refit=None), or give the plan that was written with them"
        )
    with refusing(f"refitted layers must be a safetensors file, but {file} is none", _ADVICE, PlanError):
        tensors = load_file(file)
    found = digest_tensors(tensors)
    if found != plan.refit:
        raise PlanError(
            f"refitted layers must be those of the plan, whose digest is {plan.refit[:12]}, but that of {file} is "
            f"{found[:12]}; {_ADVICE}"
        )
    return RefittedLayers(file, tensors)


def load_refit(model: PreTrainedModel, refitted: RefittedLayers) -> None:
    """Put refitted parameters into a slim model, in place; raise a `PlanError` if one does not fit, and change none."""
    state = model.state_dict()
    for name, tensor in refitted.tensors.items():
        if name not in state or tensor.shape != state[name].shape:
            has = f"{list(state[name].shape)} there" if name in state else "no such parameter"
            raise PlanError(
                f"refitted layers must fit the model that the plan leaves, but {name} is {list(tensor.shape)} in "
                f"{refitted.file}, and the model has {has}; {_ADVICE}"
            )
    with torch.no_grad():
        for name, tensor in refitted.tensors.items():
            model.get_parameter_or_buffer(name).copy_(tensor)


def warn_uncompensated(plan: PruningPlan) -> str:
    """Warn that a model is cut by a compensated model's plan but not compensated; return the same as its card."""
    method = plan.compensation.get("method")
    remedy = "" if plan.refit is None else f"give the {REFIT} of the run that made the plan as refit=, or "
    logger.warning(
        "the plan was made for a model that is refitted after the cut (compensation: %s), but its layers are NOT "
        "refitted here, so quality is that of cutting alone; %srefit anew with compensate",
        method,
        remedy,
    )
    return _CARD.format(method=method)


_ADVICE = f"give the {REFIT} that was written with the plan, or cut without it (refit=None)"
