"""Decide which rows are for what: draw those of each use from separate rows, and hold rows out for a promise.

There is one rule for the promises of `budget: {keep: ...}`, `deploy` and cascades. A look is an interval on held-out
rows that decides whether something is promised; the more looks, the more rows a promise takes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import datasets

from ..data.rows import common_values, run_end, taken_from, whole_split
from ..errors import RequestError
from ..evaluate.interval import LEAST_FOR_LOSS, Looks, rate_rows_needed
from ..evaluate.promise import loss_words
from ..forms.deployment import SEARCHED, count_reduced_precision
from ..recipe.sections import (
    CalibrationSection,
    CascadeSection,
    DataSection,
    DeploySection,
    EvaluationSection,
    HeldOutSection,
)
from ..score.criteria import AUTO
from ..tasks import Task
from .options import PruneSection
from .recipe import PruningRecipe

logger = logging.getLogger(__name__)

# Loads rows of a split, as `Task.load` does with the source of the data.
Load = Callable[..., datasets.Dataset]
# Held-out rows on which `alpha: auto` is chosen, and `criterion: auto`, whose candidates differ by few predictions.
HELD_OUT_SAMPLES, AUTO_SAMPLES = 256, 512
# Shares of the FLOPs that `deploy` tries in cascades.
FLOPS_TO_TRY = (0.75, 0.55, 0.35)
# Quality is judged on the same rows, whatever the seed of a run.
EVALUATION_SEED = 0


@dataclass(frozen=True)
class Splits:
    """The splits that a run reads, by the sections of its recipe.

    Without `held_out`, choices are made on rows of the calibration split that are not scored on.
    """

    data: DataSection
    calibration: CalibrationSection
    evaluation: EvaluationSection
    held_out: HeldOutSection | None = None

    @property
    def evaluated_is_divided(self) -> bool:
        """Whether the held-out rows come from the evaluated split, which is then divided."""
        return self.held_out is not None and self.held_out.split == self.evaluation.split

    def boundary(self, rows: datasets.Dataset, least: int) -> int:
        """Return the first index from `least` on that divides drawn rows, but no query or group of `data.together`."""
        if self.data.together is None:
            return min(least, len(rows))
        return run_end(common_values(rows, self.data.together), least)

    def count_judged(self, rows: datasets.Dataset) -> int:
        """Return how many rows can be judged: all, or of queries and documents those that have a query."""
        if self.data.query is None or self.data.query not in rows.column_names:
            return len(rows)
        return sum(value is not None for value in common_values(rows, self.data.query))


@dataclass(frozen=True)
class Drawn:
    """Samples by use: to score on, to choose on, to refit on, and to make the promise of a cascade on."""

    scoring: datasets.Dataset
    held_out: datasets.Dataset
    compensation: datasets.Dataset
    promised: datasets.Dataset


def count_to_choose_on(options: PruneSection) -> int:
    """Return how many held-out samples an alpha, a criterion or the size of the cut is chosen on; 0 if none is."""
    if options.goal.keep is not None:
        return options.goal.keep.samples
    return {"criterion: auto": AUTO_SAMPLES, "alpha: auto": HELD_OUT_SAMPLES, None: 0}[options.judged_on_held_out]


def draw(splits: Splits, load: Load, options: PruneSection, cascade: CascadeSection | None = None) -> Drawn:
    """Draw samples by use from the calibration split, in the order of its seed.

    Those to score on and those to refit on are both from the start. Those to hold out come after the scored ones, or
    from the split that the recipe holds out; the last of them are for the promise of the cascade. Where criteria are
    compared or something is promised, they are kept out of the refit too, if there are enough.

    Raises RequestError if the calibration split has none left to hold out.
    """
    calibration, keep = splits.calibration, options.goal.keep
    to_score, split = calibration.samples, calibration.split
    to_refit = 0 if options.compensation is None else options.compensation.samples
    to_promise = 0 if cascade is None else cascade.samples
    to_hold_out = count_to_choose_on(options) + to_promise
    apart = options.criterion == AUTO or keep is not None or to_promise > 0  # from those to refit on
    separate = _separate_held_out(splits, load, to_hold_out)
    needed = to_hold_out if separate is None else 0  # held-out samples from the calibration split
    count = max(to_score + needed, to_refit + (needed if apart else 0))
    drawn = load(split, samples=count, shuffle_seed=calibration.seed)
    # Rows with a query come first, and the others, which only add documents, cannot be judged.
    available = splits.count_judged(drawn)
    if needed and available <= splits.boundary(drawn, to_score):
        raise RequestError(
            f"{options.judged_on_held_out or 'cascade'} needs samples beyond the {to_score} to score on, but the split "
            f"{split!r} has {available}; lower calibration.samples, name other rows as held_out, or leave it out"
        )

    def slice_of(rows: datasets.Dataset, start: int, count: int) -> datasets.Dataset:
        return rows.select(list(range(splits.boundary(rows, start), splits.boundary(rows, start + count))))

    # A promise is not made on rows that layers are refitted on. Of too few rows for both, a third is left to refit.
    promised_here = needed > 0 and (to_promise > 0 or keep is not None)
    left_to_refit = max(available - needed, available // 3 if promised_here else 0)
    start = max(to_score, min(to_refit, left_to_refit) if apart else 0)
    held_out = slice_of(drawn, start, needed) if separate is None else separate
    to_choose = min(to_hold_out - to_promise, len(held_out) // 2) if to_promise else len(held_out)
    return Drawn(
        scoring=slice_of(drawn, 0, to_score),
        held_out=slice_of(held_out, 0, to_choose),
        compensation=slice_of(drawn, 0, min(to_refit, start) if promised_here else to_refit),
        promised=slice_of(held_out, to_choose, len(held_out)),
    )


def _separate_held_out(splits: Splits, load: Load, count: int) -> datasets.Dataset | None:
    """Return rows of the split that the recipe holds out, by default `count`; None if it names none or `count` is 0."""
    if not count or splits.held_out is None:
        return None
    count = splits.held_out.samples or count
    if not splits.evaluated_is_divided:
        return load(splits.held_out.split, samples=count, shuffle_seed=splits.calibration.seed)
    held_out, _ = _divide_evaluated(splits, load)
    return held_out.select(range(splits.boundary(held_out, count)))


def draw_evaluated(splits: Splits, load: Load) -> datasets.Dataset:
    """Return the samples to evaluate on."""
    evaluation = splits.evaluation
    if splits.evaluated_is_divided:
        _, rows = _divide_evaluated(splits, load)
        return rows.select(range(splits.boundary(rows, evaluation.samples or len(rows))))
    seed = EVALUATION_SEED if evaluation.samples is not None else None
    return load(evaluation.split, samples=evaluation.samples, shuffle_seed=seed, in_order=True)


def _divide_evaluated(splits: Splits, load: Load) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the rows of the evaluated split to hold out, and the others, in a random order that every run shares."""
    split, asked = splits.evaluation.split, splits.held_out
    assert asked is not None
    rows = load(split, samples=None, shuffle_seed=EVALUATION_SEED)
    available = splits.count_judged(rows)
    if available < 2:
        raise RequestError(
            f"held_out and evaluation share the split {split!r}, which has too few samples to divide, {available}; "
            "name another split as held_out"
        )
    wanted = asked.samples or available // 2
    count = splits.boundary(rows, wanted)
    # Rows with a query come first; if the others have none, nothing can be evaluated.
    if count >= available:
        raise RequestError(
            f"held_out and evaluation share the split {split!r}, so fewer than its {available:,} samples can be held "
            f"out, got held_out.samples: {wanted:,}; hold out fewer"
        )
    return rows.select(range(count)), rows.select(range(count, len(rows)))


