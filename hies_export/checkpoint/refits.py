"""Write the refitted layers of a compensated model beside its plan, and read them back.

A plan says which units stay. What compensation made of the consumers is in `refit.safetensors`: the parameters that it
changed, under their names in the model and in the shapes and the dtype of the slim checkpoint. The plan has its digest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import PlanError, root_cause
from ..values import PruningPlan

REFIT = "refit.safetensors"

logger = logging.getLogger(__name__)

_CARD = """\
---
library_name: transformers
tags:
- hies-export
- pruning
---

# Cut without its compensation

The plan of this checkpoint was made for a model whose output projections are refitted after the cut ({method}). They
were **not** refitted here: the files hold the weights of the dense model, without the units that were removed. What was
measured of the refitted model does not hold for this one.

`hies-export apply PLAN MODEL -o DIR --refit FILE` cuts and takes the refitted layers, which a compensated run writes
beside its plan as `refit.safetensors`; `hies-export prune RECIPE --plan PLAN -o DIR` refits them anew.
"""


@dataclass(frozen=True)
class RefittedLayers:
    """The refitted parameters of a compensated model.

    Attributes:
        file: Where they were read from.
        tensors: Name of a parameter -> tensor, in the shape and dtype of the slim checkpoint.
    """

    file: Path
    tensors: Mapping[str, Tensor]


def write_refit(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write refitted parameters, name -> tensor, to a file that does not exist yet."""
    save_file(dict(tensors), file)


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of refitted parameters in memory; see `refit_digest`."""
    parts = ((name, t.dtype, t.shape, [memoryview(_bytes(t))]) for name, t in sorted(tensors.items()))
    return refit_digest(parts)


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def refit_digest(parts: Iterable[tuple[str, torch.dtype, Sequence[int], Iterable[memoryview]]]) -> str:
    """Return the SHA-256 of tensors: of their names, dtypes, shapes and bytes.

    Args:
        parts: Name, dtype, shape and consecutive bytes of each tensor, in the order of the names.
    """
    total = hashlib.sha256()
    for name, dtype, shape, blocks in parts:
        total.update(f"{name}\0{dtype}\0{tuple(shape)}\0".encode())
        for block in blocks:
            total.update(block)
    return total.hexdigest()


def refit_beside(plan: PruningPlan, file: Path) -> Path | None:
    """Return the refitted layers that lie beside a plan; None if there are none, or the plan names none.

    Args:
        plan: The plan.
        file: Where it was read from.
    """
    beside = file.parent / REFIT
    return beside if plan.refit is not None and beside.is_file() else None


def read_refit(plan: PruningPlan, file: Path) -> RefittedLayers:
    """Return the refitted parameters of a plan.

    Args:
        plan: The plan of a compensated model.
        file: What `write_refit` wrote.

    Raises:
        PlanError: There is no such file, it is damaged, or it is not of this plan.
    """
    check_given(plan, file)
    try:
        tensors = load_file(file)
    except Exception as error:  # the system, safetensors and torch: each raises its own kind
        raise PlanError(
            f"refitted layers must be a {REFIT} that a compensated run wrote, but {file} is none "
            f"({root_cause(error)}); {_ADVICE}"
        ) from error
    check_digest(plan, digest_tensors(tensors), file)
    return RefittedLayers(file, tensors)


def check_given(plan: PruningPlan, file: Path) -> None:
    """Refuse refitted layers for a plan that names none, and a file that is not there.

    Raises:
        PlanError: The plan names none, or there is no such file.
    """
    if plan.refit is None:
        raise PlanError(
            f"refitted layers must be those of the plan, but this plan names none, got {file}; leave them out "
            "(refit=None), or give the plan that was written with them"
        )
    if not file.is_file():
        raise PlanError(f"refitted layers must be a file, but there is no {file}; {_ADVICE}")


def check_digest(plan: PruningPlan, found: str, file: Path) -> None:
    """Refuse refitted layers of another plan.

    Raises:
        PlanError: Their digest is not the one in the plan.
    """
    if found != plan.refit:
        raise PlanError(
            f"refitted layers must be those of the plan, whose digest is {str(plan.refit)[:12]}, but that of {file} is "
            f"{found[:12]}; {_ADVICE}"
        )


def check_refit(found: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]], file: Path) -> None:
    """Refuse refitted parameters that do not fit the slim model.

    Args:
        found: Name of a refitted parameter -> its shape.
        shapes: Name of a parameter of the slim model -> its shape.
        file: Where the refitted ones are, for the message.

    Raises:
        PlanError: A parameter is not in the model, or has another shape.
    """
    for name, shape in found.items():
        wanted = shapes.get(name)
        if wanted is None or list(shape) != list(wanted):
            has = "no such parameter" if wanted is None else f"{list(wanted)} there"
            raise PlanError(
                f"refitted layers must fit the model that the plan leaves, but {name} is {list(shape)} in {file}, and "
                f"the model has {has}; {_ADVICE}"
            )


def warn_uncompensated(plan: PruningPlan, folder: Path | None = None) -> None:
    """Warn that a model is cut by the plan of a compensated one, without its compensation.

    Args:
        plan: The plan.
        folder: The slim checkpoint, whose card shall say it too.
    """
    remedy = "" if plan.refit is None else f"give the {REFIT} of the run that made the plan as refit=, or "
    logger.warning(
        "the plan is of a model that is refitted after the cut (compensation: %s), and the layers are NOT refitted "
        "here: quality is that of cutting alone; %srefit anew with compensate",
        plan.compensation.get("method"),
        remedy,
    )
    if folder is not None:
        (folder / "README.md").write_text(_CARD.format(method=plan.compensation.get("method")), encoding="utf-8")


def load_refit(model: PreTrainedModel, refitted: RefittedLayers) -> None:
    """Put refitted parameters into a slim model, in place.

    Raises:
        PlanError: They do not fit it.
    """
    parameters = dict(model.named_parameters())
    found = {name: tensor.shape for name, tensor in refitted.tensors.items()}
    check_refit(found, {name: parameter.shape for name, parameter in parameters.items()}, refitted.file)
    with torch.no_grad():
        for name, tensor in refitted.tensors.items():
            parameters[name].copy_(tensor)


_ADVICE = f"give the {REFIT} that was written with the plan, or cut without it (refit=None)"
