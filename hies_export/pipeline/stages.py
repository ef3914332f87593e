"""The stages of a job, one function each: calibrate, score, select, cut, compare, save."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .. import processes
from ..calibrate.moments import MomentStore
from ..calibrate.statistics import DEFAULT_NEEDS, Statistics, collect_statistics, without_statistics
from ..checkpoint.load import Source
from ..checkpoint.save import digest_tensors, save_slim
from ..checkpoint.weights import weight_bytes
from ..data.batches import Batch, batches_fingerprint, size_of
from ..errors import DropError, NonFiniteError
from ..evaluate.judge import Quality, Tried
from ..evaluate.predict import Predictor, predict
from ..evaluate.promise import asked_words, found_words
from ..forms.deployment import DeployWay, SizeTried
from ..forms.form import Compound
from ..model.copies import round_each, same_weights, share_weights
from ..model.internals import dtypes_in
from ..model.modes import threads_for
from ..model.tokens import count_tokens
from ..recipe.budget import Outcome, TimedSection
from ..report.words import vocabulary_words
from ..score.compensated import score_compensated
from ..score.criteria import AUTO, COMPENSATED, Scores, needs_of, score_units, uses_alpha
from ..select.cost import Goal
from ..select.fingerprint import fingerprint
from ..select.plan import PruningPlan, dump_json, library_versions
from ..select.select import select_units
from ..slim.check import compare_cut, masked_units
from ..slim.cut import prune_units
from ..slim.refit import Compensation, LayerFit, compensate, refit
from ..tasks import Predictions
from ..units.counts import Both
from ..units.units import PrunableModule, Selection
from .job import Job

logger = logging.getLogger(__name__)


# Refits a model that was cut by a selection, in place.
Refit = Callable[[PreTrainedModel, Selection], list[LayerFit]]
# Weights of tokens that `criterion: auto` tries, see `Compensation`.
TOKEN_WEIGHTS = (1.0, 0.3, 0.1)
# The alphas that `alpha: auto` tries.
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# Criteria that `criterion: auto` tries beside `compensated`, and the alphas of HIES. Fewer alphas than `alpha: auto`
# tries, because each is cut and refitted.
AUTO_CRITERIA = ("fisher", "hies", "his")
AUTO_ALPHAS = (0.3, 0.6, 0.9, 0.99)
# Tokens whose gradients greedy removal uses, if there are enough unlabelled rows: with half of its FLOPs, MiniLM
# fine-tuned on STS-B kept 90 % of the predictions with 7,000 tokens, and 94 % with 14,000 (dev/LOG.md).
EFFECT_TOKENS = 16384


@dataclass(frozen=True)
class Trial:
    """A cut to judge: the scores that it was chosen by, what stays, and how its refit weighs tokens."""

    scores: Scores
    selection: Selection
    token_weights: float = 1.0


@dataclass(frozen=True)
class Choice:
    """What stays, and why; of a given plan, only the plan is known.

    Attributes:
        plan: The units that stay.
        scores, statistics: What they were chosen from.
        outcome: The budget, with what is predicted for the plan, or what was found of it on held-out rows.
        alpha_curve: One entry per alpha under `alpha: auto`, see `AlphaPoint`.
        tried: What `criterion: auto` judged.
        token_weights: How refits weigh tokens.
        served: What serves the model that was judged; None for torch.
        compound, sizes: How it is joined with the dense model, and the sizes of compounds that were tried.
        ways: The forms that `deploy` tried, and the results.
        dense_seconds: How long it took to try the dense model in them; the slim one takes about as long.
    """

    plan: PruningPlan
    scores: Scores | None = None
    statistics: Statistics | None = None
    outcome: Outcome | None = None
    alpha_curve: tuple[Mapping[str, Any], ...] = ()
    tried: tuple[Tried, ...] = ()
    token_weights: float = 1.0
    served: TimedSection | None = None
    compound: Compound | None = None
    sizes: tuple[SizeTried, ...] = ()
    ways: tuple[DeployWay, ...] = ()
    dense_seconds: float = 0.0

    @property
    def trial(self) -> Trial:
        """What a trial of the plan needs to be refitted; the plan must have been chosen, not given."""
        assert self.scores is not None
        return Trial(self.scores, self.plan.kept, self.token_weights)

    def write(self, folder: Path) -> None:
        """Write scores.json (statistics and scores per unit) and plan.json."""
        assert self.statistics is not None
        assert self.scores is not None
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
        assert self.statistics is not None
        assert self.scores is not None
        values = {**self.statistics.values, "score": self.scores.scores}
        values = {what: values[what] for what in ("his", "entropy", "score") if what in values}
        return {
            name: {what: numbers[name].tolist() for what, numbers in values.items() if name in numbers}
            for name in self.scores.scores
        }

    def done(self, slim: Slim) -> Choice:
        """Return the choice as it was carried out, without moments and gradients, which may be gigabytes."""
        statistics = self.statistics and replace(self.statistics, moments=None, gradients=None)
        return replace(self, plan=slim.plan, outcome=slim.outcome, statistics=statistics)


def calibrate(job: Job) -> Statistics:
    """Collect the statistics that the criteria read, with the moments that refits need.

    A deployment, which has to be quick, does without those that only a report shows.
    """
    if job.deploy is not None and job.options.criterion == COMPENSATED:
        return replace(without_statistics(job.model, job.rows.score), moments=moments_of(job))
    job.progress.stage("score units: calibration rows forward and backward")
    tried = AUTO_CRITERIA if job.options.criterion == AUTO else (job.options.criterion,)
    found = collect_statistics(
        job.model,
        job.rows.score,
        job.scored,
        needs=(*DEFAULT_NEEDS, *needs_of(*tried)),
        # A language model's loss is what greedy removal keeps small, too.
        keep=job.options.criterion in (COMPENSATED, AUTO) and job.task.generative and "labels" in job.rows.score[0],
        progress=job.progress,
    )
    return replace(found, moments=moments_of(job))


def moments_of(job: Job) -> MomentStore | None:
    """Return the moments of the rows to refit on, collected when first read; None without such rows."""
    if not job.rows.refit:
        return None
    how = job.options.compensation
    once = how is not None and how.sequential and not job.budget.searched and job.options.criterion != AUTO
    weighted = min(token_weights_of(job)) < 1
    return MomentStore(job.model, job.scored, job.rows.refit, weighted=weighted, keep=not once)


def score(job: Job, statistics: Statistics, criterion: str | None = None) -> list[Scores]:
    """Return the scores to choose from: one per alpha under `alpha: auto`, more for the criterion `auto`."""
    options, criterion = job.options, criterion or job.options.criterion

    def by(name: str, alpha: float) -> Scores:
        how: dict[str, Any] = {"criterion": name, "alpha": alpha, "normalize": options.normalize, "seed": job.seed}
        return score_units(statistics, job.scored, **how)

    if criterion == COMPENSATED:
        return [score_by_removal(job, statistics)]
    if criterion == AUTO:
        simple = [
            by(name, alpha)
            for name in AUTO_CRITERIA
            if name != "hies" or ("attention" in options.modules and "entropy" in statistics.values)
            for alpha in (AUTO_ALPHAS if name == "hies" else (0.0,))
        ]
        removal = score_by_removal(job, statistics)
        # The first is taken unless another is clearly better. It assumes a refit.
        return [removal, *simple] if options.compensation else [*simple, removal]
    if not isinstance(options.alpha, str):
        return [by(criterion, options.alpha)]
    return [by(criterion, alpha) for alpha in (ALPHAS if uses_alpha(criterion) else (0.0,))]


def score_by_removal(job: Job, statistics: Statistics) -> Scores:
    """Return the scores of greedy removal."""
    job.progress.stage("rank units by greedy removal")
    return score_compensated(
        job.model,
        effect_batches(job),
        job.scored,
        moments=statistics.moments,
        gradients=statistics.gradients,
        per_sample=not job.task.generative,
        known=job.journal.chains,
        progress=job.progress,
    )


def effect_batches(job: Job) -> list[Batch]:
    """Return the batches whose gradients greedy removal takes.

    These are the calibration rows. If they have fewer than `EFFECT_TOKENS` tokens, rows to refit on are added until
    that number is reached. Both are drawn in the same order. Where labels say what is predicted, as those of a language
    model do, only calibration rows are used.
    """
    scored, more = job.rows.score, job.rows.refit
    if job.task.places_by_labels or sum(map(size_of, more)) <= sum(map(size_of, scored)):
        return scored
    enough: list[Batch] = []
    samples = tokens = 0
    for batch in more:
        if samples >= sum(map(size_of, scored)) and tokens >= EFFECT_TOKENS:
            break
        enough.append(batch)
        samples, tokens = samples + size_of(batch), tokens + count_tokens(job.model, batch)
    return enough


def select(job: Job, scores: Scores, goal: Goal) -> Selection:
    """Return the units that stay."""
    return select_units(scores, job.modules, constraints=job.options.constraints, **vars(goal))


def token_weights_of(job: Job) -> tuple[float, ...]:
    """Return the weights of tokens that refits try: one, or several in a deployment and under `criterion: auto`."""
    how = job.options.compensation
    if how is None or how.method != "least_squares" or how.sequential:
        return (1.0,)
    if how.token_weights is not None:
        return (how.token_weights,)
    return TOKEN_WEIGHTS if job.deploy or job.options.criterion == AUTO else (1.0,)


def _compensation(job: Job, token_weights: float) -> Compensation:
    how = job.options.compensation
    assert how is not None
    weights = how.token_weights or token_weights
    return Compensation(how.method, ridge=how.ridge, sequential=bool(how.sequential), token_weights=weights)


def refit_of(job: Job, statistics: Statistics, token_weights: float = 1.0) -> Refit | None:
    """Return what refits a cut model from the moments, and rounds it as it will be saved; None without compensation."""
    moments = statistics.moments
    if job.options.compensation is None or moments is None:
        return None

    def refitted(slim: PreTrainedModel, selection: Selection) -> list[LayerFit]:
        how = replace(_compensation(job, token_weights), sequential=False)
        with threads_for(job.model, job.rows.refit):
            fits = refit(slim, selection, job.modules, moments, how)
        if job.dtype is not None:
            for name in _changed_by(slim, job.modules, fits):
                parameter = slim.get_parameter(name)
                parameter.data = parameter.data.to(job.dtype).to(parameter.dtype)
        return fits

    return refitted


def cut_beside(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule], refit: Refit | None
) -> PreTrainedModel:
    """Return a model cut by a selection and refitted; only its cut weights are copies, the others are the model's."""
    slim = prune_units(share_weights(model), selection, modules, inplace=True)
    if refit is not None:
        refit(slim, selection)
    return slim


