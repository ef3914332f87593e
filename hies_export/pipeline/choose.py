"""Choose the units to keep: score and select as the options ask."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from .. import processes
from ..calibrate.statistics import Statistics
from ..errors import PlanError
from ..forms.latency import latency_table
from ..kinds import ATTENTION, MLP
from ..recipe.budget import Budget, Found, Outcome
from ..score.criteria import AUTO, Scores
from ..select.constraints import check_budget
from ..select.cost import CostTable, Goal, check_reachable, lowest_ratio, shares_to_try
from ..units.units import Selection
from .held_out import HeldOut, choose_alpha, choose_by_agreement
from .job import Job
from .search import budget_where, nothing, search
from .stages import (
    Choice,
    Trial,
    choice_of,
    refit_of,
    score,
    select,
    token_weights_of,
)

# If held-out rows decide how much to remove, the removable cost is divided into this many sizes.
SIZES = 100


def choose(job: Job, statistics: Statistics, scored: Sequence[Scores] = ()) -> Choice:
    """Choose the units that stay as the options ask, by scores that may be known already.

    `alpha: auto` and `criterion: auto` are chosen on the held-out rows.
    """
    if job.budget.heads == 0:
        return nothing(job, statistics, (scored or score(job, statistics))[0])
    table = cost_table(job)
    if job.budget.searched:
        return search(job, statistics, scored or score(job, statistics), sizes_of(job, table), table)
    goal = Goal(heads=job.budget.heads)
    if table is not None:
        assert job.budget.ratio is not None
        goal = Goal(ratio=job.budget.ratio / table.dense, table=table)
    pick = _by_agreement if job.options.criterion == AUTO else _by_alpha
    trial, judged = pick(job, statistics, scored or score(job, statistics), goal)
    return choice_of(job, statistics, trial, outcome=_outcome(job, table, trial.selection), **judged)


def choose_within(job: Job, statistics: Statistics, share: float, like: Choice) -> Choice:
    """Choose what stays within a share of the FLOPs, by the scores and the weights of tokens of another choice."""
    assert like.scores is not None
    check_reachable(job.scored, job.flops_table, ratio=share, constraints=job.options.constraints)
    selection = select(job, like.scores, Goal(ratio=share, table=job.flops_table))
    trial = Trial(like.scores, selection, like.token_weights)
    outcome = Outcome(Budget(flops=share), predicted=job.flops_left(selection))
    return choice_of(job, statistics, trial, outcome=outcome)


# A cut, and the fields of a `Choice` that say what was judged to choose it.
_Picked = tuple[Trial, dict[str, Any]]


def _by_agreement(
    job: Job, statistics: Statistics, scored: Sequence[Scores], goal: Goal
) -> tuple[Trial, dict[str, Any]]:
    """Choose the criterion, and the weights of tokens, whose refitted model agrees most with the dense one."""
    judge = job.judge(job.rows.held_out)
    held_out = {
        weights: HeldOut(judge, job.model, job.modules, refit_of(job, statistics, weights))
        for weights in token_weights_of(job)
    }
    job.progress.stage("choose the criterion on held-out rows")
    candidates = [(scores, select(job, scores, goal)) for scores in scored]
    tried = choose_by_agreement(candidates, held_out, progress=job.progress)
    (chosen,) = (one for one in tried if one.chosen)
    return Trial(*candidates[chosen.candidate], chosen.token_weights), {"tried": tried}


def _by_alpha(job: Job, statistics: Statistics, scored: Sequence[Scores], goal: Goal) -> _Picked:
    """Choose by the scores; of several alphas, the one that does best on held-out rows."""
    weights = token_weights_of(job)[0]
    if len(scored) == 1:
        return Trial(scored[0], select(job, scored[0], goal), weights), {}
    job.progress.stage("choose alpha on held-out rows")
    held_out = HeldOut(job.judge(job.rows.held_out), job.model, job.modules, refit_of(job, statistics, weights))
    tracked = job.progress.track(scored, "choose alpha")
    chosen = choose_alpha(((scores, select(job, scores, goal)) for scores in tracked), held_out)
    return Trial(chosen.scores, chosen.selection, weights), {"alpha_curve": chosen.curve}


def sizes_of(job: Job, table: CostTable | None) -> list[Goal]:
    """Return goals that remove more and more of the dense model, for budgets that held-out rows decide.

    Each removes 1 / `SIZES` more of the time or FLOPs that can be removed. If only heads go and nothing is timed, each
    removes one bundle of heads more. Raises PlanError if the constraints allow no cut.
    """
    scored, constraints = job.scored, job.options.constraints
    found: list[Goal] = []
    if table is None and any(module.kind == MLP for module in scored):
        table = job.flops_table
    if table is not None:
        least = lowest_ratio(scored, table, constraints)
        if least < 1:
            # In floats, 1 - (1 - least) may be slightly less than least, which no selection reaches.
            ratios = [max(least, 1 - (1 - least) * step / SIZES) for step in range(1, SIZES + 1)]
            found = [Goal(ratio=ratio, table=table) for ratio in ratios]
    else:
        for share in shares_to_try(scored, constraints):
            with contextlib.suppress(PlanError):  # more than the constraints allow
                check_budget(scored, heads=share, constraints=constraints)
                found.append(Goal(heads=share))
    if not found:
        raise PlanError(f"{job.budget.kind} needs units that may go, but the constraints leave none; loosen them")
    return found


def cost_table(job: Job) -> CostTable | None:
    """Return the table of the cost that the budget counts or times; None if it does neither.

    Raises PlanError if the constraints allow no cut that meets the budget.
    """
    budget = job.budget
    if budget.timed is None:
        return job.counted_table  # which `check_job` has held against the budget
    job.progress.stage("time cuts of several sizes, to predict the time of a plan")
    constraints = job.options.constraints
    # Times differ between processes, but their choices must not.
    table = processes.on_main(
        lambda: latency_table(
            job.model,
            job.scored,
            job.timed_on,
            unit=constraints.unit,
            progress=job.progress,
        )
    )
    if budget.ratio is not None:
        check_reachable(job.scored, table, ratio=budget.ratio, constraints=constraints)
    return table


def _outcome(job: Job, table: CostTable | None, selection: Selection) -> Outcome:
    """Return the budget with what the table of cost predicts; `run` adds what is measured."""
    budget = budget_where(job, job.budget)
    if table is None:
        heads = [kept for kept in selection.values() if kept.kind == ATTENTION]
        return Outcome(budget, found=Found(sum(len(of.removed) for of in heads) / sum(of.total for of in heads)))
    predicted = table.left(selection, job.scored, unit=job.options.unit)
    return Outcome(budget, predicted=predicted * table.dense, table=table.measured or ())
