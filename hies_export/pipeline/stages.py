"""Cut the dense model by a plan, refit and round what is left, and save it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .. import processes
from ..calibrate.moments import MomentStream
from ..calibrate.statistics import DEFAULT_NEEDS, Statistics
from ..checkpoint.load import Source
from ..checkpoint.save import digest_tensors, save_slim
from ..checkpoint.weights import weight_bytes
from ..errors import NonFiniteError
from ..evaluate.judge import Tried
from ..model.copies import round_each, share_weights
from ..model.internals import dtypes_in
from ..model.modes import threads_for
from ..progress import Progress
from ..recipe.budget import Outcome
from ..recipe.sections import CompensationSection
from ..score.criteria import AUTO, Scores
from ..select.plan import PruningPlan, dump_json
from ..slim.check import compare_cut
from ..slim.cut import prune_units
from ..slim.refit import Compensation, LayerFit, compensate, refit
from ..units.units import PrunableModule, Selection
from .prepare import Prepared
from .recipe import PruneSection

logger = logging.getLogger(__name__)


# Refits a model that was cut by a selection, in place.
Refit = Callable[[PreTrainedModel, Selection], list[LayerFit]]
# Weights of tokens that `criterion: auto` tries, see `Compensation`.
TOKEN_WEIGHTS = (1.0, 0.3, 0.1)


def cut_beside(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule], refit: Refit | None
) -> PreTrainedModel:
    """Return a model cut by a selection and refitted; only its cut weights are copies, the others are the model's."""
    slim = prune_units(share_weights(model), selection, modules, inplace=True)
    if refit is not None:
        refit(slim, selection)
    return slim


class Refitting:
    """Refits of models cut from one dense model, with one of the weights of tokens in `tried`.

    Changed parameters are rounded to `dtype`, so that the judged model is the one that will be saved.
    """

    def __init__(self, prepared: Prepared, options: PruneSection, progress: Progress, dtype: torch.dtype | None = None):
        self._prepared, self._how, self._progress, self._dtype = prepared, options.compensation, progress, dtype
        self.tried = self._token_weights(options)
        self._moments: MomentStream | None = None

    @property
    def moments(self) -> MomentStream | None:
        """The moments of the dense model; None without compensation."""
        if self._moments is None and self._how is not None:
            self._moments = MomentStream(
                self._prepared.model,
                self._prepared.modules,
                self._prepared.rows.compensation,
                limit_bytes=self._how.limit_bytes,
                weighted=min(self.tried) < 1,
                progress=self._progress,
            )
        return self._moments

    @property
    def collected(self) -> bool:
        """Whether moments are at hand, or were collected once and can be collected again."""
        return self._moments is not None and self._moments.passes > 0

    def _token_weights(self, options: PruneSection) -> tuple[float, ...]:
        how = options.compensation
        if how is None or how.method != "least_squares" or how.sequential:
            return (1.0,)
        if how.token_weights is not None:
            return (how.token_weights,)
        return TOKEN_WEIGHTS if options.criterion == AUTO else (1.0,)

    def compensation(self, token_weights: float | None = None) -> Compensation | None:
        """Return how to compensate; None not to."""
        return None if self._how is None else compensation_of(self._how, token_weights or self.tried[0])

    def by(self, token_weights: float | None = None) -> Refit | None:
        """Return what refits a cut model with the given weights of tokens; None without compensation."""
        how, moments, modules = self.compensation(token_weights), self.moments, self._prepared.modules
        if how is None or moments is None:
            return None

        def refitted(slim: PreTrainedModel, selection: Selection) -> list[LayerFit]:
            with threads_for(self._prepared.model, self._prepared.rows.compensation):
                fits = refit(slim, selection, modules, moments, how)
            if self._dtype is not None:
                for name in changed_by(slim, modules, fits):
                    parameter = slim.get_parameter(name)
                    parameter.data = parameter.data.to(self._dtype).to(parameter.dtype)
            return fits

        return refitted


