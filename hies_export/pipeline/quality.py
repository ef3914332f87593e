"""Evaluate what was pruned: predictions by a plan, and the evaluation of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from ..evaluate.judge import Judge, Quality
from ..evaluate.predict import Predictions, predict
from ..model.copies import share_weights
from ..progress import Progress
from ..slim.cut import prune_heads
from ..slim.mask import masked_heads
from ..slim.refit import LayerFit
from ..values import AttentionSite, PruningPlan

# Refits, in place, a model that was cut by a plan.
Refit = Callable[[PreTrainedModel, PruningPlan], list[LayerFit]]
# Runs benchmarks on a model: name -> value.
Benchmark = Callable[[PreTrainedModel], Mapping[str, float]]


def predict_pruned(
    model: PreTrainedModel,
    plan: PruningPlan,
    sites: tuple[AttentionSite, ...],
    batches: Sequence[dict[str, Tensor]],
    *,
    refit: Refit | None = None,
) -> Predictions:
    """Return what the model predicts without the heads that a plan removes.

    Args:
        model: The dense model; not changed.
        plan: The heads that stay.
        sites: All of its attention modules.
        batches: What to predict.
        refit: What compensates the cut model. Without it heads are masked instead of cut, which gives the same
            predictions at less cost.
    """
    if refit is None:
        with masked_heads(model, plan):
            return predict(model, batches)
    # What is cut is new, the rest is shared with the dense model.
    slim = prune_heads(share_weights(model), plan, sites, inplace=True)
    refit(slim, plan)
    return predict(slim, batches)


@dataclass(frozen=True)
class DenseSlim:
    """A value of the dense and of the slim model."""

    dense: float
    slim: float


@dataclass(frozen=True)
class Evaluation:
    """How the slim model of a run compares with the dense one.

    Attributes:
        metrics: Of the evaluation batches, by name.
        stability: Share, in [0, 1], of predictions that equal the dense model's.
        uncompensated: Of the cut alone, where the slim model is compensated.
        benchmarks: Of lm-eval, by name; empty where none were asked for.
    """

    metrics: Mapping[str, DenseSlim]
    stability: float
    uncompensated: Quality | None
    benchmarks: Mapping[str, DenseSlim]


def evaluate(
    judge: Judge,
    model: PreTrainedModel,
    slim: PreTrainedModel,
    *,
    uncompensated: PruningPlan | None = None,
    benchmark: Benchmark | None = None,
    progress: Progress,
) -> Evaluation:
    """Evaluate the slim model of a run against the dense one.

    Args:
        judge: Of the evaluation batches.
        model: The dense model.
        slim: The slim model.
        uncompensated: The plan of a compensated model, to evaluate the cut alone too.
        benchmark: Runs the benchmarks that were asked for.
        progress: Told about stages and loops.
    """

    def quality_of(model: PreTrainedModel) -> Quality:
        return judge.of(predict(model, judge.batches, progress=lambda batches: progress.track(batches, "evaluate")))

    dense, pruned, masked = judge.of(judge.dense), quality_of(slim), None
    if uncompensated is not None:
        # The masked model is the cut one without compensation, as `check_cut` has shown.
        with masked_heads(model, uncompensated):
            masked = quality_of(model)
    benchmarks: Mapping[str, DenseSlim] = {}
    if benchmark is not None:
        progress.stage("benchmarks")
        benchmarks = _side_by_side(benchmark(model), benchmark(slim))
    return Evaluation(_side_by_side(dense.metrics, pruned.metrics), pruned.stability, masked, benchmarks)


def _side_by_side(dense: Mapping[str, float], slim: Mapping[str, float]) -> dict[str, DenseSlim]:
    return {name: DenseSlim(dense[name], slim[name]) for name in dense}
