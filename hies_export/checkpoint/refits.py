"""Write the refitted layers of a compensated model beside its plan, and read them back.

A plan says which units stay. What compensation made of the consumers is in `refit.safetensors`: the parameters that it
changed, under their names in the model and in the shapes and the dtype of the slim checkpoint. The plan has its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import PlanError, root_cause
from ..values import PruningPlan

REFIT = "refit.safetensors"


def write_refit(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write refitted parameters, name -> tensor, to a file that does not exist yet."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def refit_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of refitted parameters: of names, dtypes, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def refit_beside(plan: PruningPlan, file: Path) -> Path | None:
    """Return the refitted layers that lie beside a plan; None if there are none, or the plan is of no compensated model.

    Args:
        plan: The plan.
        file: Where it was read from.
    """
    beside = file.parent / REFIT
    return beside if plan.refit is not None and beside.is_file() else None


def read_refit(plan: PruningPlan, file: Path) -> dict[str, Tensor]:
    """Return the refitted parameters of a plan, name -> tensor.

    Args:
        plan: The plan of a compensated model.
        file: What `write_refit` wrote.

    Raises:
        PlanError: There is no such file, it is damaged, or it is not of this plan.
    """
    if plan.refit is None:
        raise PlanError(
            f"refitted layers must be those of the plan, but this plan names none, got {file}; leave them out, or give "
            "the plan that was written with them"
        )
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise PlanError(
            f"refitted layers must be a {REFIT} that a compensated run wrote, but {file} is none ({root_cause(error)}); "
            "fetch it again, or go on without (--no-refit)"
        ) from error
    found = refit_digest(tensors)
    if found != plan.refit:
        raise PlanError(
            f"refitted layers must be those of the plan, whose SHA-256 is {plan.refit[:12]}, but {file} has "
            f"{found[:12]}; give the {REFIT} that was written with the plan, or go on without (--no-refit)"
        )
    return tensors


def check_refit(tensors: Mapping[str, Tensor], shapes: Mapping[str, Iterable[int]], file: Path) -> None:
    """Refuse refitted parameters that do not fit the slim model.

    Args:
        tensors: From `read_refit`.
        shapes: Name of a parameter of the slim model -> its shape.
        file: Where they were read from, for the message.

    Raises:
        PlanError: A parameter is not in the model, or has another shape.
    """
    for name, tensor in tensors.items():
        wanted = shapes.get(name)
        if wanted is None or list(tensor.shape) != list(wanted):
            has = "no such parameter" if wanted is None else f"{list(wanted)} there"
            raise PlanError(
                f"refitted layers must fit the model that the plan leaves, but {file} has {name} of shape "
                f"{list(tensor.shape)}, and the model has {has}; give the model that the plan was made for"
            )


def load_refit(model: PreTrainedModel, tensors: Mapping[str, Tensor], file: Path) -> None:
    """Put refitted parameters into a slim model, in place.

    Raises:
        PlanError: They do not fit it.
    """
    parameters = dict(model.named_parameters())
    check_refit(tensors, {name: parameter.shape for name, parameter in parameters.items()}, file)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
