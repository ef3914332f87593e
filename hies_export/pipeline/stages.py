"""The stages of a pruning, one function each: calibrate, score, select, cut, compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibrate.moments import MomentStore
from ..calibrate.statistics import DEFAULT_NEEDS, Statistics, calibration_of, collect_statistics
from ..data.batches import Batch, batches_fingerprint, size_of
from ..errors import DropError, NonFiniteError
from ..evaluate.judge import Tried
from ..evaluate.predict import Predictor, predict
from ..evaluate.promise import asked_words, found_words
from ..model.copies import round_each, same_weights, share_weights
from ..model.internals import dtypes_in
from ..model.tokens import count_tokens
from ..recipe.budget import Outcome
from ..recipe.sections import CompensationSection
from ..score.compensated import score_compensated
from ..score.criteria import AUTO, COMPENSATED, Scores, needs_of, score_units, uses_alpha
from ..select.cost import Goal
from ..select.fingerprint import digest_tensors, fingerprint
from ..select.plan import PruningPlan, library_versions
from ..select.select import select_units
from ..slim.certainty import fit_logit_scale
from ..slim.check import compare_cut, masked_units
from ..slim.cut import prune_units
from ..slim.refit import LayerFit, compensate, refit
from ..tasks import Predictions
from ..units.counts import Both
from ..units.units import PrunableModule, Selection
from .pruning import Pruning

# Refits a model that was cut by a selection, in place.
Refit = Callable[[PreTrainedModel, Selection], list[LayerFit]]
# What tells cut models apart: how the refit weighs tokens, and the kept units of every module.
Key = tuple[float, tuple[tuple[int, ...], ...]]
# Weights of tokens that deployments and `criterion: auto` try, see `CompensationSection`.
TOKEN_WEIGHTS = (1.0, 0.3, 0.1)
# The alphas that `alpha: auto` tries.
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# Criteria that `criterion: auto` tries beside `compensated`, and alphas of HIES: few, because each is cut and refitted.
AUTO_CRITERIA = ("fisher", "hies", "his")
AUTO_ALPHAS = (0.3, 0.6, 0.9, 0.99)
# Number of tokens whose gradients greedy removal uses, if the unlabelled rows have as many: with half of its FLOPs,
# MiniLM fine-tuned on STS-B kept 90 % of the predictions with 7,000 tokens, and 94 % with 14,000 (dev/LOG.md).
EFFECT_TOKENS = 16384


@dataclass(frozen=True)
class Trial:
    """A cut to judge: the scores that it was chosen by, what stays, and how its refit weighs tokens."""

    scores: Scores
    selection: Selection
    token_weights: float = 1.0

    @property
    def key(self) -> Key:
        """A key that is equal for trials of the same model."""
        return self.token_weights, tuple(kept.units for kept in self.selection.values())


@dataclass(frozen=True)
class Choice:
    """The units that stay, and what they were chosen from; if the plan was given, only `plan` is known."""

    plan: PruningPlan
    scores: Scores | None = None
    statistics: Statistics | None = None
    outcome: Outcome | None = None  # the budget, with what is predicted for the plan, or was found on held-out rows
    tried: tuple[Tried, ...] = ()  # the candidates of `alpha: auto` or `criterion: auto`
    token_weights: float = 1.0  # how refits weigh tokens

    @property
    def trial(self) -> Trial:
        """The plan as a trial; it must have been chosen, not given."""
        assert self.scores is not None
        return Trial(self.scores, self.plan.kept, self.token_weights)

    def after_cut(self, slim: Slim) -> Choice:
        """Return the choice with the slim model's plan and outcome, without moments (gigabytes)."""
        statistics = None if self.statistics is None else replace(self.statistics, moments=None)
        return replace(self, plan=slim.plan, outcome=slim.outcome, statistics=statistics)