def trial_model(job: Job, statistics: Statistics, trial: Trial) -> PreTrainedModel:
    """Return the model of a trial: cut, refitted and rounded as it would be saved; other weights are shared."""
    refit = refit_of(job, statistics, trial.token_weights)
    return cut_beside(job.model, trial.selection, job.modules, refit)


def predict_pruned(
    model: PreTrainedModel,
    selection: Selection,
    modules: Sequence[PrunableModule],
    batches: Sequence[Batch],
    *,
    refit: Refit | None = None,
    by: Predictor = predict,
) -> Predictions:
    """Return the model's predictions without the units that a selection removes.

    Without a refit, units are masked instead of cut, which in torch gives the same predictions at less cost.
    """
    if refit is None and by is predict:
        with masked_units(model, selection, modules):
            return predict(model, batches)
    return by(cut_beside(model, selection, modules, refit), batches)


def choice_of(job: Job, statistics: Statistics, trial: Trial, **more: Any) -> Choice:
    """Return a trial as a choice, with its plan."""
    scores, calibration = trial.scores, statistics.calibration
    if scores.criterion == COMPENSATED:
        rows = effect_batches(job)
        calibration = replace(
            calibration,
            samples=sum(map(size_of, rows)),
            labels="predictions",
            fingerprint=batches_fingerprint(rows),
        )
    how = job.options.compensation
    plan = PruningPlan(
        kept=trial.selection,
        criterion=scores.criterion,
        alpha=scores.parameters.get("alpha"),
        seed=job.seed,
        calibration={
            "samples": calibration.samples,
            "labels": calibration.labels,
            "fingerprint": calibration.fingerprint,
        },
        versions=library_versions(),
        model=fingerprint(job.model, job.modules),
        compensation={} if how is None else {"method": how.method},
        vocabulary=() if job.trimming is None else job.trimming.kept.rows,
    )
    return Choice(plan, scores, statistics, token_weights=trial.token_weights, **more)


