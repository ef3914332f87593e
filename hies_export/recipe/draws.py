"""Draw the rows of a run from the splits that a recipe names, each use from separate rows if there are enough."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import datasets

from ..data.rows import common_values, taken_from, whole
from ..errors import RequestError
from ..score.criteria import AUTO
from .sections import CalibrationSection, DataSection, EvaluationSection, HeldOutSection, PruneSection

logger = logging.getLogger(__name__)

# Held-out rows on which `alpha: auto` is chosen.
HELD_OUT_SAMPLES = 256
# Held-out rows on which `criterion: auto` is chosen: its candidates differ by few predictions.
AUTO_SAMPLES = 512
# Held-out rows on which `max_drop` is checked: on fewer rows, noise would hide a loss of 0.01.
MAX_DROP_SAMPLES = 1024
# Quality is judged on the same rows, whatever the seed of a run.
EVALUATION_SEED = 0


@dataclass(frozen=True)
class Splits:
    """The splits that a run reads, by the sections of its recipe; without `held_out`, choices are made on further rows.

    Further rows are those of the calibration split that are not scored on.
    """

    data: DataSection
    calibration: CalibrationSection
    evaluation: EvaluationSection
    held_out: HeldOutSection | None = None

    @property
    def divided(self) -> bool:
        """Whether the held-out rows come from the evaluated split, which is then divided."""
        return self.held_out is not None and self.held_out.split == self.evaluation.split

    @property
    def together(self) -> str | None:
        """The column of what rows have in common that are not divided: a query."""
        return self.data.query or self.data.group

    def until(self, rows: datasets.Dataset, end: int) -> int:
        """Return the first place from `end` on at which drawn rows can be divided."""
        if self.together is None:
            return min(end, len(rows))
        return whole(common_values(rows, self.together), end)

    def counted(self, rows: datasets.Dataset) -> int:
        """Return how many rows are judged: all, or those that have a query."""
        if self.data.query is None or self.data.query not in rows.column_names:
            return len(rows)
        return sum(value is not None for value in common_values(rows, self.data.query))


@dataclass(frozen=True)
class Draws:
    """Numbers of samples to draw from the calibration split, in the order of a seed."""

    seed: int
    scoring: int
    held_out: int  # after those to score on
    compensation: int  # from the start again
    apart: bool = False  # whether held-out samples are kept out of the refit too, if there are enough
    promised: int = 0  # held-out samples for a promise, after those for choices

    @classmethod
    def of(cls, options: PruneSection, calibration: CalibrationSection, *, promised: int = 0) -> Draws:
        """Return the draws of a run, by its options and the number of samples to make a promise on."""
        by_choice = {
            "max_drop": MAX_DROP_SAMPLES,
            "keep": 0 if options.goal.keep is None else options.goal.keep.samples,
            "criterion: auto": AUTO_SAMPLES,
            "alpha: auto": HELD_OUT_SAMPLES,
            None: 0,
        }
        return cls(
            seed=calibration.seed,
            scoring=calibration.samples,
            held_out=by_choice[options.judged_on_held_out] + promised,
            compensation=0 if options.compensation is None else options.compensation.samples,
            apart=options.criterion == AUTO or options.goal.keep is not None or promised > 0,
            promised=promised,
        )


@dataclass(frozen=True)
class Drawn:
    """Samples by use, as in `Rows`; `scoring` are those to calibrate on."""

    scoring: datasets.Dataset
    held_out: datasets.Dataset
    compensation: datasets.Dataset
    promised: datasets.Dataset


def draw(splits: Splits, load: Callable[..., datasets.Dataset], options: PruneSection, draws: Draws) -> Drawn:
    """Return the samples to score on, to choose on, to refit on and to promise on."""
    split, asked = splits.calibration.split, splits.held_out
    own, further = None, draws.held_out
    if draws.held_out and asked is not None:
        count = asked.samples or draws.held_out
        if splits.divided:
            own, _ = _divided(splits, asked, load)
            own = own.select(range(splits.until(own, count)))
        else:
            own = load(asked.split, samples=count, shuffle_seed=draws.seed)
        further = 0
    most = max(draws.scoring + further, draws.compensation + further * draws.apart)
    drawn = load(split, samples=most, shuffle_seed=draws.seed)
    # Of queries and documents, rows with a query come first, and others cannot be judged.
    there = splits.counted(drawn)
    if further and there <= splits.until(drawn, draws.scoring):
        what = options.judged_on_held_out or "alpha: auto"
        remedy = {"criterion: auto": "choose a criterion", "alpha: auto": "set alpha"}.get(
            what, "choose another budget"
        )
        raise RequestError(
            f"{what} needs samples beyond the {draws.scoring} to score on, but the split {split!r} has {there}; "
            f"lower calibration.samples, name other rows as held_out, or {remedy}"
        )

    _warn_of_fewer("calibration.samples", draws.scoring, len(drawn), split)
    section = options.compensation
    # The default is as many as there are, up to a number.
    if section is not None and "samples" in section.model_fields_set:
        _warn_of_fewer("prune.compensation.samples", draws.compensation, len(drawn), split)
    if own is not None and asked is not None and asked.samples is not None:
        _warn_of_fewer("held_out.samples", asked.samples, len(own), asked.split)

    def part(rows: datasets.Dataset, start: int, count: int) -> datasets.Dataset:
        return rows.select(list(range(splits.until(rows, start), splits.until(rows, start + count))))

    # Nothing is promised on rows that are refitted on. If there are too few for both, two thirds are held out.
    promises = further > 0 and (draws.promised > 0 or options.goal.keep is not None)
    left = max(there - further, there // 3 if promises else 0)
    behind = max(draws.scoring, min(draws.compensation, left) if draws.apart else 0)
    held_out = part(drawn, behind, further) if own is None else own
    chosen_on = min(draws.held_out - draws.promised, len(held_out) // 2) if draws.promised else len(held_out)
    return Drawn(
        scoring=part(drawn, 0, draws.scoring),
        held_out=part(held_out, 0, chosen_on),
        compensation=part(drawn, 0, min(draws.compensation, behind) if promises else draws.compensation),
        promised=part(held_out, chosen_on, len(held_out)),
    )


def evaluated(splits: Splits, load: Callable[..., datasets.Dataset]) -> datasets.Dataset:
    """Return the samples to evaluate on."""
    wanted = splits.evaluation
    if splits.divided and splits.held_out is not None:
        held_out, rows = _divided(splits, splits.held_out, load)
        rows = rows.select(range(splits.until(rows, wanted.samples or len(rows))))
        _warn_of_fewer("evaluation.samples", wanted.samples or 0, len(rows), wanted.split, len(held_out))
        return rows
    seed = EVALUATION_SEED if wanted.samples is not None and wanted.rows == "drawn" else None
    rows = load(wanted.split, samples=wanted.samples, shuffle_seed=seed, in_order=True)
    _warn_of_fewer("evaluation.samples", wanted.samples or 0, taken_from(rows), wanted.split)
    return rows


def _divided(
    splits: Splits, asked: HeldOutSection, load: Callable[..., datasets.Dataset]
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the samples of the evaluated split to hold out, and the others, in the same random order for every run."""
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


def _warn_of_fewer(field: str, asked: int, there: int, split: str, held_out: int = 0) -> None:
    """Warn if a split has fewer samples, beside those that are held out, than a field of the recipe asks for."""
    if there < asked:
        beside = f" beside the {held_out:,} held out" if held_out else ""
        only = f"{there:,}{beside}"
        logger.warning("%s is %s, but the split %r has only %s: all are used", field, f"{asked:,}", split, only)
