"""Decide which rows a promise is made on: one rule for `budget: {keep: ...}`, `deploy` and `cascade`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import datasets

from ..data.facts import whole_split
from ..data.rows import common_values, taken_from
from ..evaluate.interval import FAILURES, confidence_of_each, queries_needed, rate_rows_needed, rows_needed
from ..forms.deployment import SEARCHED
from .draws import Draws, Splits
from .recipe import FLOPS_TO_TRY, PruningRecipe
from .sections import HeldOutSection, KeepBudget

logger = logging.getLogger(__name__)

# Least rows for the loss of a metric. On fewer, the bootstrap's interval is far too narrow: in a simulation, accuracy's
# misses the true loss in 18 % of the draws of 50 rows, 6 % of 100, 3 % of 200, 1.5 % of 400, where 0.8 % is meant.
LEAST_FOR_LOSS = 200


@dataclass(frozen=True)
class Looks:
    """How often a search may fail on the held-out rows; each look needs more confidence, and so more rows.

    A budget of `keep` is searched for once. `deploy` searches in several `forms`, and may try `cascades` as well.
    """

    forms: int = 1
    cascades: bool = False

    @property
    def confidence(self) -> float:
        """Confidence of each interval, so that all together have that of a promise."""
        return confidence_of_each(FAILURES * self.forms + SEARCHED * len(FLOPS_TO_TRY) * self.cascades)

    def rows(self, share: float, metric: str | None) -> int:
        """Return how many rows, or queries, show a share of predictions, or of a metric, if nothing is lost on them."""
        return (rows_needed if metric is None else queries_needed)(share, self.confidence)


def all_looks(*, classifies: bool) -> tuple[Looks, ...]:
    """Return all that a promise can be searched with, most looks first; only a classifier has cascades."""
    return (*([Looks(SEARCHED, cascades=True)] if classifies else []), Looks(SEARCHED), Looks())


@dataclass(frozen=True)
class Promise:
    """A promise in words, and how many rows it takes.

    Any of `sizes` is enough, and the larger ones, which come first, allow more looks. `most` are held out at most;
    `limited` tells whether the recipe says so.
    """

    words: str
    sizes: tuple[int, ...]
    most: int
    limited: bool = False

    @classmethod
    def of(cls, recipe: PruningRecipe, draws: Draws, *, metric: str | None, classifies: bool) -> Promise | None:
        """Return the promise of a recipe; None if it makes none.

        `metric` is that of which a share is promised, see `Judged.promised`; None if it is one of the predictions.
        """
        keep, cascade = recipe.goal.keep, recipe.cascade
        kept = None if keep is None else cls._of_keep(keep, metric, classifies)
        if cascade is None:
            return kept
        needed = rate_rows_needed(cascade.disagreement, confidence_of_each(len(recipe.shares)))
        choices = draws.held_out - draws.promised
        # Held-out rows are divided between what else is chosen on them and the cascade, see `draw`.
        least = max(needed + min(choices, needed), 0 if kept is None else 2 * kept.sizes[-1])
        return cls(f"a disagreement of at most {100 * cascade.disagreement:g} %", (least,), draws.held_out)

    @classmethod
    def _of_keep(cls, keep: KeepBudget, metric: str | None, classifies: bool) -> Promise:
        limited = "samples" in keep.model_fields_set
        if keep.predictions is None:
            return cls(f"a loss of at most {keep.by:g} of {keep.metric}", (LEAST_FOR_LOSS,), keep.samples, limited)
        looks = all_looks(classifies=classifies and metric is None)
        sizes = (one.rows(keep.predictions, metric) for one in looks)
        return cls(f"{100 * keep.predictions:g} %", tuple(sizes), keep.samples, limited)

    def of_queries(self, rows: int) -> Promise:
        """Return the same where every query has up to so many rows."""
        sizes = tuple(rows * size for size in self.sizes)
        return replace(self, sizes=sizes, most=max(self.most, sizes[-1]))

    def count(self, rows: int, *, evaluated: int | None = None) -> int:
        """Return how many of some rows it is made on, so that the others judge it; 0 if they are too few.

        These are two thirds. If two thirds are fewer than one of the sizes that three quarters reach, they are as many
        as that. If a number of rows to evaluate is asked for, as many are left, unless the promise has too few then.
        """
        room = min(self.most, 3 * rows // 4)
        if evaluated is not None and rows - evaluated >= self.sizes[-1]:
            room = min(room, rows - evaluated)
        enough = next((size for size in self.sizes if size <= room), 0)
        return enough and max(enough, min(room, 2 * rows // 3))


def hold_out(splits: Splits, promise: Promise | None, load: Callable[..., datasets.Dataset]) -> Splits:
    """Return splits that hold out rows for a promise; the other evaluated rows judge it.

    The model was often trained on the split that units are scored on, and is surer of those rows than of new ones. So
    the promise is made on rows of the evaluated split, unless the recipe holds out others. Two slices of one split are
    alike: further rows of the scored one will do. They must do, with a warning, if the evaluated rows are too few.
    """
    scored, evaluation, together = splits.calibration.split, splits.evaluation, splits.together
    if promise is None or splits.held_out is not None or promise.most < promise.sizes[-1]:
        return splits
    split = evaluation.split
    if whole_split(split) == whole_split(scored):
        return splits
    if evaluation.rows == "first":
        _warn(promise, splits, f"evaluation.rows: first leaves no rows of {split!r} to draw", "leave it out")
        return splits
    loaded = load(split, samples=1 if together is None else None)
    rows = total = taken_from(loaded)
    if together is not None:
        # Only queries are judged, not what they may find.
        of_queries = [value for value in common_values(loaded, together) if value is not None]
        rows = len(of_queries)
        promise = promise.of_queries(math.ceil(rows / max(1, len(set(of_queries)))))
    # All of them, before some are held out, are all that are left.
    everything = evaluation.samples in (None, rows, total)
    count = promise.count(rows, evaluated=None if everything else evaluation.samples)
    if not count:
        enough = math.ceil(4 * promise.sizes[-1] / 3)
        why = f"the split {split!r} has {rows:,} rows, too few to promise {promise.words} on some and to judge it on "
        _warn(promise, splits, f"{why}the others, which takes {enough:,}", "evaluate on more rows, ask for less")
        return splits
    if promise.limited and count < promise.most:
        logger.warning(
            "%s samples for the promise are asked for, but the split %r has %s: %s are held out, and the others judge",
            f"{promise.most:,}",
            split,
            f"{rows:,}",
            f"{count:,}",
        )
    if everything and evaluation.samples is not None:
        evaluation = evaluation.model_copy(update={"samples": evaluation.samples - count})
    return replace(splits, evaluation=evaluation, held_out=HeldOutSection(split=split, samples=count))


def _warn(promise: Promise, splits: Splits, why: str, remedy: str) -> None:
    """Warn that a promise is made on rows of the split that units are scored on."""
    logger.warning(
        "%s: %s is promised on further rows of %r, and if the model was trained on these, it keeps less of new ones; "
        "%s, or name rows as held_out",
        *(why, promise.words, splits.calibration.split, remedy),
    )