def calibrate(pruning: Pruning, *, reported: bool = True) -> Statistics:
    """Collect the statistics that the criteria read, with the moments that refits need.

    `compensated` needs the moments alone, so the statistics are collected for it only to be `reported`. Where no unit
    goes, nothing is collected.
    """
    criterion = pruning.options.criterion
    if pruning.budget.heads == 0 or (criterion == COMPENSATED and not reported):
        return Statistics({}, calibration_of(pruning.model, pruning.rows.score), moments_of(pruning))
    pruning.progress.stage("score units: calibration rows forward and backward")
    tried = AUTO_CRITERIA if criterion == AUTO else (criterion,)
    statistics = collect_statistics(
        pruning.model,
        pruning.rows.score,
        pruning.scored,
        needs=(*DEFAULT_NEEDS, *needs_of(*tried)),
        progress=pruning.progress,
    )
    return replace(statistics, moments=moments_of(pruning))


def moments_of(pruning: Pruning) -> MomentStore | None:
    """Return the moments of the rows to refit on, collected when first read; None without such rows or compensation."""
    compensation = pruning.options.compensation
    if compensation is None or not pruning.rows.refit:
        return None
    # Layers that are refitted one after the other have moments of their own, so these are read once, for scores alone.
    read_once = compensation.sequential and not pruning.budget.searched and pruning.options.criterion != AUTO
    weighted = min(token_weights_to_try(pruning)) < 1
    return MomentStore(pruning.model, pruning.scored, pruning.rows.refit, weighted=weighted, keep=not read_once)


def score(pruning: Pruning, statistics: Statistics, criterion: str | None = None) -> list[Scores]:
    """Return the scores to choose from: several for `alpha: auto` and the criterion `auto`, otherwise one."""
    options, criterion = pruning.options, criterion or pruning.options.criterion
    score_by = partial(score_units, statistics, pruning.scored, normalize=options.normalize, seed=pruning.seed)
    if criterion == COMPENSATED:
        return [score_by_removal(pruning, statistics)]
    if criterion == AUTO:
        can_use_hies = "attention" in options.modules and "entropy" in statistics.values
        alphas = {"hies": AUTO_ALPHAS if can_use_hies else ()}  # other criteria ignore alpha, and are tried once
        simple = [score_by(criterion=name, alpha=alpha) for name in AUTO_CRITERIA for alpha in alphas.get(name, (0.0,))]
        removal = score_by_removal(pruning, statistics)
        # The first is taken unless another is clearly better; greedy removal assumes a refit.
        return [removal, *simple] if options.compensation else [*simple, removal]
    if not isinstance(options.alpha, str):
        return [score_by(criterion=criterion, alpha=options.alpha)]
    return [score_by(criterion=criterion, alpha=alpha) for alpha in (ALPHAS if uses_alpha(criterion) else (0.0,))]


def score_by_removal(pruning: Pruning, statistics: Statistics) -> Scores:
    """Return the scores of `compensated`: the order in which greedy removal takes the units."""
    pruning.progress.stage("rank units by greedy removal")
    return score_compensated(
        pruning.model,
        effect_batches(pruning),
        pruning.scored,
        moments=statistics.moments,
        unit=pruning.options.unit,
        known=pruning.chains,
        progress=pruning.progress,
    )


def effect_batches(pruning: Pruning) -> list[Batch]:
    """Return the batches that `compensated` takes gradients on to estimate the effect of each removal.

    These are the calibration batches or, if there are more rows to refit on, the first batches of these, until they
    have as many rows as the calibration batches and `EFFECT_TOKENS` tokens: both are drawn in the same order. Where
    labels say what is predicted, as those of a language model do, only the calibration batches will do.
    """
    score_rows, refit_rows = pruning.rows.score, pruning.rows.refit
    score_count = sum(map(size_of, score_rows))
    if pruning.task.places_by_labels or sum(map(size_of, refit_rows)) <= score_count:
        return score_rows
    first_batches: list[Batch] = []
    rows = tokens = 0
    for batch in refit_rows:
        if rows >= score_count and tokens >= EFFECT_TOKENS:
            break
        first_batches.append(batch)
        rows, tokens = rows + size_of(batch), tokens + count_tokens(pruning.model, batch)
    return first_batches


