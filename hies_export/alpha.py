"""Choose alpha on data: the best blend of importance and entropy differs from model to model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .values import HeadScores, PruningPlan

ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Judgement:
    """How a plan does on data that heads were not scored on.

    Attributes:
        quality: The task metric; None where there are no labels.
        standard_error: Of that metric over so few samples.
        stability: Share of predictions equal to the dense model's.
    """

    quality: float | None
    standard_error: float
    stability: float


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
