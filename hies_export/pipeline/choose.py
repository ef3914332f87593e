"""Choose the units to keep: score and select as the options ask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from .. import processes
from ..calibrate.statistics import Statistics
from ..errors import PlanError
from ..evaluate.judge import Tried
from ..forms.cost.latency import latency_table
from ..kinds import ATTENTION, MLP
from ..recipe.budget import Budget, Found, Outcome
from ..score.criteria import AUTO, COMPENSATED, Scores
from ..select.constraints import bundles_lost, check_budget
from ..select.cost import (
    CostTable,
    Goal,
    check_reachable,
    compose,
    cost_to_go,
    filled_in,
    head_totals,
    heads_to_go,
    lowest_ratio,
    shares_to_try,
)
from ..units.find import find_modules
from ..units.units import Selection
from .held_out import HeldOut, choose_alpha, choose_by_agreement
from .job import Job
from .search import budget_where, nothing, search
from .stages import (
    Choice,
    Trial,
    calibrate,
    choice_of,
    refit_of,
    score,
    select,
    token_weights_of,
    trial_model,
)

# Below this share of the dense cost, removal in steps is the default of `criterion: auto`. Above, steps cost quality.
STEPS_BELOW = 0.45
# If held-out rows decide how much to remove, the removable cost is divided into this many sizes.
SIZES = 100


def choose(job: Job, statistics: Statistics, scored: Sequence[Scores] = ()) -> Choice:
    """Choose the units that stay as the options ask, by scores that may be known already.

    `alpha: auto` and `criterion: auto` are chosen on the held-out rows. With `steps`, the budget is spent in that many
    rounds. Each round scores the model that the previous rounds left, cut and, with compensation, refitted. The
    statistics of a unit are those of the last round it was part of.
    """
    if job.budget.heads == 0:
        return nothing(job, statistics, (scored or score(job, statistics))[0])
    table = cost_table(job)
    if job.budget.searched:
        return search(job, statistics, scored or score(job, statistics), sizes_of(job, table), table)
    if job.options.criterion == AUTO:
        picked = _automatically(job, statistics, table, scored)
    else:
        picked = _in_rounds(job, statistics, table, job.options.criterion, job.options.steps, scored)
    return choice_of(
        job,
        picked.statistics,
        picked.trial,
        outcome=_outcome(job, table, picked.trial.selection),
        alpha_curve=picked.curve,
        tried=picked.tried,
    )


def choose_within(job: Job, statistics: Statistics, share: float, like: Choice) -> Choice:
    """Choose what stays within a share of the FLOPs, by the scores and the weights of tokens of another choice."""
    assert like.scores is not None
    check_reachable(job.scored, job.flops_table, ratio=share, constraints=job.options.constraints)
    selection = select(job, like.scores, Goal(ratio=share, table=job.flops_table))
    trial = Trial(like.scores, selection, like.token_weights)
    outcome = Outcome(Budget(flops=share), predicted=job.flops_left(selection))
    return choice_of(job, statistics, trial, outcome=outcome)


@dataclass(frozen=True)
class _Picked:
    """The result of some rounds of choosing; `curve` and `tried` are what was judged to choose alpha or criterion."""

    statistics: Statistics
    trial: Trial
    curve: tuple[Mapping[str, Any], ...] = ()
    tried: tuple[Tried, ...] = ()


def _automatically(job: Job, statistics: Statistics, table: CostTable | None, scored: Sequence[Scores] = ()) -> _Picked:
    """Choose the criterion, and the weights of tokens, whose refitted model agrees most with the dense one."""
    (goal,) = _goals(job, table, 1)
    scored, weights = scored or score(job, statistics), token_weights_of(job)
    picked = [_Picked(statistics, Trial(scores, select(job, scores, goal({})), weights[0])) for scores in scored]
    steps = [1] * len(picked)
    if (count := _steps_of_auto(job, table)) > 1:
        # First, so that it is taken unless another is clearly better.
        picked.insert(0, _in_rounds(job, statistics, table, COMPENSATED, count))
        steps.insert(0, count)
    judge = job.judge(job.rows.held_out)
    held_out = {w: HeldOut(judge, job.model, job.modules, refit_of(job, statistics, w)) for w in weights}
    job.progress.stage("choose the criterion on held-out rows")
    candidates = [(one.trial.scores, one.trial.selection) for one in picked]
    tried = choose_by_agreement(candidates, held_out, steps=steps, progress=job.progress)
    (chosen,) = (one for one in tried if one.chosen)
    best = picked[chosen.candidate]
    return replace(best, trial=replace(best.trial, token_weights=chosen.token_weights), tried=tried)


def _steps_of_auto(job: Job, table: CostTable | None) -> int:
    """Return in how many steps `criterion: auto` also removes units."""
    if job.options.steps > 1:
        return job.options.steps
    deep = table is not None and job.budget.ratio is not None and job.budget.ratio / table.dense <= STEPS_BELOW
    return 2 if deep and job.options.compensation is not None else 1


def _in_rounds(
    job: Job,
    statistics: Statistics,
    table: CostTable | None,
    criterion: str,
    count: int,
    scored: Sequence[Scores] = (),
) -> _Picked:
    """Choose in a number of rounds, each of which scores the model that the previous ones left."""
    picked: _Picked | None = None
    rows = cache(partial(_held_out, job, statistics, token_weights_of(job)[0]))  # judges cuts of the dense model
    for number, goal in enumerate(_goals(job, table, count), start=1):
        if count > 1:
            job.progress.stage(f"step {number} of {count}")
        if picked is None:
            picked = _pick(job, job, statistics, scored or score(job, statistics, criterion), goal({}), rows)
            continue
        before = picked.trial.selection
        left = _left_by(job, statistics, picked.trial, criterion)
        lost = bundles_lost(before, job.scored, unit=job.options.unit)
        found = calibrate(left)
        picked = _after(picked, _pick(job, left, found, score(left, found), goal(lost), rows, before))
    assert picked is not None
    return picked


def _pick(
    job: Job,
    left: Job,
    statistics: Statistics,
    scored: Sequence[Scores],
    goal: Goal,
    rows: Callable[[], HeldOut],
    before: Selection | None = None,
) -> _Picked:
    """Choose in one round, from the model `left` by a selection `before`; with several alphas, by held-out rows.

    `rows` gives these, with the dense model's answers, when they are needed.
    """

    def selected(scores: Scores) -> Selection:
        found = select(left, scores, goal)
        return found if before is None else compose(before, found)

    weights = token_weights_of(job)[0]
    if len(scored) == 1:
        return _Picked(statistics, Trial(scored[0], selected(scored[0]), weights))
    job.progress.stage("choose alpha on held-out rows")
    tracked = job.progress.track(scored, "choose alpha")
    chosen = choose_alpha(((scores, selected(scores)) for scores in tracked), rows())
    return _Picked(statistics, Trial(chosen.scores, chosen.selection, weights), chosen.curve)


def _held_out(job: Job, statistics: Statistics, token_weights: float) -> HeldOut:
    """Return what judges cuts of the dense model on the held-out rows, refitted if the options ask."""
    return HeldOut(job.judge(job.rows.held_out), job.model, job.modules, refit_of(job, statistics, token_weights))


def _left_by(job: Job, statistics: Statistics, trial: Trial, criterion: str) -> Job:
    """Return the job with the dense model replaced by the one that a trial cuts, and refits."""
    slim = trial_model(job, statistics, trial)
    modules = find_modules(slim, job.sample, kinds=job.options.modules)
    names = {module.name for module in job.scored}
    options = job.options.model_copy(update={"criterion": criterion})
    scored = tuple(module for module in modules if module.name in names)
    return replace(job, model=slim, modules=modules, scored=scored, options=options)


def _after(earlier: _Picked, later: _Picked) -> _Picked:
    """Merge the picks of two successive rounds; the selection of the later one already is one of the dense model."""
    kept, moments = earlier.trial.selection, earlier.statistics.moments
    values = {
        name: filled_in(earlier.statistics[name], later.statistics[name], kept) for name in earlier.statistics.values
    }
    scores = replace(
        later.trial.scores,
        scores=filled_in(earlier.trial.scores.scores, later.trial.scores.scores, kept),
        chains=(),
    )
    statistics = replace(later.statistics, values=values, moments=moments)  # refits are of the dense model
    return replace(later, statistics=statistics, trial=replace(later.trial, scores=scores))


def _goals(job: Job, table: CostTable | None, count: int) -> list[Callable[[Mapping[str, int]], Goal]]:
    """Return a function for each of `count` rounds, from the bundles that modules lost before to the round's goal.

    Rounds that would remove no heads are left out.
    """
    if table is not None:
        assert job.budget.ratio is not None
        most = job.budget.ratio / table.dense
        return [partial(cost_to_go, table, 1 - (1 - most) * number / count) for number in range(1, count + 1)]
    heads, unit = job.budget.heads, job.options.unit
    assert heads is not None
    totals = head_totals(job.scored, heads=heads, count=count, constraints=job.options.constraints)
    return [partial(heads_to_go, job.scored, total, unit=unit) for total in totals]


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