def select(pruning: Pruning, scores: Scores, goal: Goal) -> Selection:
    """Return the units that stay to reach a goal, by their scores and within the constraints."""
    return select_units(
        scores, pruning.modules, heads=goal.heads, table=goal.table, ratio=goal.ratio, constraints=pruning.options
    )


def token_weights_to_try(pruning: Pruning) -> tuple[float, ...]:
    """Return the `token_weights` that refits try: one, or several in a deployment and under `criterion: auto`."""
    compensation = pruning.options.compensation
    if compensation is None or compensation.method != "least_squares" or compensation.sequential:
        return (1.0,)
    if compensation.token_weights is not None:
        return (compensation.token_weights,)
    return TOKEN_WEIGHTS if pruning.fast or pruning.options.criterion == AUTO else (1.0,)


def _compensation(pruning: Pruning, token_weights: float) -> CompensationSection:
    """Return the options of the refit, which must be asked for, with these `token_weights` unless they name others."""
    compensation = pruning.options.compensation
    assert compensation is not None
    return compensation.model_copy(update={"token_weights": compensation.token_weights or token_weights})


def refit_of(pruning: Pruning, statistics: Statistics, token_weights: float = 1.0) -> Refit | None:
    """Return a function that refits a cut model in place, and rounds it as it is saved; None without compensation."""
    moments = statistics.moments
    if pruning.options.compensation is None or moments is None:
        return None

    def refit_and_round(slim: PreTrainedModel, selection: Selection) -> list[LayerFit]:
        # The layers independently of each other, also where the final cut refits them one after the other.
        compensation = _compensation(pruning, token_weights).model_copy(update={"sequential": False})
        fits = refit(slim, selection, pruning.modules, moments, compensation)
        if pruning.dtype is not None:
            for name in _changed_by(slim, pruning.modules, fits):
                parameter = slim.get_parameter(name)
                parameter.data = parameter.data.to(pruning.dtype).to(parameter.dtype)
        return fits

    return refit_and_round


def cut_beside(pruning: Pruning, selection: Selection, refit: Refit | None) -> PreTrainedModel:
    """Return a copy of the model, cut by a selection and refitted, that shares all other weights with it."""
    slim = prune_units(share_weights(pruning.model), selection, pruning.modules, inplace=True)
    if refit is not None:
        refit(slim, selection)
    return slim


def trial_model(pruning: Pruning, statistics: Statistics, trial: Trial) -> PreTrainedModel:
    """Return the model of a trial: cut, refitted, and rounded as it would be saved; see `cut_beside`."""
    return cut_beside(pruning, trial.selection, refit_of(pruning, statistics, trial.token_weights))


def predict_pruned(
    pruning: Pruning, selection: Selection, batches: Sequence[Batch], refit: Refit | None, by: Predictor = predict
) -> Predictions:
    """Return the predictions of the model that keeps only the units of a selection, `by` torch or a runtime."""
    if refit is None and by is predict:  # masked units predict the same as cut ones, at less cost
        with masked_units(pruning.model, selection, pruning.modules):
            return predict(pruning.model, batches)
    return by(cut_beside(pruning, selection, refit), batches)


def predict_trial(
    pruning: Pruning, statistics: Statistics, trial: Trial, batches: Sequence[Batch], *, by: Predictor = predict
) -> Predictions:
    """Return the predictions of the model of a trial; see `predict_pruned`."""
    return predict_pruned(pruning, trial.selection, batches, refit_of(pruning, statistics, trial.token_weights), by)


def choice_of(
    pruning: Pruning, statistics: Statistics, trial: Trial, outcome: Outcome | None, tried: tuple[Tried, ...] = ()
) -> Choice:
    """Return a trial as a choice, with a plan that records how it was made."""
    scores, calibration = trial.scores, statistics.calibration
    if scores.criterion == COMPENSATED:  # it reads other rows, and no labels
        rows = effect_batches(pruning)
        calibration = replace(
            calibration, samples=sum(map(size_of, rows)), labels="predictions", fingerprint=batches_fingerprint(rows)
        )
    compensation = pruning.options.compensation
    plan = PruningPlan(
        kept=trial.selection,
        criterion=scores.criterion,
        alpha=scores.parameters.get("alpha"),
        seed=pruning.seed,
        calibration=asdict(calibration),
        versions=library_versions(),
        model=fingerprint(pruning.model, pruning.modules),
        compensation={} if compensation is None else {"method": compensation.method},
        vocabulary=() if pruning.trimming is None else pruning.trimming.kept.rows,
    )
    return Choice(plan, scores, statistics, outcome, tried, trial.token_weights)


