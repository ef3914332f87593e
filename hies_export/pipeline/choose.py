"""Choose the units to keep as a recipe says: calibrate, score, select."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..calibrate.collect import DEFAULT_NEEDS, collect_statistics
from ..calibrate.effects import collect_effects
from ..calibrate.moments import collect_moments, moment_bytes
from ..cost.flops import flops_table
from ..cost.latency import TimedOn, latency_table
from ..data.targets import size_of
from ..errors import PlanError
from ..evaluate.judge import Judge
from ..measure.timing import Timing
from ..model.copies import share_weights
from ..model.tokens import first_samples
from ..progress import Progress
from ..prunable.find import find_modules
from ..recipe import CompensationSection, PruningRecipe
from ..score.compensated import score_compensated
from ..score.criteria import COMPENSATED, needs_of, score_units, uses_alpha
from ..select.budget import CostTable, check_reachable, counts_within, shares_to_try
from ..select.bundles import bundle_count
from ..select.constraints import check_budget
from ..select.iterative import compose, filled_in, rounds_of
from ..select.select import select_units
from ..slim.check import weight_norms
from ..slim.cut import prune_units
from ..slim.refit import Compensation, compensate, refit
from ..units import Selection
from ..values import Provenance, PruningPlan, Scores, Statistics, dump_json, library_versions
from .budgets import BudgetOutcome, CostOutcome, HeadsOutcome, MaxDropOutcome
from .measure import export
from .prepare import Prepared, constraints_of
from .quality import Refit
from .search import ALPHAS, HeldOut, choose_alpha, choose_by_max_drop

logger = logging.getLogger(__name__)

# If all moments together take more memory than this, candidates are evaluated without refitting.
MOMENT_LIMIT_BYTES = 4 << 30


@dataclass(frozen=True)
class Choice:
    """The plan of a run, and what it was chosen from.

    Attributes:
        statistics: Statistics of the calibration batches.
        scores: Scores of the units by the recipe's criterion.
        plan: The units to keep.
        alpha_curve: One entry per alpha under `alpha: auto`, see `AlphaChoice`; else empty.
        budget: The budget, with what is predicted for the plan.
        refit: Refits a model cut by a plan; None if candidates were evaluated masked. It holds the moments of all
            units, which may take gigabytes.
    """

    statistics: Statistics
    scores: Scores
    plan: PruningPlan
    alpha_curve: tuple[Mapping[str, Any], ...]
    budget: BudgetOutcome
    refit: Refit | None = None


def choose(prepared: Prepared, recipe: PruningRecipe, *, progress: Progress) -> Choice:
    """Calibrate, score and select; with `alpha: auto`, also choose alpha on the held-out rows.

    With `steps`, the budget is spent in that many rounds. Each round scores the model that the previous rounds left,
    cut and, if the recipe compensates, refitted. The statistics of a unit are those of the last round it was part of.
    """
    prune = recipe.prune
    if prune.steps == 1:
        return _Chooser(prepared, recipe, progress).choose()
    assert prune.budget.heads is not None  # the recipe allows steps with no other budget
    chosen: Choice | None = None
    rounds = rounds_of(prepared.scored, heads=prune.budget.heads, count=prune.steps, constraints=constraints_of(recipe))
    for number, part in enumerate(rounds, start=1):
        progress.stage(f"step {number}")
        current = prepared if chosen is None else _left_by(chosen.plan, prepared, recipe)
        heads, counts = part.size(current.scored)
        found = _Chooser(current, recipe, progress, dense=prepared.model).choose(heads=heads, counts=counts)
        chosen = found if chosen is None else _after(chosen, found)
    assert chosen is not None
    return chosen


def _after(earlier: Choice, later: Choice) -> Choice:
    """Merge the choices of two successive rounds into one choice for the dense model."""
    kept = earlier.plan.kept
    values = {
        name: filled_in(earlier.statistics[name], later.statistics[name], kept) for name in earlier.statistics.values
    }
    return replace(
        later,
        statistics=replace(later.statistics, values=values),
        scores=replace(later.scores, scores=filled_in(earlier.scores.scores, later.scores.scores, kept)),
        plan=replace(later.plan, kept=compose(kept, later.plan.kept), model=earlier.plan.model),
        refit=None,  # it refits the model that the earlier rounds left, while the plan is for the dense model
    )


def _left_by(plan: PruningPlan, prepared: Prepared, recipe: PruningRecipe) -> Prepared:
    """Return the prepared run with the dense model replaced by the one cut, and compensated, by a plan."""
    slim = prune_units(share_weights(prepared.model), plan, prepared.sites, inplace=True)
    if recipe.prune.compensation is not None:
        how = compensation_of(recipe.prune.compensation)
        compensate(prepared.model, slim, plan, prepared.sites, prepared.compensation, how)
    modules = find_modules(slim, first_samples(prepared.calibration[0]))
    names = {module.name for module in prepared.scored}
    return replace(prepared, model=slim, sites=modules, scored=tuple(m for m in modules if m.name in names))


def compensation_of(section: CompensationSection) -> Compensation:
    """Return the `Compensation` that a recipe's section describes."""
    return Compensation(method=section.method, ridge=section.ridge, sequential=section.sequential)


