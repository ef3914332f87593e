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
from ..evaluate.interval import LEAST_FOR_LOSS, Looks, confidence_of_each, rate_rows_needed
from ..evaluate.promise import loss_words
from ..forms.deployment import SEARCHED, fewer_bits
from ..recipe.sections import (
    CalibrationSection,
    CompoundSection,
    DataSection,
    DeploySection,
    EvaluationSection,
    HeldOutSection,
)
from ..score.criteria import AUTO
from ..tasks import Task
from .recipe import FLOPS_TO_TRY, PruneSection, PruningRecipe

logger = logging.getLogger(__name__)

# Number of held-out rows on which `alpha: auto` is chosen, and `criterion: auto`, whose candidates differ by few
# predictions.
HELD_OUT_SAMPLES, AUTO_SAMPLES = 256, 512
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
class Draws:
    """Numbers of samples to draw from the calibration split, in the order of a seed.

    Attributes:
        scoring: From the start.
        held_out: After those to score on, or from the split that the recipe holds out.
        compensation: From the start again.
        apart: Whether held-out samples are kept out of the refit too, if there are enough.
        promised: How many of the held-out samples the promise of a compound is made on: the last ones.
        compound: Name of the compound; empty without one.
    """

    seed: int
    scoring: int
    held_out: int
    compensation: int
    apart: bool = False
    promised: int = 0
    compound: str = ""

    @classmethod
    def of(
        cls, options: PruneSection, calibration: CalibrationSection, compound: CompoundSection | None = None
    ) -> Draws:
        """Return the draws of a run, by its options and the compound that it asks for."""
        keep, promised = options.goal.keep, 0 if compound is None else compound.samples
        by_choice = {"criterion: auto": AUTO_SAMPLES, "alpha: auto": HELD_OUT_SAMPLES, None: 0}
        chosen_on = by_choice[options.judged_on_held_out] if keep is None else keep.samples
        return cls(
            seed=calibration.seed,
            scoring=calibration.samples,
            held_out=chosen_on + promised,
            compensation=0 if options.compensation is None else options.compensation.samples,
            apart=options.criterion == AUTO or keep is not None or promised > 0,
            promised=promised,
            compound="" if compound is None else compound.name,
        )


@dataclass(frozen=True)
class Drawn:
    """Samples by use, by the names of the counts in `Draws`; `held_out` are without those `promised`."""

    scoring: datasets.Dataset
    held_out: datasets.Dataset
    compensation: datasets.Dataset
    promised: datasets.Dataset


