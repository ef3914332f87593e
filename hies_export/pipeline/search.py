"""Choose alpha on data: the best blend of importance and entropy differs from model to model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import PlanError
from ..evaluate.judge import Judgement
from ..evaluate.metrics import METRICS
from ..values import HeadScores, PruningPlan

ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class AlphaChoice:
    """The chosen alpha, and what every candidate came to.

    Attributes:
        scores: Scores at the chosen alpha.
        plan: Plan at the chosen alpha.
        curve: Per candidate `alpha` and the fields of its `Judgement`.
    """

    scores: HeadScores
    plan: PruningPlan
    curve: tuple[Mapping[str, Any], ...]


def choose_alpha(
    plan_at: Callable[[float], tuple[HeadScores, PruningPlan]],
    judge: Callable[[PruningPlan], Judgement],
    *,
    alphas: Sequence[float] = ALPHAS,
    higher_is_better: bool = True,
) -> AlphaChoice:
    """Judge the plan of every alpha on held-out rows and take the best.

    Statistics are collected once; only scoring, selection and a forward pass of the masked model (or of the cut and
    refitted one, where heads will be compensated) over the held-out rows are repeated, and alphas that give the same
    plan are judged once. Quality on a few hundred rows cannot tell neighbours apart, so of the alphas within one
    standard error of the best quality the most stable is taken (the one-standard-error rule of Breiman et al. 1984,
    with stability in the place of simplicity). Ties go to the better quality, then to the greater alpha. Without labels
    stability alone decides.

    Args:
        plan_at: Scores and plan at an alpha.
        judge: How a plan does on data that heads were not scored on.
        alphas: Candidates, each in [0, 1).
        higher_is_better: Whether more quality is better, as the metric says (`METRICS[name].higher_is_better`).
    """

    def quality(judgement: Judgement) -> float:
        signed = 0.0 if judgement.quality is None else judgement.quality
        return signed if higher_is_better else -signed

    judged: dict[tuple[tuple[int, ...], ...], Judgement] = {}
    candidates = []
    for alpha in alphas:
        scores, plan = plan_at(alpha)
        key = tuple(kept.query for kept in plan.kept.values())
        if key not in judged:
            judged[key] = judge(plan)
        candidates.append((alpha, scores, plan, judged[key]))
    best = max((j for *_, j in candidates), key=quality)
    good = [c for c in candidates if quality(c[3]) >= quality(best) - best.standard_error]
    _, scores, plan, _ = max(good, key=lambda c: (c[3].stability, quality(c[3]), c[0]))
    curve = tuple({"alpha": alpha, **asdict(judgement)} for alpha, _, _, judgement in candidates)
    return AlphaChoice(scores=scores, plan=plan, curve=curve)


@dataclass(frozen=True)
class DropChoice:
    """The scores and the plan by which most heads go.

    Attributes:
        scores: The candidate that was taken.
        plan: Its plan.
        value: The metric of the plan, as it was judged.
        judged: Per plan that was tried alpha, heads removed, and the metric.
    """

    scores: HeadScores
    plan: PruningPlan
    value: float
    judged: tuple[Mapping[str, Any], ...]


def choose_by_drop(
    candidates: Iterable[HeadScores],
    plan_at: Callable[[HeadScores, int], PruningPlan],
    judge: Callable[[PruningPlan], float],
    *,
    steps: int,
    metric: str,
    dense: float,
    by: float,
) -> DropChoice:
    """Find, by bisection over evaluations, the last step whose metric holds, and the scores that go furthest.

    Statistics are reused, and no plan is judged twice. A later candidate must go further than the best so far; for
    most of them one evaluation shows that it does not.

    Args:
        candidates: Scores to choose from, e.g. one per alpha.
        plan_at: The plan of some scores at step 1..steps, each removing at least as much as the one before.
        judge: The metric of a plan, on rows that heads were not scored on.
        steps: How many steps there are.
        metric: A name in `METRICS`, which says whether more is better.
        dense: The dense model's metric on the same rows.
        by: How much worse it may get, in units of the metric.

    Raises:
        PlanError: Even the smallest cut costs more.
    """
    values: dict[tuple[tuple[int, ...], ...], float] = {}
    judged: list[Mapping[str, Any]] = []

    def value_of(plan: PruningPlan) -> float:
        key = tuple(kept.query for kept in plan.kept.values())
        if key not in values:
            values[key] = judge(plan)
            judged.append({"alpha": plan.alpha, "removed": plan.removed, metric: values[key]})
        return values[key]

    best: tuple[HeadScores, PruningPlan] | None = None
    passed = 0
    for scores in candidates:

        def holds(step: int, scores: HeadScores = scores) -> bool:
            return metric_drop(metric, dense, value_of(plan_at(scores, step))) <= by

        found = most_within(holds, steps, at_least=passed)
        if found > passed:
            passed, best = found, (scores, plan_at(scores, found))
    if best is None:
        least = min((metric_drop(metric, dense, value) for value in values.values()), default=0.0)
        raise PlanError(
            f"max_drop allows {metric} to get worse by {by:g}, but on the held-out rows even the smallest cut makes it "
            f"worse by {least:.4g} (dense {dense:.4g}); allow more, or use compensation with a budget of heads"
        )
    return DropChoice(*best, value=value_of(best[1]), judged=tuple(judged))


def most_within(passes: Callable[[int], bool], count: int, *, at_least: int = 0) -> int:
    """How many of the steps 1..count pass, by bisection: those up to the last that does.

    Presumes that a step which passes is not behind one that does not; only steps that were tried are promised.

    Args:
        passes: Whether a step passes.
        count: Number of steps.
        at_least: A step that is known to pass, for another candidate; 0 for none.
    """
    low, high = at_least, count + 1
    if low and low < count and not passes(low + 1):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def metric_drop(metric: str, dense: float, other: float) -> float:
    """How much worse a metric got, whichever way is better; negative where it got better."""
    worse = dense - other if METRICS[metric].higher_is_better else other - dense
    # 0.88 - 0.87 is a little more than 0.01.
    return round(worse, 12)
