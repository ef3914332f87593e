"""Decide which rows are for what: draw those of each use from separate rows, and hold rows out for a promise.

There is one rule for the promises of `budget: {keep: ...}`, `deploy` and compounds.
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

# Number of held-out rows on which `alpha: auto` is chosen, and `criterion: auto`, whose candidates differ by few
# predictions.
HELD_OUT_SAMPLES, AUTO_SAMPLES = 256, 512
# Shares of the FLOPs that `deploy` tries in compounds.
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
    def divided(self) -> bool:
        """Whether the held-out rows come from the evaluated split, which is then divided."""
        return self.held_out is not None and self.held_out.split == self.evaluation.split

    def until(self, rows: datasets.Dataset, end: int) -> int:
        """Return the first index from `end` on at which drawn rows can be divided, so that no query or group is."""
        if self.data.together is None:
            return min(end, len(rows))
        return run_end(common_values(rows, self.data.together), end)

    def counted(self, rows: datasets.Dataset) -> int:
        """Return how many rows can be judged: all, or of queries and documents those that have a query."""
        if self.data.query is None or self.data.query not in rows.column_names:
            return len(rows)
        return sum(value is not None for value in common_values(rows, self.data.query))


@dataclass(frozen=True)
class Drawn:
    """Samples by use: to score on, to choose on, to refit on, and to make the promise of a compound on."""

    scoring: datasets.Dataset
    held_out: datasets.Dataset
    compensation: datasets.Dataset
    promised: datasets.Dataset


def chosen_on(options: PruneSection) -> int:
    """Return the number of held-out samples that an alpha, a criterion or the size of the cut is chosen on."""
    if options.goal.keep is not None:
        return options.goal.keep.samples
    return {"criterion: auto": AUTO_SAMPLES, "alpha: auto": HELD_OUT_SAMPLES, None: 0}[options.judged_on_held_out]


def draw(
    splits: Splits, load: Callable[..., datasets.Dataset], options: PruneSection, compound: CascadeSection | None = None
) -> Drawn:
    """Draw samples by use from the calibration split, in the order of its seed.

    Those to score on and those to refit on are both from the start. Those to hold out come after the scored ones, or
    from the split that the recipe holds out; the last of them are for the promise of the compound. Where criteria are
    compared or something is promised, they are kept out of the refit too, if there are enough.

    Raises RequestError if the calibration split has none left to hold out.
    """
    calibration, keep = splits.calibration, options.goal.keep
    scoring, split = calibration.samples, calibration.split
    compensation = 0 if options.compensation is None else options.compensation.samples
    promised = 0 if compound is None else compound.samples
    wanted = chosen_on(options) + promised
    apart = options.criterion == AUTO or keep is not None or promised > 0
    separate = _separate_held_out(splits, load, wanted)
    needed = wanted if separate is None else 0  # from the calibration split
    count = max(scoring + needed, compensation + (needed if apart else 0))
    drawn = load(split, samples=count, shuffle_seed=calibration.seed)
    # Rows with a query come first, and the others, which only add documents, cannot be judged.
    available = splits.counted(drawn)
    if needed and available <= splits.until(drawn, scoring):
        what = options.judged_on_held_out or (compound and compound.name)
        raise RequestError(
            f"{what} needs samples beyond the {scoring} to score on, but the split {split!r} has {available}; lower "
            "calibration.samples, name other rows as held_out, or leave it out"
        )

    def part(rows: datasets.Dataset, start: int, count: int) -> datasets.Dataset:
        return rows.select(list(range(splits.until(rows, start), splits.until(rows, start + count))))

    # A promise is not made on rows that layers are refitted on. If there are too few rows for both, a third is left for
    # the refit.
    promises = needed > 0 and (promised > 0 or keep is not None)
    for_refit = max(available - needed, available // 3 if promises else 0)
    start = max(scoring, min(compensation, for_refit) if apart else 0)
    held_out = part(drawn, start, needed) if separate is None else separate
    chosen = min(wanted - promised, len(held_out) // 2) if promised else len(held_out)
    return Drawn(
        scoring=part(drawn, 0, scoring),
        held_out=part(held_out, 0, chosen),
        compensation=part(drawn, 0, min(compensation, start) if promises else compensation),
        promised=part(held_out, chosen, len(held_out)),
    )


def _separate_held_out(splits: Splits, load: Callable[..., datasets.Dataset], wanted: int) -> datasets.Dataset | None:
    """Return rows of the split that the recipe holds out; None if it names none, or nothing is chosen on such rows."""
    if not wanted or splits.held_out is None:
        return None
    count = splits.held_out.samples or wanted
    if not splits.divided:
        return load(splits.held_out.split, samples=count, shuffle_seed=splits.calibration.seed)
    rows, _ = _divided(splits, load)
    return rows.select(range(splits.until(rows, count)))


def evaluated(splits: Splits, load: Callable[..., datasets.Dataset]) -> datasets.Dataset:
    """Return the samples to evaluate on."""
    wanted = splits.evaluation
    if splits.divided:
        _, rows = _divided(splits, load)
        return rows.select(range(splits.until(rows, wanted.samples or len(rows))))
    seed = EVALUATION_SEED if wanted.samples is not None else None
    return load(wanted.split, samples=wanted.samples, shuffle_seed=seed, in_order=True)


def _divided(splits: Splits, load: Callable[..., datasets.Dataset]) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the rows of the evaluated split to hold out, and the others, in a random order that every run shares."""
    split, asked = splits.evaluation.split, splits.held_out
    assert asked is not None
    rows = load(split, samples=None, shuffle_seed=EVALUATION_SEED)
    wanted = asked.samples or splits.counted(rows) // 2
    count = splits.until(rows, wanted)
    # Rows with a query come first, and without any nothing can be evaluated.
    if not 0 < count < (there := splits.counted(rows)):
        raise RequestError(
            f"held_out and evaluation share the split {split!r}, so fewer than its {there:,} samples can be held "
            f"out, got held_out.samples: {wanted:,}; hold out fewer"
        )
    return rows.select(range(count)), rows.select(range(count, len(rows)))


