"""Judge models on the evaluation batches: metrics, and the agreement with the dense model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..evaluate.judge import compute_metrics, stability, standard_error
from ..evaluate.lm_eval import run_benchmarks
from ..evaluate.predict import Predictions, predict, predicted, references
from ..model.copies import share_weights
from ..progress import Progress
from ..recipe import PruningRecipe
from ..slim.cut import prune_heads
from ..slim.mask import masked_heads
from ..slim.refit import LayerFit
from ..values import AttentionSite, PruningPlan
from .prepare import Prepared
from .search import Judgement

Refit = Callable[[PreTrainedModel, PruningPlan], list[LayerFit]]


def evaluate(
    prepared: Prepared, slim: PreTrainedModel, plan: PruningPlan, recipe: PruningRecipe, *, progress: Progress
) -> dict[str, Any]:
    """Judge dense and slim on the evaluation batches; where there was compensation, also what it started from.

    Returns:
        metrics: name -> dense and slim value; stability: share of equal predictions; uncompensated: metrics and
        stability of the cut alone, or None; benchmarks: of lm-eval, name -> dense and slim value.
    """
    progress.stage("evaluate")

    def logits_of(model: PreTrainedModel) -> Predictions:
        return predict(model, prepared.evaluation, progress=lambda batches: progress.track(batches, "evaluate"))

    dense_logits, slim_logits = logits_of(prepared.model), logits_of(slim)

    def judged(logits: Predictions) -> tuple[dict[str, float], float]:
        return judge(prepared, prepared.evaluation, dense_logits, logits, recipe)

    uncompensated = None
    if recipe.prune.compensation is not None:
        # The masked model is the cut one without compensation: `check_cut` has just shown it.
        with masked_heads(prepared.model, plan):
            metrics, share = judged(logits_of(prepared.model))
        uncompensated = {"metrics": metrics, "stability": share}
    (dense, _), (slim_values, share) = judged(dense_logits), judged(slim_logits)
    return {
        "metrics": {name: {"dense": dense[name], "slim": slim_values[name]} for name in prepared.metrics},
        "stability": share,
        "uncompensated": uncompensated,
        "benchmarks": _benchmarks(prepared, slim, recipe, progress=progress),
    }


def _benchmarks(
    prepared: Prepared, slim: PreTrainedModel, recipe: PruningRecipe, *, progress: Progress
) -> dict[str, dict[str, float]]:
    asked = recipe.evaluation
    if not asked.lm_eval:
        return {}
    progress.stage("benchmarks")
    dense, pruned = (
        run_benchmarks(model, prepared.processor, asked.lm_eval, samples=asked.samples, batch_size=asked.batch_size)
        for model in (prepared.model, slim)
    )
    return {name: {"dense": dense[name], "slim": pruned[name]} for name in dense}


def judge(
    prepared: Prepared,
    batches: list[dict[str, Tensor]],
    dense_logits: Predictions,
    logits: Predictions,
    recipe: PruningRecipe,
    *,
    names: Sequence[str] = (),
) -> tuple[dict[str, float], float]:
    """Metrics of some logits, by default the report's, and their stability.

    Without labels the dense model's predictions are the reference, and its own value is perfect by definition.
    """
    labelled = "labels" in batches[0]
    expected = references(batches) if labelled else predicted(dense_logits, regression=prepared.regression)
    metrics = compute_metrics(logits, expected, names=names or prepared.metrics, regression=prepared.regression)
    tolerance = recipe.evaluation.stability_tolerance
    return metrics, stability(dense_logits, logits, regression=prepared.regression, tolerance=tolerance)


def predict_pruned(
    model: PreTrainedModel,
    plan: PruningPlan,
    sites: tuple[AttentionSite, ...],
    batches: Sequence[dict[str, Tensor]],
    *,
    refit: Refit | None = None,
) -> Predictions:
    """What the model predicts without the heads that a plan removes.

    Args:
        model: The dense model; not changed.
        plan: The heads that stay.
        sites: All of its attention modules.
        batches: What to predict.
        refit: Refits a model, in place, that was cut by a plan. Without it heads are masked and nothing is cut, which
            comes to the same and is cheaper.
    """
    if refit is None:
        with masked_heads(model, plan):
            return predict(model, batches)
    # What is cut is new, the rest is shared with the dense model.
    slim = prune_heads(share_weights(model), plan, sites, inplace=True)
    refit(slim, plan)
    return predict(slim, batches)


def judgement(
    prepared: Prepared,
    batches: list[dict[str, Tensor]],
    dense_logits: Predictions,
    logits: Predictions,
    recipe: PruningRecipe,
) -> Judgement:
    """What alphas are compared by: stability and, where there are labels, the first metric with its standard error."""
    metrics, share = judge(prepared, batches, dense_logits, logits, recipe)
    if "labels" not in batches[0]:
        return Judgement(None, 0.0, share)
    name = prepared.metrics[0]
    error = standard_error(logits, references(batches), name=name, regression=prepared.regression)
    return Judgement(metrics[name], error, share)


def held_out_metric(prepared: Prepared, recipe: PruningRecipe, dense_logits: Predictions, logits: Predictions) -> float:
    """The budget's metric on the held-out rows; without labels, against the dense model's predictions."""
    drop = recipe.prune.budget.max_drop
    assert drop is not None
    metrics, _ = judge(prepared, prepared.held_out, dense_logits, logits, recipe, names=(drop.metric,))
    return metrics[drop.metric]
