"""Evaluate what was pruned: predictions by a plan, and the evaluation of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..evaluate.judge import Judge, Quality
from ..evaluate.predict import Batch, Predictions, predict
from ..measure.counts import Both
from ..model.copies import share_weights
from ..progress import Progress
from ..slim.cut import prune_units
from ..slim.mask import masked_units
from ..slim.refit import LayerFit
from ..values import PrunableModule, Selection

# Refits, in place, a model that was cut by a selection.
Refit = Callable[[PreTrainedModel, Selection], list[LayerFit]]
# Runs benchmarks on a model: name -> value.
Benchmark = Callable[[PreTrainedModel], Mapping[str, float]]


def predict_pruned(
    model: PreTrainedModel,
    selection: Selection,
    modules: Sequence[PrunableModule],
    batches: Sequence[Batch],
    *,
    refit: Refit | None = None,
) -> Predictions:
    """Return what the model predicts without the units that a selection removes.

    Args:
        model: The dense model; not changed.
        selection: The units that stay.
        modules: All of its prunable modules.
        batches: What to predict.
        refit: What compensates the cut model. Without it units are masked instead of cut, which gives the same
            predictions at less cost.
    """
    if refit is None:
        with masked_units(model, selection, modules):
            return predict(model, batches)
    # What is cut is new, the rest is shared with the dense model.
    slim = prune_units(share_weights(model), selection, modules, inplace=True)
    refit(slim, selection)
    return predict(slim, batches)


@dataclass(frozen=True)
class Evaluation:
    """How the slim model of a run compares with the dense one.

    Attributes:
        metrics: Of the evaluation batches, by name.
        stability: Share, in [0, 1], of predictions that equal the dense model's.
        uncompensated: Of the cut alone, where the slim model is compensated.
        benchmarks: Of lm-eval, by name; empty where none were asked for.
    """

    metrics: Mapping[str, Both[float]]
    stability: float
    uncompensated: Quality | None
    benchmarks: Mapping[str, Both[float]]


def evaluate(
    judge: Judge,
    model: PreTrainedModel,
    slim: PreTrainedModel,
    *,
    modules: Sequence[PrunableModule] = (),
    uncompensated: Selection | None = None,
    benchmark: Benchmark | None = None,
    progress: Progress,
) -> Evaluation:
    """Evaluate the slim model of a run against the dense one.

    Args:
        judge: Of the evaluation batches.
        model: The dense model.
        slim: The slim model.
        modules: The prunable modules of the dense model, where `uncompensated` is given.
        uncompensated: The selection of a compensated model, to evaluate the cut alone too.
        benchmark: Runs the benchmarks that were asked for.
        progress: Told about stages and loops.
    """

    def quality_of(model: PreTrainedModel) -> Quality:
        return judge.of(predict(model, judge.batches, progress=progress))

    dense, pruned, masked = judge.of(judge.dense), quality_of(slim), None
    if uncompensated is not None:
        # The masked model is the cut one without compensation, as `compare_cut` has shown.
        with masked_units(model, uncompensated, modules):
            masked = quality_of(model)
    benchmarks: Mapping[str, Both[float]] = {}
    if benchmark is not None:
        progress.stage("benchmarks")
        benchmarks = _side_by_side(benchmark(model), benchmark(slim))
    return Evaluation(_side_by_side(dense.metrics, pruned.metrics), pruned.stability, masked, benchmarks)


def _side_by_side(dense: Mapping[str, float], slim: Mapping[str, float]) -> dict[str, Both[float]]:
    return {name: Both(dense[name], slim[name]) for name in dense}
