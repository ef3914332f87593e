"""Evaluate pruned models: predict without some units, and compare a slim model with its dense one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..data.batches import Batch
from ..evaluate.judge import Judge, Quality
from ..evaluate.predict import Predictions, predict
from ..measure.counts import Both
from ..model.copies import share_weights
from ..progress import Progress
from ..slim.cut import prune_units
from ..slim.mask import masked_units
from ..slim.refit import LayerFit
from ..units import PrunableModule, Selection

# Refits a model that was cut by a selection, in place.
Refit = Callable[[PreTrainedModel, Selection], list[LayerFit]]
# Predicts batches with a model.
Predictor = Callable[[PreTrainedModel, Sequence[Batch]], Predictions]
# Runs benchmarks on a model, and returns their values by name.
Benchmark = Callable[[PreTrainedModel], Mapping[str, float]]


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


def cut_beside(
    model: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule], refit: Refit | None
) -> PreTrainedModel:
    """Return a model cut by a selection and refitted; only its cut weights are copies, the others are the model's."""
    slim = prune_units(share_weights(model), selection, modules, inplace=True)
    if refit is not None:
        refit(slim, selection)
    return slim


@dataclass(frozen=True)
class Evaluation:
    """How a slim model compares with the dense one: metrics and lm-eval benchmarks by name, and stability."""

    metrics: Mapping[str, Both[float]]
    stability: float  # share of predictions that equal the dense model's, in [0, 1]
    uncompensated: Quality | None  # of the cut model without compensation; None if the run does not compensate
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
    """Evaluate the slim model of a run against the dense one."""

    def quality_of(model: PreTrainedModel) -> Quality:
        return judge.of(predict(model, judge.batches, progress=progress))

    dense, pruned, masked = judge.of(judge.dense), quality_of(slim), None
    if uncompensated is not None:
        # Masked and cut models predict the same: `compare_cut` has checked that.
        with masked_units(model, uncompensated, modules):
            masked = quality_of(model)
    benchmarks: Mapping[str, Both[float]] = {}
    if benchmark is not None:
        progress.stage("run the benchmarks of lm-eval on both models")
        benchmarks = _side_by_side(benchmark(model), benchmark(slim))
    return Evaluation(_side_by_side(dense.metrics, pruned.metrics), pruned.stability, masked, benchmarks)


def _side_by_side(dense: Mapping[str, float], slim: Mapping[str, float]) -> dict[str, Both[float]]:
    return {name: Both(dense[name], slim[name]) for name in dense}