@dataclass(frozen=True)
class Slim:
    """A slim model, rounded to the dtype that it is saved in, and how it was checked."""

    model: PreTrainedModel
    plan: PruningPlan
    outcome: Outcome | None  # the budget, with what the held-out rows say of this model; None for a given plan
    refitted: dict[str, Tensor] | None  # the parameters that compensation changed, as saved; None without compensation
    fits: list[LayerFit]
    cut_max_abs: float  # largest difference of any output between the cut and the masked model
    logit_scale: float = 1.0  # that the logits of a language model were multiplied by, see `fit_logit_scale`


def cut(pruning: Pruning, choice: Choice) -> Slim:
    """Cut, compare with the masked model, refit and round; refuse a result that breaks its promise, see `confirm`."""
    pruning.progress.stage("cut, and compare with the masked model")
    model, modules, plan = pruning.model, pruning.modules, choice.plan
    compensation = pruning.options.compensation if plan.removes else None
    # Only a plan that was given has to be checked against the model, which `prune_units` does with a whole plan.
    slim = prune_units(share_weights(model), plan if choice.scores is None else plan.kept, modules, inplace=True)
    cut_max_abs = compare_cut(model, slim, plan, modules, pruning.sample)
    if compensation is None:
        _round(slim, pruning.dtype or slim.dtype)
        # The plan may have been made for a compensated model, but only the cut was done.
        plan = replace(plan, compensation={})
        return confirm(pruning, Slim(slim, plan, choice.outcome, None, [], cut_max_abs))
    pruning.progress.stage("refit the output projections")
    fits = _refit(pruning, choice, slim)
    logit_scale, scaled = fit_logit_scale(model, slim, pruning.rows.refit)
    dtypes = _round(slim, pruning.dtype or slim.dtype)
    refitted = {
        name: slim.get_parameter(name).detach().to(device="cpu", dtype=dtypes.get(name)).contiguous()
        for name in (*_changed_by(slim, modules, fits), *scaled)
    }
    plan = replace(plan, compensation={"method": compensation.method, "refit": digest_tensors(refitted)})
    return confirm(pruning, Slim(slim, plan, choice.outcome, refitted, fits, cut_max_abs, logit_scale))


def _refit(pruning: Pruning, choice: Choice, slim: PreTrainedModel) -> list[LayerFit]:
    """Refit a cut model in place, from the moments that were collected to choose the cut if they serve."""
    compensation, statistics = _compensation(pruning, choice.token_weights), choice.statistics
    if statistics and statistics.moments and statistics.moments.kept and not compensation.sequential:
        refit = refit_of(pruning, statistics, choice.token_weights)
        assert refit is not None
        return refit(slim, choice.plan.kept)
    dense, modules, rows, known = pruning.model, pruning.modules, pruning.rows.refit, pruning.fits
    return compensate(dense, slim, choice.plan, modules, rows, compensation, known=known, progress=pruning.progress)


def _changed_by(slim: PreTrainedModel, modules: Sequence[PrunableModule], fits: Sequence[LayerFit]) -> list[str]:
    """Return the names of the parameters that refits changed."""
    consumers = {module.name: module.consumer for module in modules}
    changed_by_method = {"none": (), "bias": ("bias",), "least_squares": ("weight", "bias")}
    names = []
    for fit in fits:
        consumer = consumers[fit.name]
        parameters = dict(slim.get_submodule(consumer).named_parameters(recurse=False))
        names += [f"{consumer}.{name}" for name in parameters if name in changed_by_method[fit.method]]
    return names


