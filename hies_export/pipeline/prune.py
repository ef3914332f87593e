"""Cut the dense model of a run by a plan, compensate, save and check."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import processes
from ..checkpoint.refits import RefittedLayers, digest_tensors, load_refit, write_refit
from ..checkpoint.save import save_slim
from ..checkpoint.stored import weight_files
from ..errors import NonFiniteError
from ..measure.counts import Both
from ..model.copies import round_each
from ..model.internals import dtypes_in
from ..model.tokens import first_samples
from ..progress import Progress
from ..recipe import PruningRecipe
from ..slim.check import compare_cut
from ..slim.cut import prune_units
from ..slim.refit import Compensation, LayerFit, compensate
from ..units import PrunableModule
from ..values import PruningPlan
from .load import Source
from .prepare import Prepared
from .quality import Refit
from .refitting import compensation_of, shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pruned:
    """The slim model, and how it was checked.

    Attributes:
        slim: The slim model, with the values that were saved: it is rounded to the dtype of its checkpoint.
        plan: Its plan, which names the refitted layers where there are any.
        bytes: Size of the files of weights, of the dense and the slim checkpoint.
        fits: Result of the compensation for each layer; empty without compensation.
        cut_max_abs: Largest absolute difference of any output between the cut and the masked model.
        reload_max_abs: Largest absolute difference of any output between the slim model and its reloaded checkpoint.
    """

    slim: PreTrainedModel
    plan: PruningPlan
    bytes: Both[int]
    fits: list[LayerFit]
    cut_max_abs: float
    reload_max_abs: float


def prune(
    prepared: Prepared,
    plan: PruningPlan,
    recipe: PruningRecipe,
    folder: Path,
    *,
    overwrite: bool = False,
    compensation: Compensation | None = None,
    refit: Refit | RefittedLayers | None = None,
    refit_file: Path | None = None,
    progress: Progress,
) -> Pruned:
    """Cut the dense model by a plan, compensate it if the recipe says so, and save it.

    The cut model is compared with the masked one, and the saved checkpoint with its reload. What is saved is rounded to
    the dtype of the checkpoint, and so is the model that is returned: what it is evaluated, exported and timed as is
    what the files hold.

    Args:
        prepared: The dense model and its data.
        plan: The units to keep.
        recipe: Says whether and how to compensate.
        folder: Where to save the checkpoint.
        overwrite: Replace an existing folder.
        compensation: How to compensate, where the recipe leaves that to the choice of the plan.
        refit: Refits from moments of the same dense model that were collected earlier; without it, and for
            `sequential`, moments are collected here. Or the refitted layers themselves.
        refit_file: Where to write the refitted layers of a compensated model; by default into `folder`.
        progress: Shows stages and loops.

    Raises:
        PlanError: The refitted layers are not of this model.
        NonFiniteError: A refitted weight is too large for the dtype to save in.
    """
    progress.stage("cut, and compare with the masked model")
    model, modules = prepared.model, prepared.sites
    batch = first_samples(prepared.calibration[0])
    slim = prune_units(model, plan, modules)
    cut_max_abs = compare_cut(model, slim, plan, modules, batch)
    fits = _compensate(prepared, slim, plan, recipe, compensation=compensation, refit=refit, progress=progress)
    dtypes = _round(slim, prepared.source.dtype)
    refitted = None
    if isinstance(refit, RefittedLayers) or recipe.prune.compensation is not None:
        names = refit.tensors if isinstance(refit, RefittedLayers) else _refitted(slim, modules, fits)
        refitted = {name: _as_stored(slim.get_parameter(name), dtypes.get(name)) for name in names}
    plan = _as_compensated(plan, recipe, refitted)
    progress.stage("save, load again and compare")

    def save() -> tuple[float, int]:
        if refitted is not None and refit_file is not None:
            write_refit(refitted, refit_file)
        max_abs = save_slim(
            slim,
            folder,
            plan=plan,
            batch=batch,
            processor=prepared.processor,
            dtype=prepared.source.dtype,
            refitted=refitted if refit_file is None else None,
            overwrite=overwrite,
        )
        return max_abs, sum(file.stat().st_size for file in weight_files(folder))

    reload_max_abs, size = processes.on_main(save)
    _warn_if_larger(size, prepared.source)
    return Pruned(slim, plan, Both(prepared.source.bytes, size), fits, cut_max_abs, reload_max_abs)


def _compensate(
    prepared: Prepared,
    slim: PreTrainedModel,
    plan: PruningPlan,
    recipe: PruningRecipe,
    *,
    compensation: Compensation | None,
    refit: Refit | RefittedLayers | None,
    progress: Progress,
) -> list[LayerFit]:
    """Refit a cut model in place, as the recipe says, or put refitted layers into it; see `prune`."""
    section = recipe.prune.compensation
    if isinstance(refit, RefittedLayers):
        load_refit(slim, refit)
        return []
    if section is None:
        return []
    progress.stage("refit the output projections")
    if refit and not section.sequential:
        return refit(slim, plan.kept)
    how, rows, modules = compensation or compensation_of(section), prepared.compensation, prepared.sites
    options: dict[str, Any] = {"limit_bytes": section.limit_bytes, "progress": progress}
    return shared(slim, modules, lambda: compensate(prepared.model, slim, plan, modules, rows, how, **options))


def _as_compensated(plan: PruningPlan, recipe: PruningRecipe, refitted: Mapping[str, Tensor] | None) -> PruningPlan:
    """Return a plan that says of the model that is saved with it whether it is compensated, and names its refit."""
    if refitted is None:
        # Of a plan that was made for a compensated model, only the cut was done.
        return replace(plan, compensation={})
    section = recipe.prune.compensation
    method = plan.compensation["method"] if section is None else section.method
    return replace(plan, compensation={"method": method, "refit": digest_tensors(refitted)})


def _warn_if_larger(size: int, source: Source) -> None:
    """Warn if a slim checkpoint has more bytes than its source."""
    if size > source.bytes:
        logger.warning(
            "the slim checkpoint has %.1f MB, more than the %.1f MB of its source, because it is saved in %s; set "
            "save_dtype to the dtype of the source",
            size / 1e6,
            source.bytes / 1e6,
            str(source.dtype).removeprefix("torch."),
        )


def _refitted(slim: PreTrainedModel, modules: Sequence[PrunableModule], fits: Sequence[LayerFit]) -> list[str]:
    """Return the names of the parameters that refits changed."""
    consumers = {module.name: module.consumer for module in modules}
    names = []
    for fit in fits:
        found = [name for name, _ in slim.get_submodule(consumers[fit.name]).named_parameters(recurse=False)]
        changed = {"none": (), "bias": ("bias",)}.get(fit.method, ("weight", "bias"))
        names += [f"{consumers[fit.name]}.{name}" for name in found if name in changed]
    return names


def _round(slim: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Round a model, in place, to the dtype it is saved in; return the dtype of every parameter there.

    Raises:
        NonFiniteError: A number is too large for that dtype.
    """
    if dtype == slim.dtype:
        return {}
    dtypes = dtypes_in(slim, dtype)
    if overflown := round_each(slim, dtypes):
        raise NonFiniteError(
            f"weights must fit the dtype they are saved in, but {overflown[0]} has numbers too large for "
            f"{str(dtype).removeprefix('torch.')}; set save_dtype: float32, or raise compensation.ridge"
        )
    return dtypes


def _as_stored(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    return parameter.detach().to(device="cpu", dtype=dtype or parameter.dtype).contiguous()