def all_looks(task: type[Task], deploy: DeploySection | None, *, classifies: bool) -> tuple[Looks, ...]:
    """Return how often a promise may be looked at by the number of held-out rows, most looks first.

    Only a classifier has compounds. A budget of `keep`, without `deploy`, looks as the last one says; the others are
    there so that it holds out the same rows as a deployment, if there are enough.
    """
    bits = count_reduced_precision(task, () if deploy is None else deploy.runtimes)
    compounds = [Looks(SEARCHED, compounds=len(FLOPS_TO_TRY), bits=bits)] if classifies else []
    return (*compounds, Looks(SEARCHED, bits=bits), Looks(bits=bits), *([Looks()] if deploy is None else []))


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
    keep, compound = recipe.goal.keep, recipe.cascade
    words, sizes, most = "", [0], 0
    if keep is not None:
        most = keep.samples
        if keep.predictions is None:
            words, sizes = loss_words(keep), [LEAST_FOR_LOSS]
        else:
            classifies = task.classifies and task.predicts == "classes" and metric is None
            looks = all_looks(type(task), recipe.deploy, classifies=classifies)
            words, sizes = f"{100 * keep.predictions:g} %", [one.rows(keep.predictions, metric) for one in looks]
    if compound is not None:
        needed = rate_rows_needed(compound.disagreement)
        choices = chosen_on(recipe.options)
        # Held-out rows are divided between what else is chosen on them and the compound, see `draw`.
        sizes = [max(needed + min(choices, needed), 2 * sizes[-1])]
        words = f"a disagreement of at most {100 * compound.disagreement:g} %"
        most = choices + compound.samples
    if not words:
        return None
    return Promise(words, tuple(sizes), most, blocks=task.generative and recipe.data.prompt is None)


def hold_out(splits: Splits, promise: Promise | None, load: Callable[..., datasets.Dataset]) -> Splits:
    """Return splits that hold out rows of the evaluated split for a promise; the other evaluated rows judge it.

    The model was often trained on the split that units are scored on, and is surer of those rows than of new ones.
    So a promise is not made on further rows of that split. The splits stay as they are where both are slices of one,
    the recipe names other held-out rows or asks for fewer than the promise takes, or the evaluated rows are too few, of
    which it warns.
    """
    evaluation, together = splits.evaluation, splits.data.together
    split = evaluation.split
    of_one = whole_split(split) == whole_split(splits.calibration.split)
    if promise is None or splits.held_out is not None or promise.most < promise.sizes[-1] or of_one:
        return splits
    loaded = load(split, samples=1 if together is None else None)  # one row is enough to learn how many there are
    rows = total = taken_from(loaded)
    if together is not None:
        # Only queries are judged, not what they may find.
        of_queries = [value for value in common_values(loaded, together) if value is not None]
        rows = len(of_queries)
        of_each = math.ceil(rows / max(1, len(set(of_queries))))
        sizes = tuple(of_each * size for size in promise.sizes)
        promise = replace(promise, sizes=sizes, most=max(promise.most, sizes[-1]))
    # Who asks for all rows then evaluates all that are left.
    everything = evaluation.samples in (None, rows, total)
    count = promise.count(rows, evaluated=None if everything else evaluation.samples)
    if not count:
        logger.warning(
            "the split %r has %s rows, too few to promise %s on some and to judge it on the others, which takes %s: %s "
            "is promised on further rows of %r, and if the model was trained on these, it keeps less of new ones; "
            "evaluate on more rows, ask for less, or name rows as held_out",
            *(split, f"{rows:,}", promise.words, f"{math.ceil(4 * promise.sizes[-1] / 3):,}"),
            *(promise.words, splits.calibration.split),
        )
        return splits
    if everything and evaluation.samples is not None:
        evaluation = evaluation.model_copy(update={"samples": evaluation.samples - count})
    return replace(splits, evaluation=evaluation, held_out=HeldOutSection(split=split, samples=count))