def _round(slim: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Round a model in place to the dtype it is saved in, so that evaluation, export and timing use the saved weights.

    Return the dtype of every parameter in the file; empty if it is the model's own.
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


def judge_fields(promise: Outcome) -> dict[str, Any]:
    """Return the fields of the `Judge` that decides about a promise, for `Pruning.judge`."""
    keep = promise.budget.keep
    assert keep is not None
    metrics = None if keep.metric is None else (keep.metric,)
    fields = {"metrics": metrics, "index": keep.index, "confidence": promise.confidence, "as_of": promise.samples}
    return {name: value for name, value in fields.items() if value is not None}


def confirm(pruning: Pruning, slim: Slim) -> Slim:
    """Judge a slim model, as it is served, on the held-out rows that its promise is about; return it with the outcome.

    Raises DropError if it breaks the promise. Without a promise, the model is returned as it is.
    """
    outcome = slim.outcome
    # If nothing is removed, the dense model was judged as it is served.
    if outcome is None or not outcome.budget.searched or not slim.plan.removes:
        return slim
    pruning.progress.stage("evaluate the slim model on the held-out rows")
    judge = pruning.judge(pruning.rows.held_out, **judge_fields(outcome))
    predict_served = predict if outcome.budget.timed is None else pruning.serve(outcome.budget.timed)
    found = judge.found(outcome.budget, predict_served(slim.model, judge.batches))
    confirmed = replace(outcome, found=found)
    if not confirmed.met:
        what, remedy = "compensated", "compensate on more samples, or not at all"
        if slim.refitted is None:
            what, remedy = "rounded", "set save_dtype: float32"
        raise DropError(
            f"{outcome.budget.kind} asks for {asked_words(outcome)} on the held-out rows. The model that was judged "
            f"kept to it, but the {what} one has {found_words(confirmed)}; {remedy}"
        )
    return replace(slim, outcome=confirmed)


@dataclass(frozen=True)
class Evaluation:
    """How a slim model compares with the dense one: metrics by name, stability, and rankings."""

    metrics: Mapping[str, Both[float]]
    stability: float  # share of predictions that equal the dense model's, in [0, 1]
    kept_ends: tuple[float, float] | None  # of the 95 % interval of what is kept, as in `Judge.kept`
    ranking: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of the slim model, as in `Judge.ranking`
    tolerance: float | None = None  # largest difference of numbers of a regression that are the same


def try_metrics(pruning: Pruning) -> None:
    """Judge the dense model by all metrics on the rows that `compare` reads, so that what fails there fails early."""
    if rows := pruning.rows.evaluation or pruning.rows.held_out:
        pruning.progress.stage("evaluate the dense model")
        metrics, budget = pruning.metrics, pruning.options.budget
        if budget is not None and budget.metric is not None:
            metrics = (*metrics, budget.metric)
        once = tuple(dict.fromkeys(metrics))
        judge = pruning.judge(rows, index=None, metrics=once, progress=pruning.progress)
        judge.of(judge.dense)


def compare(pruning: Pruning, slim: PreTrainedModel) -> Evaluation:
    """Compare the slim model with the dense one on the evaluation rows, or without these on the held-out ones."""
    judge = pruning.judge(pruning.rows.evaluation or pruning.rows.held_out, index=None, progress=pruning.progress)
    unchanged = pruning.trimming is None and same_weights(slim, pruning.model)
    predictions = judge.dense if unchanged else predict(slim, judge.batches, progress=pruning.progress)
    dense_quality, slim_quality = judge.of(judge.dense), judge.of(predictions)
    metrics = {name: Both(value, slim_quality.metrics[name]) for name, value in dense_quality.metrics.items()}
    ranking = judge.ranking(predictions)
    # Rankings are compared by their order, whatever the logits.
    tolerance = None if ranking else judge.task.tolerance_on(judge.dense)
    low, high = judge.kept_ends(predictions)
    # The upper end is infinite if so few rows are ranked that the dense model finds nothing in some resamples.
    ends = (low, high) if math.isfinite(high) else None
    return Evaluation(metrics, slim_quality.stability, ends, ranking, tolerance)
