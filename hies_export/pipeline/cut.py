"""Cut the dense model by a plan, compensate it, and save the result."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .. import processes
from ..checkpoint.refits import RefittedLayers, digest_tensors, load_refit
from ..checkpoint.save import save_slim
from ..checkpoint.weights import weight_bytes
from ..errors import DropError, NonFiniteError
from ..evaluate.judge import Judge
from ..evaluate.predict import predict
from ..model.copies import round_each
from ..model.internals import dtypes_in
from ..progress import Progress
from ..report.details import BudgetOutcome, KeepOutcome, MaxDropOutcome
from ..slim.check import compare_cut
from ..slim.cut import prune_units
from ..slim.refit import LayerFit, compensate
from ..values import PruningPlan
from .choice import Choice
from .load import Source
from .options import RefitOptions
from .prepare import Prepared
from .quality import Predictor
from .refitting import changed_by, shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slim:
    """A slim model, rounded to the dtype that it is to be saved in, and how it was checked."""

    model: PreTrainedModel
    plan: PruningPlan
    refitted: dict[str, Tensor] | None  # the parameters that compensation changed, as saved; None without compensation
    fits: list[LayerFit]
    cut_max_abs: float  # largest difference of any output between the cut and the masked model


def cut(
    prepared: Prepared,
    given: Choice | PruningPlan,
    *,
    compensation: RefitOptions | None = None,
    refit: RefittedLayers | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress,
) -> Slim:
    """Cut the dense model, compare it with the masked one, compensate it if asked to, and round it to a dtype."""
    progress.stage("cut, and compare with the masked model")
    model, modules = prepared.model, prepared.modules
    plan = given.plan if isinstance(given, Choice) else given
    # A plan that was just chosen is known to be of these weights.
    slim = prune_units(model, plan.kept if isinstance(given, Choice) else plan, modules)
    cut_max_abs = compare_cut(model, slim, plan, modules, prepared.sample)
    fits: list[LayerFit] = []
    if refit is not None:
        load_refit(slim, refit)
    elif compensation is not None:
        progress.stage("refit the output projections")
        fits = _refit(prepared, compensation, slim, given, progress)
    dtypes = _round(slim, dtype or slim.dtype)
    if refit is None and compensation is None:
        # The plan was made for a compensated model, but only the cut was done.
        return Slim(slim, replace(plan, compensation={}), None, fits, cut_max_abs)
    names = changed_by(slim, modules, fits) if refit is None else refit.tensors
    refitted = {name: _as_stored(slim.get_parameter(name), dtypes.get(name)) for name in names}
    method = plan.compensation["method"] if compensation is None else compensation.method
    plan = replace(plan, compensation={"method": method, "refit": digest_tensors(refitted)})
    return Slim(slim, plan, refitted, fits, cut_max_abs)


def _refit(
    prepared: Prepared, asked: RefitOptions, slim: PreTrainedModel, given: Choice | PruningPlan, progress: Progress
) -> list[LayerFit]:
    """Refit a cut model in place, from the moments that choosing collected, if any."""
    rows, modules = prepared.rows.compensation, prepared.modules
    how = asked.compensation()
    plan: Any = given
    if isinstance(given, Choice):
        if given.refit and not asked.sequential:
            return given.refit(slim, given.plan.kept)
        how, plan = given.compensation or how, given.plan
    extra: dict[str, Any] = {"limit_bytes": asked.limit_bytes, "progress": progress}
    return shared(slim, modules, lambda: compensate(prepared.model, slim, plan, modules, rows, how, **extra))


def _round(slim: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Round a model, in place, to the dtype it is saved in; return the dtype of every parameter there.

    Evaluation, export and timing then use the weights that the files hold.
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


def confirm(
    prepared: Prepared, slim: Slim, budget: BudgetOutcome, by: Predictor = predict, *, progress: Progress
) -> BudgetOutcome:
    """Evaluate a slim model on the held-out rows that its number of units was chosen on; `by` predicts."""
    if not isinstance(budget, MaxDropOutcome | KeepOutcome):
        return budget
    progress.stage("evaluate the slim model on the held-out rows")
    rows, judged = prepared.rows.held_out, prepared.judged
    if budget.metric is not None:
        judged = replace(judged, metrics=(budget.metric,))
    judge = Judge.on(prepared.model, rows, **asdict(judged))
    predictions = by(slim.model, rows)
    if isinstance(budget, MaxDropOutcome):
        confirmed: MaxDropOutcome | KeepOutcome = replace(budget, slim=judge.of(predictions).metrics[budget.metric])
    else:
        found, end = judge.kept(predictions) if budget.metric is None else judge.lost(predictions)
        confirmed = replace(budget, slim=found, slim_end=end)
    if not confirmed.met:
        what, remedy = "compensated", "compensate on more samples, or not at all"
        if slim.refitted is None:
            what, remedy = "rounded", "set save_dtype: float32"
        raise DropError(
            f"{budget.kind} asks for {budget.asked} on the held-out rows. The model that was judged kept to it, but "
            f"the {what} one has {confirmed.found}; {remedy}"
        )
    return confirmed


def warn_if_larger(saved: Saved, source: Source) -> None:
    """Warn if a slim checkpoint has more bytes than its source."""
    if saved.bytes > source.bytes:
        logger.warning(
            "the slim checkpoint has %.1f MB, more than the %.1f MB of its source, because it is saved in %s; set "
            "save_dtype to the dtype of the source",
            saved.bytes / 1e6,
            source.bytes / 1e6,
            str(source.dtype).removeprefix("torch."),
        )


@dataclass(frozen=True)
class Saved:
    """A slim checkpoint: the size of its weights in bytes, and the largest difference after loading it again."""

    bytes: int
    reload_max_abs: float


def save(
    slim: Slim,
    prepared: Prepared,
    folder: str | Path,
    *,
    processor: Any = None,
    dense: Path | None = None,
    dtype: torch.dtype | None = None,
    refit_file: Path | None = None,
    overwrite: bool = False,
) -> Saved:
    """Save a slim model, load it again and compare; of several processes, the first does.

    The licence in the folder `dense` is copied. The refitted layers of a compensated model go to `refit_file`, by
    default into `folder`.
    """

    def write() -> Saved:
        if slim.refitted is not None and refit_file is not None:
            save_file(slim.refitted, refit_file)
        max_abs = save_slim(
            slim.model,
            folder,
            plan=slim.plan,
            batch=prepared.sample,
            processor=processor,
            dense=dense,
            dtype=dtype,
            refitted=slim.refitted if refit_file is None else None,
            overwrite=overwrite,
        )
        return Saved(weight_bytes(folder), max_abs)

    return processes.on_main(write)