class _Chooser:
    """Choice of the units to keep in one model.

    Args:
        prepared: The model and its data.
        recipe: The criterion, budget and constraints.
        progress: Shows stages and loops.
        dense: The model to compare predictions with; by default the prepared one.
    """

    def __init__(
        self, prepared: Prepared, recipe: PruningRecipe, progress: Progress, *, dense: PreTrainedModel | None = None
    ):
        self._prepared, self._recipe, self._progress = prepared, recipe, progress
        self._dense = dense or prepared.model
        self._constraints = constraints_of(recipe)

    def choose(self, *, heads: float | None = None, counts: Sequence[int] | None = None) -> Choice:
        """Choose the units to keep within the recipe's budget, or remove a given amount instead.

        Args:
            heads: Share of the heads to remove.
            counts: Number of bundles to remove from each module.
        """
        prepared, prune = self._prepared, self._recipe.prune
        # Before scoring, so that a budget of FLOPs or time that cannot be met fails early.
        table = self._cost_table()
        statistics = self._statistics()
        candidates = self._candidates(statistics)
        if prune.budget.max_drop is not None:
            return self._by_max_drop(statistics, candidates)

        def select(scores: Scores) -> Selection:
            size: Mapping[str, Any] = {"heads": heads, "counts": counts}
            if table is not None:
                ratio = self._target()
                within = counts_within(scores, prepared.scored, table, ratio=ratio, constraints=self._constraints)
                size = {"counts": within}
            elif heads is None and counts is None:
                size = {"heads": prune.budget.heads}
            return select_units(scores, prepared.sites, **size, constraints=self._constraints)

        if len(candidates) == 1:
            (scores,) = candidates
            plan = self._plan(select(scores), scores, statistics)
            return Choice(statistics, scores, plan, (), self._outcome(table, plan.kept))
        self._progress.stage("choose alpha")
        held_out = self._held_out(prepared.metrics)
        chosen = choose_alpha(self._progress.track(candidates, "choose alpha"), select, held_out)
        plan = self._plan(chosen.selection, chosen.scores, statistics)
        outcome = self._outcome(table, plan.kept)
        return Choice(statistics, chosen.scores, plan, chosen.curve, outcome, held_out.refit)

    def _statistics(self) -> Statistics:
        self._progress.stage("score")
        return collect_statistics(
            self._prepared.model,
            self._prepared.calibration,
            self._prepared.scored,
            needs=(*DEFAULT_NEEDS, *needs_of(self._recipe.prune.criterion)),
            progress=self._progress,
        )

    def _candidates(self, statistics: Statistics) -> list[Scores]:
        """Return the candidate scores: one per alpha under `alpha: auto`, else a single one."""
        prune, seed = self._recipe.prune, self._recipe.calibration.seed
        if prune.criterion == COMPENSATED:
            effects = collect_effects(
                self._prepared.model,
                self._prepared.calibration,
                self._prepared.scored,
                progress=self._progress,
            )
            scored = self._prepared.scored
            return [score_compensated(effects, scored, progress=self._progress)]
        if prune.alpha != "auto":
            alphas: tuple[float, ...] = (prune.alpha,)
        else:
            alphas = ALPHAS if uses_alpha(prune.criterion) else (0.0,)
        options: dict[str, Any] = {"criterion": prune.criterion, "normalize": prune.normalize, "seed": seed}
        return [score_units(statistics, alpha=alpha, **options) for alpha in alphas]

    def _plan(self, selection: Selection, scores: Scores, statistics: Statistics) -> PruningPlan:
        calibration = statistics.calibration
        provenance = Provenance(
            criterion=scores.criterion,
            alpha=scores.parameters.get("alpha"),
            seed=self._recipe.calibration.seed,
            calibration={
                "samples": calibration.samples,
                "labels": "predictions" if scores.criterion == COMPENSATED else calibration.labels,
                "fingerprint": calibration.fingerprint,
            },
            versions=library_versions(),
            model=weight_norms(self._prepared.model, self._prepared.sites),
        )
        return PruningPlan.of(selection, provenance)

    def _held_out(self, metrics: tuple[str, ...]) -> HeldOut:
        """Return the judge of selections on the held-out rows; it refits them if the recipe compensates."""
        prepared = self._prepared
        judge = Judge.on(
            self._dense,
            prepared.held_out,
            metrics=metrics,
            regression=prepared.regression,
            tolerance=self._recipe.evaluation.stability_tolerance,
        )
        return HeldOut(judge, prepared.model, prepared.sites, self._collect_refit())

    def _collect_refit(self) -> Refit | None:
        """Collect moments once, and return the function that refits a cut model from them.

        None if the recipe does not compensate, or if the moments would take more than `MOMENT_LIMIT_BYTES`.
        """
        section, prepared = self._recipe.prune.compensation, self._prepared
        if section is None:
            return None
        needed = moment_bytes(prepared.sites)
        if needed > MOMENT_LIMIT_BYTES:
            logger.warning(
                "candidates are compared without compensation, and only the chosen one is compensated: to refit all of "
                "them, this model would need %.0f GB of memory",
                needed / 1e9,
            )
            return None
        moments = collect_moments(
            prepared.model,
            prepared.sites,
            prepared.compensation,
            progress=self._progress,
        )
        how = compensation_of(section)
        return lambda slim, selection: refit(slim, selection, prepared.sites, moments, how)

    def _target(self) -> float:
        """Return the target of a budget of FLOPs or time, as a share of the dense model's."""
        budget = self._recipe.prune.budget
        ratio = budget.flops if budget.latency is None else budget.latency.ratio
        assert ratio is not None
        return ratio

    def _cost_table(self) -> CostTable | None:
        """Return the cost table for a budget of FLOPs or time; None for other budgets.

        Raises:
            PlanError: The constraints do not allow a cut that meets the budget.
        """
        prepared, recipe, budget = self._prepared, self._recipe, self._recipe.prune.budget
        if budget.latency is not None:
            self._progress.stage("time cuts")
            where = TimedOn(
                runtime=budget.latency.runtime,
                batch=prepared.measured[self._budget_shape()],
                timing=Timing(repeats=recipe.measure.repeats, min_seconds=recipe.measure.min_seconds),
                export=lambda model, folder: export(prepared, model, recipe, folder),
            )
            unit, progress = recipe.prune.unit, self._progress
            table = latency_table(prepared.model, prepared.scored, where, unit=unit, progress=progress)
        elif budget.flops is not None:
            batch = next(iter(prepared.measured.values()))
            table = flops_table(prepared.model, prepared.scored, batch=batch, unit=recipe.prune.unit)
        else:
            return None
        check_reachable(prepared.scored, table, ratio=self._target(), constraints=self._constraints)
        return table

    def _budget_shape(self) -> tuple[int, int]:
        """Return the measured (batch, sequence) of a budget of time.

        For images and prompts only the batch is compared, because every batch has the same sequence.
        """
        wanted = self._recipe.prune.budget.latency
        assert wanted is not None
        of_batch = [shape for shape in self._prepared.measured if shape[0] == wanted.batch]
        return next((shape for shape in of_batch if shape[1] == wanted.sequence), of_batch[0])

    def _outcome(self, table: CostTable | None, selection: Selection) -> BudgetOutcome:
        """Return the budget with what the cost table predicts; `run` adds what is measured."""
        budget, unit = self._recipe.prune.budget, self._recipe.prune.unit
        if table is None:
            return HeadsOutcome("heads", budget.heads)
        lost = {
            module.name: bundle_count(module, unit) * len(selection[module.name].removed) // module.units
            for module in self._prepared.scored
        }
        if budget.latency is None:
            return CostOutcome("flops", self._target(), table.ratio(lost))
        batch, sequence = self._budget_shape()
        runtime = budget.latency.runtime
        return CostOutcome("latency", self._target(), table.ratio(lost), runtime, batch, sequence, table.measured)

    def _by_max_drop(self, statistics: Statistics, candidates: Sequence[Scores]) -> Choice:
        """Choose the scores and the largest share of heads to remove for which the held-out metric holds."""
        self._progress.stage("choose sparsity")
        prepared, max_drop = self._prepared, self._recipe.prune.budget.max_drop
        assert max_drop is not None
        shares = []
        for share in shares_to_try(prepared.scored, self._constraints):
            with contextlib.suppress(PlanError):  # more than the constraints allow
                check_budget(prepared.scored, heads=share, constraints=self._constraints)
                shares.append(share)
        if not shares:
            raise PlanError("max_drop needs heads that may go, but the constraints leave none; loosen them")
        held_out = self._held_out((max_drop.metric,))

        def select(scores: Scores, size: int) -> Selection:
            return select_units(scores, prepared.sites, heads=shares[size - 1], constraints=self._constraints)

        tracked = self._progress.track(candidates, "choose sparsity")
        chosen = choose_by_max_drop(tracked, select, held_out, sizes=len(shares), by=max_drop.by)
        outcome = MaxDropOutcome(
            "max_drop",
            metric=max_drop.metric,
            by=max_drop.by,
            dense=held_out.dense(),
            refitted=chosen.value if held_out.refit else None,
            masked=None if held_out.refit else chosen.value,
            samples=sum(map(size_of, prepared.held_out)),
            judged=chosen.judged,
        )
        plan = self._plan(chosen.selection, chosen.scores, statistics)
        return Choice(statistics, chosen.scores, plan, (), outcome, held_out.refit)


def write_choice(folder: Path, choice: Choice) -> None:
    """Write scores.json (statistics and scores per unit) and plan.json."""
    statistics, scores = choice.statistics, choice.scores
    calibration = statistics.calibration
    written = {
        "criterion": scores.criterion,
        "parameters": scores.parameters,
        "scores": scores.scores,
        **{name: statistics[name] for name in DEFAULT_NEEDS},
        "samples": calibration.samples,
        "labels": calibration.labels,
        "fingerprint": calibration.fingerprint,
        "alpha_curve": choice.alpha_curve,
    }
    (folder / "scores.json").write_text(dump_json(written), encoding="utf-8")
    (folder / "plan.json").write_text(choice.plan.to_json(), encoding="utf-8")


def head_numbers(choice: Choice) -> dict[str, dict[str, list[float]]]:
    """Return lists of HIS, entropy and score over the heads: module name -> "his", "entropy" or "score" -> list."""
    values = {"his": choice.statistics["his"], "entropy": choice.statistics["entropy"], "score": choice.scores.scores}
    return {
        name: {what: numbers[name].tolist() for what, numbers in values.items() if name in numbers}
        for name in choice.scores.scores
    }