@dataclass(frozen=True)
class Slim:
    """A slim model, rounded to the dtype that it is to be saved in, and how it was checked.

    Attributes:
        model, plan: The model, and the units that stayed.
        outcome: The budget, with what the held-out rows say of this model; None for a given plan.
        refitted: The parameters that compensation changed, as saved; None without compensation.
        fits: How well each layer was refitted.
        cut_max_abs: Largest difference of any output between the cut and the masked model.
    """

    model: PreTrainedModel
    plan: PruningPlan
    outcome: Outcome | None
    refitted: dict[str, Tensor] | None
    fits: list[LayerFit]
    cut_max_abs: float


def cut(job: Job, choice: Choice) -> Slim:
    """Cut, compare with the masked model, refit, round, and hold the result against the promise once more."""
    job.progress.stage("cut, and compare with the masked model")
    model, modules, plan = job.model, job.modules, choice.plan
    asked = job.options.compensation if plan.removes else None
    # A plan that was just chosen is known to be of these weights.
    slim = prune_units(share_weights(model), plan if choice.scores is None else plan.kept, modules, inplace=True)
    cut_max_abs = compare_cut(model, slim, plan, modules, job.sample)
    fits: list[LayerFit] = []
    if asked is not None:
        job.progress.stage("refit the output projections")
        fits = _refit(job, choice, slim)
    dtypes = _round(slim, job.dtype or slim.dtype)
    stored = None
    if asked is None:
        # The plan was made for a compensated model, but only the cut was done.
        plan = replace(plan, compensation={})
    else:
        names = _changed_by(slim, modules, fits)
        stored = {name: _as_stored(slim.get_parameter(name), dtypes.get(name)) for name in names}
        plan = replace(plan, compensation={"method": asked.method, "refit": digest_tensors(stored)})
    return confirm(job, Slim(slim, plan, choice.outcome, stored, fits, cut_max_abs), choice.served)


