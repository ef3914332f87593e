"""Evaluate the cells of a sweep, in the process of the sweep or in the workers of an executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...data.batches import size_of
from ...errors import RequestError
from ...evaluate.judge import Judge, Quality
from ...evaluate.predict import predict
from ...kinds import ATTENTION, KINDS, MLP
from ...pipeline.recipe import PruningRecipe
from ...pipeline.stages import Refit, effect_batches, predict_pruned
from ...progress import SILENT, Clock, Progress
from ...score.criteria import COMPENSATED_NAMES
from ...select.constraints import bundles_lost
from ...select.plan import library_versions
from ...slim.refit import LayerFit, compensate, refit
from ...tasks import Predictions
from ...units.units import Selection
from ..baselines.channels import check_channels, masked_channels, select_channels
from ..baselines.flap import add_means
from ..baselines.names import CHANNELS, JUDGED_ONLY, MARTRA, SLICED, SLICED_TUNED
from ..baselines.slicing import fine_tuned, sliced
from .choosing import Chooser
from .grid import Cell, SweepGrid, compensation_of
from .shared import Shared


class Evaluator:
    """A loaded model, and what its cells share. Equal selections are evaluated once.

    `clock` has the seconds by kind of work, `curves` the known curves of alpha by key, and `judged` the known results
    by selection. `evaluations` is the number of pruned models evaluated on the evaluation rows.
    """

    def __init__(
        self,
        recipe: PruningRecipe,
        grid: SweepGrid,
        curves: dict[str, dict[str, Any]],
        keep_curve: Callable[[str, dict[str, Any]], None] | None = None,
        progress: Progress = SILENT,
    ):
        self._grid, self.clock, self.curves = grid, Clock(), curves
        self.judged: dict[str, dict[str, Any]] = {}
        self.evaluations = 0
        self.shared = Shared(recipe, grid, self.clock)
        self._base, self._constraints = self.shared.base, self.shared.options.constraints
        self.chooser = Chooser(self.shared, grid, curves, keep_curve or curves.__setitem__, self.clock, progress)
        if CHANNELS in grid.criteria:
            check_channels(self._base.scored)

    @cached_property
    def _judge(self) -> tuple[Judge, Quality]:
        """The judge on the evaluation rows, and what it says of the dense model."""
        with self.clock("evaluate"):
            judge = self._base.judge(self._base.rows.evaluation)
            return judge, judge.of(judge.dense)

    def evaluate(self, cell: Cell) -> dict[str, Any]:
        """Evaluate a cell, and return its entry for the journal."""
        if cell.criterion in JUDGED_ONLY:
            judged, result = self._evaluate_baseline(cell)
            alpha, lost = None, None
        else:
            alpha = self.chooser.alpha(cell, self.refit(cell))
            selection = self.chooser.selection(cell, alpha)
            lost = bundles_lost(selection, self._base.modules, unit=self._constraints.unit)
            units = ";".join(f"{kept.units}" for kept in selection.values())
            # The seed matters only to compensation: moments differ between seeds.
            judged = f"{cell.compensation}|{'' if cell.compensation == 'none' else cell.seed}|{units}"
            result = self.judged.get(judged) or self._evaluate_selection(selection, cell)
        self.judged[judged] = result
        return {"judged": judged, "alpha": alpha, "samples": self._samples(cell), "result": result, "lost": lost}

    def _samples(self, cell: Cell) -> int:
        """Return the number of calibration samples behind a cell, for its row."""
        if cell.criterion in COMPENSATED_NAMES:
            return sum(map(size_of, effect_batches(self.shared.job(cell.seed, self._grid.calibration_sizes[0]))))
        if cell.criterion == MARTRA:
            return 0
        return cell.samples or sum(map(size_of, self.shared.unlabelled(cell.seed)))

    def _evaluate_selection(self, selection: Selection, cell: Cell) -> dict[str, Any]:
        """Return the result of the model without the units that a selection removes."""
        refitted, base = self.refit(cell), self._base
        with self.clock("evaluate"):
            predictions = predict_pruned(
                base.model, selection, base.modules, self._base.rows.evaluation, refit=refitted
            )
        removed = dict.fromkeys(KINDS, 0)
        for kept in selection.values():
            removed[kept.kind] += len(kept.removed)
        return self._result(predictions) | {
            "flops_ratio": self.chooser.flops_ratio(selection),
            "heads_removed": removed[ATTENTION],
            "neurons_removed": removed[MLP],
        }

    def _evaluate_baseline(self, cell: Cell) -> tuple[str, dict[str, Any]]:
        """Evaluate a baseline without channels or with sliced inputs; also return a name that equal models share."""
        model, modules = self._base.model, self._base.scored
        assert cell.sparsity is not None
        stay: dict[str, Tensor] = {}
        judged = f"{cell.criterion}|{cell.seed}|{cell.sparsity}"
        if cell.criterion == CHANNELS:
            scores = self.shared.statistics(cell.seed, cell.samples)["channel_taylor"]
            stay = select_channels(scores, modules, heads=cell.sparsity, constraints=self._constraints)
            kept = ";".join(str(tuple(mask.nonzero().flatten().tolist())) for mask in stay.values())
            judged = f"{CHANNELS}|{kept}"
        if (known := self.judged.get(judged)) is not None:
            return judged, known
        with ExitStack() as stack:
            if cell.criterion == CHANNELS:
                stack.enter_context(masked_channels(model, modules, stay))
            if cell.criterion in (SLICED, SLICED_TUNED):
                bases, batches, targets = self.shared.bases(cell.seed)
                stack.enter_context(sliced(model, modules, bases, share=cell.sparsity))
            if cell.criterion == SLICED_TUNED:
                with self.clock("fine-tune"):
                    stack.enter_context(fine_tuned(model, modules, batches, targets))
            with self.clock("evaluate"):
                predictions = predict(model, self._base.rows.evaluation)
        return judged, self._result(predictions) | {"flops_ratio": None, "heads_removed": None, "neurons_removed": None}

    def _result(self, predictions: Predictions) -> dict[str, Any]:
        """Return the metric and the stability of predictions, as fields of a row."""
        self.evaluations += 1
        judge, dense = self._judge
        quality, name = judge.of(predictions), self._base.metrics[0]
        return {
            "metric": name,
            "quality": quality.metrics[name],
            "quality_dense": dense.metrics[name],
            "stability": quality.stability,
        }

    def refit(self, cell: Cell) -> Refit | None:
        """Return what refits a model cut for a cell; None if nothing does."""
        asked, base = self.shared.options.compensation, self._base
        how = compensation_of(cell.compensation, None if asked is None else asked.ridge)
        if how is None:
            return None
        # The bias needs no moments, which take longer to collect, and models without biases get them only here.
        averages = self.shared.averages(cell.seed) if how.method == "bias" else None
        moments = None if averages or how.sequential else self.shared.moments(cell.seed)

        def refitted(slim: PreTrainedModel, selection: Selection) -> list[LayerFit]:
            with self.clock("refit"):
                if moments is not None:
                    return refit(slim, selection, base.modules, moments, how)
                if how.sequential:
                    rows = self.shared.unlabelled(cell.seed)
                    return compensate(base.model, slim, selection, base.modules, rows, how)
                assert averages is not None
                add_means(slim, base.model, selection, base.modules, averages)
                return []

        return refitted


@dataclass(frozen=True)
class Work:
    """A cell to evaluate in another process, which gets this value by pickle.

    `sweep` is a name that no other call of `sweep` has, `curves` is what is known of the alphas of the cell, by key,
    and `versions` are those of the libraries that the sweep runs with.
    """

    sweep: str
    recipe: PruningRecipe
    grid: SweepGrid
    cell: Cell
    curves: dict[str, dict[str, Any]]
    versions: dict[str, str]


@dataclass(frozen=True)
class Evaluated:
    """What a worker found: the cell's entry for the journal, the curves that chose its alpha, and what it took."""

    entry: dict[str, Any]
    curves: dict[str, dict[str, Any]]
    seconds: dict[str, float]
    evaluations: int


