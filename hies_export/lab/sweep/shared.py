"""The common parts of a sweep's cells: the model, and the statistics, moments and scores of one seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

from ...calibrate.moments import MomentStream
from ...calibrate.statistics import DEFAULT_NEEDS, Statistics, collect_statistics
from ...data.batches import by_length
from ...evaluate.judge import Judge
from ...evaluate.predict import predict
from ...forms.measure.counts import count_flops
from ...model.copies import share_weights
from ...pipeline.draw import HELD_OUT_SAMPLES, Draws
from ...pipeline.job import Job
from ...pipeline.load_job import load_job
from ...pipeline.recipe import PruningRecipe
from ...pipeline.stages import score_by_removal
from ...progress import Clock
from ...recipe.budget import Budget
from ...recipe.sections import CompensationSection
from ...score.criteria import COMPENSATED_NAMES, Scores, needs_of, uses_alpha
from ...slim.cut import prune_units
from ...tasks import Predictions
from ...units.units import PrunableModule, Selection
from ..baselines.averages import Averages, input_averages
from ..baselines.kwon import mask_gradients
from ..baselines.names import CHANNELS, OWN_SAMPLES
from ..baselines.slicing import Bases, collect_bases
from .grid import AUTOMATIC, WEIGHTED, SweepGrid

Make = TypeVar("Make", bound=Callable[..., Any])


def _per_seed(make: Make) -> Make:
    """Call a method of `Shared` once for a seed and the other arguments; results of another seed are dropped."""

    @functools.wraps(make)
    def once(self: Shared, seed: int, *more: Any) -> Any:
        if seed != self.seed:
            self.seed, self.of_seed = seed, {}
        key = (make.__name__, *more)
        if key not in self.of_seed:
            self.of_seed[key] = make(self, seed, *more)
        return self.of_seed[key]

    return cast(Make, once)


class Shared:
    """Model, data and calibration results that the cells of a sweep share.

    Attributes:
        options: The recipe's, with the grid's kinds of modules and its smallest budget of FLOPs.
        base: The job of the first seed and calibration size.
        seed, of_seed: The last seed, and what is kept of it.
    """

    def __init__(self, recipe: PruningRecipe, grid: SweepGrid, clock: Clock):
        by_grid: dict[str, Any] = {"modules": grid.kinds}
        if grid.flops:
            by_grid["budget"] = Budget(flops=min(grid.flops))
        self.options = recipe.options.model_copy(update=by_grid)
        self._recipe = recipe
        self._grid, self._clock = grid, clock
        self._of_model: dict[Any, Any] = {}
        self.seed: int | None = None
        self.of_seed: dict[tuple[Any, ...], Any] = {}
        with clock("load"):
            self.base = self._load(grid.seeds[0], grid.calibration_sizes[0])

    def _load(self, seed: int, samples: int, like: Job | None = None) -> Job:
        """Return model and rows of a seed and calibration size, checked against all criteria of the grid."""
        # Under sparsities, the ranks of `compensated` are good for query heads too.
        criteria = [name for name in self._grid.criteria if self._grid.flops or name not in COMPENSATED_NAMES]
        return load_job(
            self._recipe,
            options=self.options,
            draws=self._draws(seed, samples),
            like=like,
            criteria=criteria,
            # Cells are timed on the sweep's own runtimes, so the recipe's need not be installed.
            runtimes=("torch",),
        )

    @_per_seed
    def job(self, seed: int, samples: int) -> Job:
        """Return the job of a seed and calibration size."""
        if (seed, samples) == (self._grid.seeds[0], self._grid.calibration_sizes[0]):
            return self.base
        with self._clock("load"):
            return self._load(seed, samples, like=self.base)

    @_per_seed
    def statistics(self, seed: int, samples: int) -> Statistics:
        """Return the statistics of the calibration batches of a seed and calibration size."""
        job = self.job(seed, samples)
        channels = ("channel_taylor",) if CHANNELS in self._grid.criteria else ()
        needs = (*DEFAULT_NEEDS, *needs_of(*self._grid.criteria), *channels)
        with self._clock("statistics"):
            return collect_statistics(job.model, job.rows.score, job.scored, needs=needs)

    def unlabelled(self, seed: int) -> list[dict[str, Tensor]]:
        """Return the batches to refit on, without labels."""
        return self.job(seed, self._grid.calibration_sizes[0]).rows.refit

    def scored(self, kinds: tuple[str, ...]) -> tuple[PrunableModule, ...]:
        """Return the modules of some kinds that may lose units."""
        return tuple(module for module in self.base.scored if module.kind in kinds)

    @_per_seed
    def moments(self, seed: int) -> MomentStream:
        """Return the moments to refit from; they are collected when first read."""
        found = MomentStream(
            self.base.model,
            self.base.modules,
            by_length(self.unlabelled(seed), config=self.base.model.config),
            limit_bytes=(self.options.compensation or CompensationSection()).limit_bytes,
            weighted=WEIGHTED in self._grid.compensations,
        )
        if len(found.groups) == 1:
            with self._clock("moments"):
                next(iter(found))
        return found

    @_per_seed
    def compensated_scores(self, seed: int) -> Scores:
        """Return the scores of `compensated` for all modules that may lose units, which all sizes share."""
        job = self.job(seed, self._grid.calibration_sizes[0])
        with self._clock("effects"):
            return score_by_removal(job, self.moments(seed))

    @_per_seed
    def averages(self, seed: int) -> dict[str, Averages]:
        """Return the averages of what consumers read on the rows to refit on, by module name."""
        batches = by_length(self.unlabelled(seed), config=self.base.model.config)
        with self._clock("averages"):
            return input_averages(self.base.model, batches, self.base.modules)

    @_per_seed
    def mask_gradients(self, seed: int, samples: int) -> dict[str, Tensor]:
        """Return the gradients to masks that `kwon` rearranges units by, (samples, units) by module name."""
        job = self.job(seed, samples)
        with self._clock("mask gradients"):
            return mask_gradients(job.model, job.rows.score, job.scored)

    @_per_seed
    def bases(self, seed: int) -> tuple[Bases, list[dict[str, Tensor]], Predictions]:
        """Return principal components, the batches they were collected on, and the dense model's predictions there."""
        batches = by_length(self.unlabelled(seed), config=self.base.model.config)
        with self._clock("principal components"):
            bases = collect_bases(self.base.model, batches, self.base.scored)
        return bases, batches, predict(self.base.model, batches)

    @_per_seed
    def held_out_judge(self, seed: int, samples: int) -> Judge:
        """Return the judge on the held-out rows, which follow the calibration samples."""
        return self.base.judge(self.job(seed, samples).rows.held_out)

    def flops_ratio(self, selection: Selection) -> float:
        """Return the FLOPs of the slim model as a share of the dense model's, counted without copying weights."""
        batch, model = next(iter(self.base.shapes.values())), self.base.model
        counts = tuple((len(kept.units), len(kept.kept_groups)) for kept in selection.values())
        found = self._of_model
        with self._clock("count FLOPs"):
            if "dense" not in found:
                found["dense"] = count_flops(model, batch)
            if counts not in found:
                # A vision-language model looks up the image tokens, so it needs real values.
                device = None if self.base.task.in_parts else "meta"
                slim = prune_units(share_weights(model, device=device), selection, self.base.modules, inplace=True)
                found[counts] = count_flops(slim, batch)
        return float(found[counts] / found["dense"])

    def _draws(self, seed: int, samples: int) -> Draws:
        """Return the samples that the cells of this seed and calibration size need from the calibration split."""
        grid, how = self._grid, self.options.compensation or CompensationSection()
        automatic = any(alpha in AUTOMATIC for alpha in grid.alphas) and any(map(uses_alpha, grid.criteria))
        unlabelled = not set(OWN_SAMPLES).isdisjoint(grid.criteria) or set(grid.compensations) != {"none"}
        return Draws(
            seed=seed,
            scoring=samples,
            held_out=HELD_OUT_SAMPLES if automatic else 0,
            compensation=how.samples if unlabelled else 0,
        )