def _refit(job: Job, choice: Choice, slim: PreTrainedModel) -> list[LayerFit]:
    """Refit a cut model in place, from the moments that choosing collected, if any."""
    asked = job.options.compensation
    assert asked is not None
    moments = choice.statistics and choice.statistics.moments
    if choice.statistics and moments and moments.kept and not asked.sequential:
        refit = refit_of(job, choice.statistics, choice.token_weights)
        assert refit is not None
        return refit(slim, choice.plan.kept)
    how, plan = _compensation(job, choice.token_weights), choice.plan
    known = job.journal.fits
    return compensate(job.model, slim, plan, job.modules, job.rows.refit, how, known=known, progress=job.progress)


def _changed_by(slim: PreTrainedModel, modules: Sequence[PrunableModule], fits: Sequence[LayerFit]) -> list[str]:
    consumers = {module.name: module.consumer for module in modules}
    names = []
    for fit in fits:
        found = [name for name, _ in slim.get_submodule(consumers[fit.name]).named_parameters(recurse=False)]
        changed = {"none": (), "bias": ("bias",)}.get(fit.method, ("weight", "bias"))
        names += [f"{consumers[fit.name]}.{name}" for name in found if name in changed]
    return names


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


def judging(promise: Outcome) -> dict[str, Any]:
    """Return the options of the judge that decides about a promise, beside those of the job."""
    budget = promise.budget
    metrics = {} if budget.metric is None else {"metrics": (budget.metric,)}
    index = {} if budget.keep is None or budget.keep.index is None else {"index": budget.keep.index}
    return {**metrics, **index, "confidence": promise.confidence, "as_of": promise.samples}


def confirm(job: Job, slim: Slim, served: TimedSection | None) -> Slim:
    """Judge a slim model, as it is served, on the held-out rows that its promise was made on; refuse a broken promise.

    Raises DropError. Without a budget that is searched for, the model is returned as it is.
    """
    outcome = slim.outcome
    if outcome is None or not outcome.budget.searched:
        return slim
    if outcome.found is not None and not slim.plan.removes:  # the dense model was judged as it is served
        return slim
    job.progress.stage("evaluate the slim model on the held-out rows")
    judge = job.judge(job.rows.held_out, **judging(outcome))
    found = judge.found(outcome.budget, job.predictor(served)(slim.model, judge.batches))
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
    uncompensated: Quality | None  # of the cut model without compensation; None if that is not asked for
    ranking: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of the slim model, as in `Judge.ranking`
    tolerance: float | None = None  # largest difference of numbers of a regression that are the same


