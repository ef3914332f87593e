"""Choose the units to keep: score and select as the options ask."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ..calibrate.statistics import Statistics
from ..errors import PlanError
from ..evaluate.judge import Tried
from ..kinds import ATTENTION
from ..recipe.budget import Budget, Found, Outcome
from ..score.criteria import AUTO, Scores
from ..select.constraints import check_budget
from ..select.cost import CostTable, Goal, check_reachable, lowest_ratio, shares_to_try
from ..units.units import Selection
from .pruning import Pruning
from .search import budget_as_timed, choose_nothing, search
from .stages import Choice, Trial, choice_of, predict_trial, score, select, token_weights_to_try
from .trials import Trials, choose_alpha, choose_by_agreement

# If held-out rows decide how much to remove, the removable cost is divided into this many sizes.
SIZES = 100


def choose(pruning: Pruning, statistics: Statistics, scored: Sequence[Scores] = ()) -> Choice:
    """Choose the units that stay as the options ask, by scores that are computed if not given."""
    budget = pruning.budget
    if budget.heads == 0:  # only tokens go
        return choose_nothing(pruning, statistics, Scores(pruning.options.criterion, {}, {}))
    table = _cost_table(pruning)
    scored = scored or score(pruning, statistics)
    if budget.searched:
        return search(pruning, statistics, scored, sizes_of(pruning, table), table)
    goal = Goal(heads=budget.heads)
    if table is not None:
        assert budget.ratio is not None
        goal = Goal(ratio=budget.ratio / table.dense, table=table)
    return _choose_for(goal, pruning, statistics, scored)


def choose_within(pruning: Pruning, statistics: Statistics, share: float, like: Choice) -> Choice:
    """Choose the units that stay within a share of the FLOPs, by the scores and weights of tokens of another choice."""
    assert like.scores is not None
    check_reachable(pruning.scored, pruning.flops_table, ratio=share, constraints=pruning.options)
    selection = select(pruning, like.scores, Goal(ratio=share, table=pruning.flops_table))
    outcome = Outcome(Budget(flops=share), predicted=pruning.flops_left(selection))
    return choice_of(pruning, statistics, Trial(like.scores, selection, like.token_weights), outcome=outcome)


def _choose_for(goal: Goal, pruning: Pruning, statistics: Statistics, scored: Sequence[Scores]) -> Choice:
    """Choose the units that stay to reach a goal: of several scores, by those whose cut does best on held-out rows."""
    weights, *others = token_weights_to_try(pruning)
    tried: tuple[Tried, ...] = ()
    if len(scored) == 1:
        trial = Trial(scored[0], select(pruning, scored[0], goal), weights)
    else:
        auto = pruning.options.criterion == AUTO
        pruning.progress.stage(f"choose {'the criterion' if auto else 'alpha'} on held-out rows")
        judge = pruning.judge(pruning.rows.held_out)
        trials = Trials(judge, lambda trial: predict_trial(pruning, statistics, trial, judge.batches))
        candidates = [Trial(scores, select(pruning, scores, goal), weights) for scores in scored]
        if auto:
            trial, tried = choose_by_agreement(candidates, others, trials, progress=pruning.progress)
        else:
            trial, tried = choose_alpha(candidates, trials, progress=pruning.progress)
    return choice_of(pruning, statistics, trial, _outcome(pruning, goal.table, trial.selection), tried)


def sizes_of(pruning: Pruning, table: CostTable | None) -> list[Goal]:
    """Return goals that remove more and more of the dense model, for a budget that is searched for on held-out rows.

    Each removes 1 / `SIZES` more of the time or FLOPs that can be removed. If only heads are removed and nothing is
    timed, each removes one more bundle of heads. Raises PlanError if the constraints allow no cut.
    """
    scored, constraints = pruning.scored, pruning.options
    goals: list[Goal] = []
    if table is None and any(module.kind != ATTENTION for module in scored):
        table = pruning.flops_table
    if table is not None:
        least = lowest_ratio(scored, table, constraints)
        if least < 1:
            # In floats, 1 - (1 - least) may be slightly less than least, which no selection reaches.
            ratios = [max(least, 1 - (1 - least) * step / SIZES) for step in range(1, SIZES + 1)]
            goals = [Goal(ratio=ratio, table=table) for ratio in ratios]
    else:
        for share in shares_to_try(scored, constraints):
            with contextlib.suppress(PlanError):  # more than the constraints allow
                check_budget(scored, heads=share, constraints=constraints)
                goals.append(Goal(heads=share))
    if not goals:
        raise PlanError(f"{pruning.budget.kind} needs units that may go, but the constraints leave none; loosen them")
    return goals


def _cost_table(pruning: Pruning) -> CostTable | None:
    """Return what every bundle of units saves of what the budget counts or times; None if it does neither.

    Cuts are timed if the budget is one of time. Raises PlanError if the constraints allow no cut that meets it.
    """
    budget = pruning.budget
    if budget.timed is None:
        return pruning.counted_table  # `check_pruning` has checked that a cut can meet the budget
    pruning.progress.stage("time cuts of several sizes, to predict the time of a plan")
    table = pruning.time_cuts(pruning)
    if budget.ratio is not None:
        check_reachable(pruning.scored, table, ratio=budget.ratio, constraints=pruning.options)
    return table


def _outcome(pruning: Pruning, table: CostTable | None, selection: Selection) -> Outcome:
    """Return the budget with the predicted cost of a selection, or of a budget of heads with the share removed."""
    budget = budget_as_timed(pruning, pruning.budget)
    if table is None:
        by_layer = [selection[module.name] for module in pruning.scored]  # other towers do not count
        removed = sum(len(kept.removed) for kept in by_layer) / sum(kept.total for kept in by_layer)
        return Outcome(budget, found=Found(removed))
    predicted = table.left(selection, pruning.scored, unit=pruning.options.unit)
    return Outcome(budget, predicted=predicted * table.dense, table=table.measured or ())
