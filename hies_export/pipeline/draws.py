"""Draw the rows of a run from the splits that a recipe names, each use from separate rows if there are enough."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import datasets

from ..data.rows import taken_from
from ..errors import RequestError
from ..recipe import PruneSection, PruningRecipe
from ..score.criteria import AUTO

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
class Draws:
    """Numbers of samples to draw from the calibration split, in the order of a seed."""

    seed: int
    scoring: int
    held_out: int  # after those to score on
    compensation: int  # from the start again
    apart: bool = False  # whether held-out samples are kept out of the refit too, if there are enough
    promised: int = 0  # held-out samples for a promise, after those for choices

    @classmethod
    def of(cls, options: PruneSection, *, seed: int, samples: int, promised: int = 0) -> Draws:
        """Return the draws of a run, by the number of samples to score on and to make a promise on."""
        by_choice = {
            "max_drop": MAX_DROP_SAMPLES,
            "keep": 0 if options.budget.keep is None else options.budget.keep.samples,
            "criterion: auto": AUTO_SAMPLES,
            "alpha: auto": HELD_OUT_SAMPLES,
            None: 0,
        }
        return cls(
            seed=seed,
            scoring=samples,
            held_out=by_choice[options.judged_on_held_out] + promised,
            compensation=0 if options.compensation is None else options.compensation.samples,
            apart=options.criterion == AUTO or options.budget.keep is not None or promised > 0,
            promised=promised,
        )


@dataclass(frozen=True)
class Drawn:
    """Samples by use, as in `Rows`; `scoring` are those to calibrate on."""

    scoring: datasets.Dataset
    held_out: datasets.Dataset
    compensation: datasets.Dataset
    promised: datasets.Dataset


def draw(recipe: PruningRecipe, load: Callable[..., datasets.Dataset], options: PruneSection, draws: Draws) -> Drawn:
    """Return the samples to score on, to choose on, to refit on and to promise on."""
    split = recipe.calibration.split
    own, further = None, draws.held_out
    if draws.held_out and recipe.held_out is not None:
        count = recipe.held_out.samples or draws.held_out
        if recipe.held_out_of_evaluation:
            own, _ = _divided(recipe, load)
            own = own.select(range(min(count, len(own))))
        else:
            own = load(recipe.held_out.split, samples=count, shuffle_seed=draws.seed)
        further = 0
    most = max(draws.scoring + further, draws.compensation + further * draws.apart)
    drawn = load(split, samples=most, shuffle_seed=draws.seed)
    if further and len(drawn) <= draws.scoring:
        what = options.judged_on_held_out or "alpha: auto"
        remedy = {"criterion: auto": "choose a criterion", "alpha: auto": "set alpha"}.get(
            what, "choose another budget"
        )
        raise RequestError(
            f"{what} needs samples beyond the {draws.scoring} to score on, but the split {split!r} has {len(drawn)}; "
            f"lower calibration.samples, name other rows as held_out, or {remedy}"
        )

    _warn_of_fewer("calibration.samples", draws.scoring, len(drawn), split)
    section = recipe.prune.compensation
    # The default is as many as there are, up to a number.
    if section is not None and "samples" in section.model_fields_set:
        _warn_of_fewer("prune.compensation.samples", draws.compensation, len(drawn), split)
    if own is not None and recipe.held_out is not None and recipe.held_out.samples is not None:
        _warn_of_fewer("held_out.samples", recipe.held_out.samples, len(own), recipe.held_out.split)

    def part(rows: datasets.Dataset, start: int, count: int) -> datasets.Dataset:
        return rows.select(list(range(start, min(start + count, len(rows)))))

    # Nothing is promised on rows that are refitted on. If there are too few for both, two thirds are held out.
    promises = further > 0 and (draws.promised > 0 or options.budget.keep is not None)
    left = max(len(drawn) - further, len(drawn) // 3 if promises else 0)
    behind = max(draws.scoring, min(draws.compensation, left) if draws.apart else 0)
    held_out = part(drawn, behind, further) if own is None else own
    chosen_on = min(draws.held_out - draws.promised, len(held_out) // 2) if draws.promised else len(held_out)
    return Drawn(
        scoring=part(drawn, 0, draws.scoring),
        held_out=part(held_out, 0, chosen_on),
        compensation=part(drawn, 0, min(draws.compensation, behind) if promises else draws.compensation),
        promised=part(held_out, chosen_on, len(held_out)),
    )


def evaluated(recipe: PruningRecipe, load: Callable[..., datasets.Dataset]) -> datasets.Dataset:
    """Return the samples to evaluate on."""
    wanted = recipe.evaluation
    if recipe.held_out_of_evaluation:
        held_out, rows = _divided(recipe, load)
        rows = rows.select(range(min(len(rows), wanted.samples or len(rows))))
        _warn_of_fewer("evaluation.samples", wanted.samples or 0, len(rows), wanted.split, len(held_out))
        return rows
    seed = EVALUATION_SEED if wanted.samples is not None and wanted.rows == "drawn" else None
    rows = load(wanted.split, samples=wanted.samples, shuffle_seed=seed, in_order=True)
    _warn_of_fewer("evaluation.samples", wanted.samples or 0, taken_from(rows), wanted.split)
    return rows


def _divided(recipe: PruningRecipe, load: Callable[..., datasets.Dataset]) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the samples of the evaluated split to hold out, and the others, in the same random order for every run."""
    assert recipe.held_out is not None
    rows = load(recipe.evaluation.split, samples=None, shuffle_seed=EVALUATION_SEED)
    count = recipe.held_out.samples or len(rows) // 2
    if not 0 < count < len(rows):
        raise RequestError(
            f"held_out and evaluation share the split {recipe.evaluation.split!r}, so fewer than its {len(rows):,} "
            f"samples can be held out, got held_out.samples: {count:,}; hold out fewer"
        )
    return rows.select(range(count)), rows.select(range(count, len(rows)))


def _warn_of_fewer(field: str, asked: int, there: int, split: str, held_out: int = 0) -> None:
    """Warn if a split has fewer samples, beside those that are held out, than a field of the recipe asks for."""
    if there < asked:
        beside = f" beside the {held_out:,} held out" if held_out else ""
        only = f"{there:,}{beside}"
        logger.warning("%s is %s, but the split %r has only %s: all are used", field, f"{asked:,}", split, only)