def try_metrics(job: Job) -> None:
    """Judge the dense model, before the work, by all metrics on the rows that `compare` reads: they may fail there."""
    if rows := job.rows.evaluation or job.rows.held_out:
        job.progress.stage("evaluate the dense model")
        limited = job.options.budget and job.options.budget.metric
        metrics = dict.fromkeys((*job.metrics, *([limited] if limited else [])))
        judge = job.judge(rows, index=None, metrics=tuple(metrics), progress=job.progress)
        judge.of(judge.dense)


def compare(job: Job, slim: PreTrainedModel, *, uncompensated: Selection | None = None) -> Evaluation:
    """Compare the slim model with the dense one on the evaluation rows, in memory on the held-out ones.

    A selection that is only cut is judged beside them.
    """
    judge = job.judge(job.rows.evaluation or job.rows.held_out, index=None, progress=job.progress)

    def predictions_of(model: PreTrainedModel) -> Predictions:
        return predict(model, judge.batches, progress=job.progress)

    same = job.trimming is None and same_weights(slim, job.model)
    predictions = judge.dense if same else predictions_of(slim)
    dense, pruned, masked = judge.of(judge.dense), judge.of(predictions), None
    if uncompensated is not None:
        # Masked and cut models predict the same: `compare_cut` has checked that.
        with masked_units(job.model, uncompensated, job.modules):
            masked = judge.of(predictions_of(job.model))
    metrics = {name: Both(value, pruned.metrics[name]) for name, value in dense.metrics.items()}
    ranking = judge.ranking(predictions)
    # Rankings are compared by their order, whatever the logits.
    tolerance = None if ranking else judge.task.tolerance_on(judge.dense)
    low, high = judge.kept_ends(predictions)
    # Without end where so few rows are ranked that the dense model finds nothing in some resamples.
    ends = (low, high) if math.isfinite(high) else None
    return Evaluation(metrics, pruned.stability, ends, masked, ranking, tolerance)


@dataclass(frozen=True)
class Saved:
    """A slim checkpoint: the size of its weights in bytes, and the largest difference after loading it again."""

    bytes: int
    reload_max_abs: float


def save(
    job: Job,
    slim: Slim,
    folder: str | Path,
    *,
    processor: Any = None,
    refit_file: Path | None = None,
    overwrite: bool = False,
) -> Saved:
    """Save a slim model, load it again and compare; of several processes, the first does.

    The licence of the dense model's folder is copied. The refitted layers of a compensated model go to `refit_file`, by
    default into `folder`.
    """
    job.progress.stage("save, load again and compare")
    source = job.source
    if job.trimming is not None:
        logger.warning("%s", vocabulary_words(job.trimming.facts))

    def write() -> Saved:
        if slim.refitted is not None and refit_file is not None:
            save_file(slim.refitted, refit_file)
        max_abs = save_slim(
            slim.model,
            folder,
            plan=slim.plan,
            batch=job.sample,
            processor=processor or job.processor,
            dense=None if source is None else source.folder,
            dtype=job.dtype,
            refitted=slim.refitted if refit_file is None else None,
            wrap=job.given.wrap,
            overwrite=overwrite,
        )
        return Saved(weight_bytes(folder), max_abs)

    saved = processes.on_main(write)
    if source is not None:
        _warn_if_larger(saved, source)
    return saved


def _warn_if_larger(saved: Saved, source: Source) -> None:
    """Warn if a slim checkpoint has more bytes than its source."""
    if saved.bytes > source.bytes:
        logger.warning(
            "the slim checkpoint has %.1f MB, more than the %.1f MB of its source, because it is saved in %s; set "
            "save_dtype to the dtype of the source",
            saved.bytes / 1e6,
            source.bytes / 1e6,
            str(source.dtype).removeprefix("torch."),
        )