def changed_by(slim: PreTrainedModel, modules: Sequence[PrunableModule], fits: Sequence[LayerFit]) -> list[str]:
    """Return the names of the parameters that refits changed."""
    consumers = {module.name: module.consumer for module in modules}
    names = []
    for fit in fits:
        found = [name for name, _ in slim.get_submodule(consumers[fit.name]).named_parameters(recurse=False)]
        changed = {"none": (), "bias": ("bias",)}.get(fit.method, ("weight", "bias"))
        names += [f"{consumers[fit.name]}.{name}" for name in found if name in changed]
    return names


@dataclass(frozen=True)
class Choice:
    """The plan of a run, and the statistics and scores that it was chosen from."""

    statistics: Statistics
    scores: Scores
    plan: PruningPlan
    alpha_curve: tuple[Mapping[str, Any], ...]  # one entry per alpha under `alpha: auto`, see `AlphaPoint`
    tried: tuple[Tried, ...]  # what `criterion: auto` judged
    outcome: Outcome  # the budget, with what is predicted for the plan
    compensation: Compensation | None = None
    refit: Refit | None = None  # from moments that were collected in choosing; None if there are none

    def write(self, folder: Path) -> None:
        """Write scores.json (statistics and scores per unit) and plan.json."""
        statistics, scores = self.statistics, self.scores
        calibration = statistics.calibration
        written = {
            "criterion": scores.criterion,
            "parameters": scores.parameters,
            "scores": scores.scores,
            **{name: statistics.values.get(name, {}) for name in DEFAULT_NEEDS},
            "samples": calibration.samples,
            "labels": calibration.labels,
            "fingerprint": calibration.fingerprint,
            "alpha_curve": self.alpha_curve,
        }
        (folder / "scores.json").write_text(dump_json(written), encoding="utf-8")
        (folder / "plan.json").write_text(self.plan.to_json(), encoding="utf-8")

    def head_numbers(self) -> dict[str, dict[str, list[float]]]:
        """Return lists of HIS, entropy and score over the heads: module name -> "his", "entropy" or "score" -> list."""
        values = {**self.statistics.values, "score": self.scores.scores}
        values = {what: values[what] for what in ("his", "entropy", "score") if what in values}
        return {
            name: {what: numbers[name].tolist() for what, numbers in values.items() if name in numbers}
            for name in self.scores.scores
        }


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
    compensation: CompensationSection | None = None,
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
    if compensation is not None:
        progress.stage("refit the output projections")
        fits = _refit(prepared, compensation, slim, given, progress)
    dtypes = _round(slim, dtype or slim.dtype)
    if compensation is None:
        # The plan was made for a compensated model, but only the cut was done.
        return Slim(slim, replace(plan, compensation={}), None, fits, cut_max_abs)
    names = changed_by(slim, modules, fits)
    stored = {name: _as_stored(slim.get_parameter(name), dtypes.get(name)) for name in names}
    plan = replace(plan, compensation={"method": compensation.method, "refit": digest_tensors(stored)})
    return Slim(slim, plan, stored, fits, cut_max_abs)


def compensation_of(asked: CompensationSection, token_weights: float = 1.0) -> Compensation:
    """Return how a section asks to compensate, with the given weights of tokens where it leaves them open."""
    weights = asked.token_weights or token_weights
    return Compensation(asked.method, ridge=asked.ridge, sequential=asked.sequential, token_weights=weights)


def _refit(
    prepared: Prepared,
    asked: CompensationSection,
    slim: PreTrainedModel,
    given: Choice | PruningPlan,
    progress: Progress,
) -> list[LayerFit]:
    """Refit a cut model in place, from the moments that choosing collected, if any."""
    rows, modules = prepared.rows.compensation, prepared.modules
    how = compensation_of(asked)
    plan: Any = given
    if isinstance(given, Choice):
        if given.refit and not asked.sequential:
            return given.refit(slim, given.plan.kept)
        how, plan = given.compensation or how, given.plan
    extra: dict[str, Any] = {"limit_bytes": asked.limit_bytes, "progress": progress}
    return compensate(prepared.model, slim, plan, modules, rows, how, **extra)


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
    files: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Saved:
    """Save a slim model, load it again and compare; of several processes, the first does.

    The licence in the folder `dense` is copied; `files` are as in `save_slim`. The refitted layers of a compensated
    model go to `refit_file`, by default into `folder`.
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
            files=files,
            overwrite=overwrite,
        )
        return Saved(weight_bytes(folder), max_abs)

    return processes.on_main(write)