def all_looks(task: type[Task], deploy: DeploySection | None, *, classifies: bool) -> tuple[Looks, ...]:
    """Return the looks that a promise may take, from the most, for many held-out rows, to the fewest.

    Only a classifier has cascades. A budget of `keep`, without `deploy`, looks as the last one says; the others are
    there so that it holds out the same rows as a deployment, if there are enough.
    """
    bits = count_reduced_precision(task, () if deploy is None else deploy.runtimes)
    with_cascades = [Looks(SEARCHED, cascades=len(FLOPS_TO_TRY), bits=bits)] if classifies else []
    of_budget = [Looks()] if deploy is None else []
    return (*with_cascades, Looks(SEARCHED, bits=bits), Looks(bits=bits), *of_budget)


@dataclass(frozen=True)
class Promise:
    """A promise in words, and how many rows it takes."""

    words: str
    sizes: tuple[int, ...]  # numbers of rows that are enough, the largest first, which allows most looks
    most: int  # largest number of rows to hold out
    # Whether rows are blocks of text: each has many predictions, so exactly one of `sizes` is held out.
    blocks: bool = False

    def count(self, rows: int, *, evaluated: int | None = None) -> int:
        """Return how many of `rows` rows the promise is made on, so that the others judge it; 0 if there are too few.

        At most `most` rows and three quarters of all are used, and `evaluated` rows are left over, unless the rest is
        too small for any of `sizes`. Within these limits, it is the larger of two thirds of the rows and the largest of
        `sizes` that fits; for blocks, the latter alone.
        """
        room = min(self.most, 3 * rows // 4)
        if evaluated is not None and rows - evaluated >= self.sizes[-1]:
            room = min(room, rows - evaluated)
        enough = next((size for size in self.sizes if size <= room), 0)
        if self.blocks or not enough:
            return enough
        return max(enough, min(room, 2 * rows // 3))


def promise_in(recipe: PruningRecipe, task: Task, metric: str | None) -> Promise | None:
    """Return the promise of a recipe; None if it makes none.

    `metric` is that of which a share is promised, see `pruning.promised_metric`; None for one of the predictions.
    """
    cascade, promise = recipe.cascade, _promise_to_keep(recipe, task, metric)
    if cascade is None:
        return promise
    needed, to_choose = rate_rows_needed(cascade.disagreement), count_to_choose_on(recipe.options)
    # Held-out rows are divided between what else is chosen on them and the cascade, see `draw`.
    size = max(needed + min(to_choose, needed), 0 if promise is None else 2 * promise.sizes[-1])
    words = f"a disagreement of at most {100 * cascade.disagreement:g} %"
    return Promise(words, (size,), to_choose + cascade.samples)


def _promise_to_keep(recipe: PruningRecipe, task: Task, metric: str | None) -> Promise | None:
    """Return the promise of a budget `keep` or of `deploy`, see `promise_in`; None without either."""
    keep, blocks = recipe.goal.keep, task.generative and recipe.data.prompt is None
    if keep is None:
        return None
    if keep.predictions is None:
        return Promise(loss_words(keep), (LEAST_FOR_LOSS,), keep.samples, blocks)
    classifies = task.classifies and task.predicts == "classes" and metric is None
    plans = all_looks(type(task), recipe.deploy, classifies=classifies)
    sizes = [looks.rows(keep.predictions, metric) for looks in plans]
    return Promise(f"{100 * keep.predictions:g} %", tuple(sizes), keep.samples, blocks)


def hold_out(splits: Splits, promise: Promise | None, load: Load) -> Splits:
    """Return splits that hold out rows of the evaluated split for a promise; the other evaluated rows judge it.

    The model was often trained on the split that units are scored on, and is surer of those rows than of new ones.
    So a promise is not made on further rows of that split. The splits stay as they are where both are slices of one,
    the recipe names other held-out rows or asks for fewer than the promise takes, or (it warns) too few are evaluated.
    """
    evaluation, together = splits.evaluation, splits.data.together
    split = evaluation.split
    slices_of_one = whole_split(split) == whole_split(splits.calibration.split)
    if promise is None or splits.held_out is not None or promise.most < promise.sizes[-1] or slices_of_one:
        return splits
    loaded = load(split, samples=1 if together is None else None)  # one row is enough to learn how many there are
    total = rows = taken_from(loaded)  # of the split, and of those that can be judged
    if together is not None:
        # Only rows of a query are judged, not documents alone; the sizes of the promise count queries.
        queries = [value for value in common_values(loaded, together) if value is not None]
        rows = len(queries)
        rows_per_query = math.ceil(rows / max(1, len(set(queries))))
        sizes = tuple(rows_per_query * size for size in promise.sizes)
        promise = replace(promise, sizes=sizes, most=max(promise.most, sizes[-1]))
    # Who asks for all rows then evaluates all that are left.
    wants_all = evaluation.samples in (None, rows, total)
    count = promise.count(rows, evaluated=None if wants_all else evaluation.samples)
    if not count:
        needed, further = math.ceil(4 * promise.sizes[-1] / 3), splits.calibration.split
        logger.warning(
            "%s",
            f"the split {split!r} has {rows:,} rows, too few to promise {promise.words} on some and to judge it on the "
            f"others, which takes {needed:,}: {promise.words} is promised on further rows of {further!r}, and if the "
            "model was trained on these, it keeps less of new ones; evaluate on more rows, ask for less, or name rows "
            "as held_out",
        )
        return splits
    if wants_all and evaluation.samples is not None:
        evaluation = evaluation.model_copy(update={"samples": evaluation.samples - count})
    return replace(splits, evaluation=evaluation, held_out=HeldOutSection(split=split, samples=count))