# The sweep whose cells this process evaluates, if it is a worker, and what it loaded for them.
_loaded: tuple[str, Evaluator] | None = None
# Baselines change the model while they predict, so the threads of a worker take turns.
_turn = threading.Lock()


def evaluate(work: Work) -> Evaluated:
    """Evaluate a cell in this process, which keeps the model and a seed's statistics until another sweep begins.

    Raises:
        RequestError: This process has other versions of the libraries than the sweep.
    """
    with _turn:
        evaluator = _evaluator(work)
        evaluator.curves.update(work.curves)
        evaluator.evaluations = 0
        entry = evaluator.evaluate(work.cell)
        curves = {key: evaluator.curves[key] for key in evaluator.chooser.curve_keys(work.cell)}
        seconds, evaluator.clock.seconds = evaluator.clock.seconds, {}
        return Evaluated(entry, curves, seconds, evaluator.evaluations)


def _evaluator(work: Work) -> Evaluator:
    """Return the evaluator of a sweep, which is made for its first cell in this process."""
    global _loaded
    if _loaded is None or _loaded[0] != work.sweep:
        # The model of the last sweep goes first: there may not be memory for two.
        _loaded = None
        if (here := library_versions()) != work.versions:
            wanted, there = (", ".join(map(" ".join, found.items())) for found in (work.versions, here))
            raise RequestError(
                f"a worker must have the versions of the sweep, {wanted}, but it has {there}; install the same in both"
            )
        _loaded = work.sweep, Evaluator(work.recipe, work.grid, {})
    return _loaded[1]