def draw(splits: Splits, load: Callable[..., datasets.Dataset], options: PruneSection, draws: Draws) -> Drawn:
    """Draw the samples to score on, to choose on, to refit on, and to make the promise of a compound on.

    Raises RequestError if the calibration split has none left to hold out.
    """
    split, separate = splits.calibration.split, _separate_held_out(splits, load, draws)
    needed = draws.held_out if separate is None else 0  # from the calibration split
    count = max(draws.scoring + needed, draws.compensation + (needed if draws.apart else 0))
    drawn = load(split, samples=count, shuffle_seed=draws.seed)
    # Rows with a query come first, and the others, which only add documents, cannot be judged.
    available = splits.counted(drawn)
    if needed and available <= splits.until(drawn, draws.scoring):
        raise RequestError(_too_few(options, draws, split, available))

    def part(rows: datasets.Dataset, start: int, count: int) -> datasets.Dataset:
        return rows.select(list(range(splits.until(rows, start), splits.until(rows, start + count))))

    # A promise is not made on rows that layers are refitted on. If there are too few rows for both, a third is left for
    # the refit.
    promises = needed > 0 and (draws.promised > 0 or options.goal.keep is not None)
    for_refit = max(available - needed, available // 3 if promises else 0)
    start = max(draws.scoring, min(draws.compensation, for_refit) if draws.apart else 0)
    held_out = part(drawn, start, needed) if separate is None else separate
    chosen_on = min(draws.held_out - draws.promised, len(held_out) // 2) if draws.promised else len(held_out)
    return Drawn(
        scoring=part(drawn, 0, draws.scoring),
        held_out=part(held_out, 0, chosen_on),
        compensation=part(drawn, 0, min(draws.compensation, start) if promises else draws.compensation),
        promised=part(held_out, chosen_on, len(held_out)),
    )


def _separate_held_out(splits: Splits, load: Callable[..., datasets.Dataset], draws: Draws) -> datasets.Dataset | None:
    """Return rows of the split that the recipe holds out; None if it names none, or nothing is chosen on such rows."""
    if not draws.held_out or splits.held_out is None:
        return None
    count = splits.held_out.samples or draws.held_out
    if not splits.divided:
        return load(splits.held_out.split, samples=count, shuffle_seed=draws.seed)
    rows, _ = _divided(splits, splits.held_out, load)
    return rows.select(range(splits.until(rows, count)))


def _too_few(options: PruneSection, draws: Draws, split: str, available: int) -> str:
    """Return the error if none of the available rows of a split is left to hold out."""
    what = options.judged_on_held_out or draws.compound or "alpha: auto"
    remedies = {"criterion: auto": "choose a criterion", "alpha: auto": "set alpha", draws.compound: "leave it out"}
    remedy = remedies.get(what, "choose another budget")
    return (
        f"{what} needs samples beyond the {draws.scoring} to score on, but the split {split!r} has {available}; "
        f"lower calibration.samples, name other rows as held_out, or {remedy}"
    )


def evaluated(splits: Splits, load: Callable[..., datasets.Dataset]) -> datasets.Dataset:
    """Return the samples to evaluate on."""
    wanted = splits.evaluation
    if splits.divided and splits.held_out is not None:
        _, rows = _divided(splits, splits.held_out, load)
        return rows.select(range(splits.until(rows, wanted.samples or len(rows))))
    seed = EVALUATION_SEED if wanted.samples is not None and wanted.rows == "drawn" else None
    return load(wanted.split, samples=wanted.samples, shuffle_seed=seed, in_order=True)


def _divided(
    splits: Splits, asked: HeldOutSection, load: Callable[..., datasets.Dataset]
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the rows of the evaluated split to hold out, and the others, in a random order that every run shares."""
    split = splits.evaluation.split
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
    bits = fewer_bits(task, () if deploy is None else deploy.runtimes)
    compounds = [Looks(SEARCHED, compounds=len(FLOPS_TO_TRY), bits=bits)] if classifies else []
    return (*compounds, Looks(SEARCHED, bits=bits), Looks(bits=bits), *([Looks()] if deploy is None else []))


@dataclass(frozen=True)
class Promise:
    """A promise in words, and how many rows it takes.

    Attributes:
        words: What is promised.
        sizes: Numbers of rows that are enough, the largest first, which allows most looks.
        most: Largest number of rows to hold out.
        blocks: Whether rows are blocks of text: each has many predictions, so exactly one of `sizes` is held out.
    """

    words: str
    sizes: tuple[int, ...]
    most: int
    blocks: bool = False

    @classmethod
    def of(
        cls, recipe: PruningRecipe, task: type[Task], draws: Draws, *, metric: str | None, classifies: bool
    ) -> Promise | None:
        """Return the promise of a recipe; None if it makes none.

        `metric` is that of which a share is promised, see `pruning.promised_metric`; None for one of the predictions.
        """
        keep, compound, kept = recipe.goal.keep, recipe.compound, None
        if keep is not None:
            if keep.predictions is None:
                words, sizes = loss_words(keep), [LEAST_FOR_LOSS]
            else:
                looks = all_looks(task, recipe.deploy, classifies=classifies and metric is None)
                words, sizes = f"{100 * keep.predictions:g} %", [one.rows(keep.predictions, metric) for one in looks]
            kept = cls(words, tuple(sizes), keep.samples)
        if compound is None:
            return kept
        needed = rate_rows_needed(compound.disagreement, confidence_of_each(len(recipe.shares)))
        choices = draws.held_out - draws.promised
        # Held-out rows are divided between what else is chosen on them and the compound, see `draw`.
        least = max(needed + min(choices, needed), 0 if kept is None else 2 * kept.sizes[-1])
        return cls(compound.promise, (least,), draws.held_out)

    def of_queries(self, rows: int) -> Promise:
        """Return the same promise of queries, of which each has up to so many rows, in numbers of rows."""
        sizes = tuple(rows * size for size in self.sizes)
        return replace(self, sizes=sizes, most=max(self.most, sizes[-1]))

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


def hold_out(splits: Splits, promise: Promise | None, load: Callable[..., datasets.Dataset]) -> Splits:
    """Return splits that hold out rows of the evaluated split for a promise; the other evaluated rows judge it.

    The model was often trained on the split that units are scored on, and is surer of those rows than of new ones.
    So a promise is not made on further rows of that split, unless both splits are slices of one, the recipe names other
    held-out rows, or the evaluated rows are too few, of which it warns. The splits then stay as they are.
    """
    evaluation, together = splits.evaluation, splits.data.together
    split = evaluation.split
    if promise is None or splits.held_out is not None or promise.most < promise.sizes[-1]:
        return splits
    if whole_split(split) == whole_split(splits.calibration.split):
        return splits
    if evaluation.rows == "first":
        why = f"evaluation.rows: first leaves no rows of {split!r} to draw"
        return _without_promise(splits, promise, why, "leave it out")
    loaded = load(split, samples=1 if together is None else None)
    rows = total = taken_from(loaded)
    if together is not None:
        # Only queries are judged, not what they may find.
        of_queries = [value for value in common_values(loaded, together) if value is not None]
        rows = len(of_queries)
        promise = promise.of_queries(math.ceil(rows / max(1, len(set(of_queries)))))
    # Who asks for all rows then evaluates all that are left.
    everything = evaluation.samples in (None, rows, total)
    count = promise.count(rows, evaluated=None if everything else evaluation.samples)
    if not count:
        why = (
            f"the split {split!r} has {rows:,} rows, too few to promise {promise.words} on some and to judge it on the "
            f"others, which takes {math.ceil(4 * promise.sizes[-1] / 3):,}"
        )
        return _without_promise(splits, promise, why, "evaluate on more rows, ask for less")
    if everything and evaluation.samples is not None:
        evaluation = evaluation.model_copy(update={"samples": evaluation.samples - count})
    return replace(splits, evaluation=evaluation, held_out=HeldOutSection(split=split, samples=count))


def _without_promise(splits: Splits, promise: Promise, why: str, remedy: str) -> Splits:
    """Return the splits as they are, with a warning that the promise is made on rows of the scored split."""
    logger.warning(
        "%s: %s is promised on further rows of %r, and if the model was trained on these, it keeps less of new ones; "
        "%s, or name rows as held_out",
        *(why, promise.words, splits.calibration.split, remedy),
    )
    return splits
