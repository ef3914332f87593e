from __future__ import annotations

import pytest
import torch

from hies_export.evaluate.judge import standard_error
from hies_export.legacy import KeptHeads
from hies_export.pipeline.search import Judgement, choose_alpha
from hies_export.values import PruningPlan, Scores


def plan_of(heads: int) -> tuple[Scores, PruningPlan]:
    kept = tuple(range(heads))
    return Scores("hies", {}, {}), PruningPlan({"layer": KeptHeads(kept, kept, 9, 9)}, "hies", None, 0)


def chosen(judgements: dict[float, Judgement], *, higher_is_better: bool = True) -> float:
    """Every alpha has a plan of its own: one head more than the one before."""
    heads = {alpha: i + 1 for i, alpha in enumerate(judgements)}
    by_heads = {heads[alpha]: judgement for alpha, judgement in judgements.items()}
    choice = choose_alpha(
        lambda alpha: plan_of(heads[alpha]),
        lambda plan: by_heads[len(plan.kept["layer"].query)],
        alphas=tuple(judgements),
        higher_is_better=higher_is_better,
    )
    assert [point["alpha"] for point in choice.curve] == list(judgements)
    assert [point["stability"] for point in choice.curve] == [j.stability for j in judgements.values()]
    return next(alpha for alpha, n in heads.items() if n == len(choice.plan.kept["layer"].query))


def test_quality_decides_beyond_one_standard_error() -> None:
    assert chosen({0.1: Judgement(0.9, 0.01, 0.2), 0.5: Judgement(0.8, 0.01, 0.9)}) == 0.1


def test_of_perplexities_the_lowest_is_best() -> None:
    beyond = {0.1: Judgement(9.0, 0.1, 0.2), 0.5: Judgement(8.0, 0.1, 0.1), 0.9: Judgement(12.0, 0.1, 0.9)}
    assert chosen(beyond, higher_is_better=False) == 0.5
    within = {0.1: Judgement(8.0, 0.5, 0.2), 0.5: Judgement(8.4, 0.1, 0.3), 0.9: Judgement(8.6, 0.1, 0.9)}
    assert chosen(within, higher_is_better=False) == 0.5
    tie = {0.1: Judgement(8.0, 0.5, 0.5), 0.5: Judgement(8.1, 0.5, 0.5)}
    assert chosen(tie, higher_is_better=False) == 0.1


def test_stability_decides_within_one_standard_error() -> None:
    assert (
        chosen({0.1: Judgement(0.9, 0.01, 0.2), 0.5: Judgement(0.895, 0.5, 0.3), 0.9: Judgement(0.88, 0.5, 0.9)}) == 0.5
    )


def test_ties_go_to_quality_and_then_to_the_greater_alpha() -> None:
    tie = {0.1: Judgement(0.90, 0.05, 0.5), 0.5: Judgement(0.89, 0.05, 0.5), 0.9: Judgement(0.90, 0.05, 0.5)}
    assert chosen(tie) == 0.9


def test_without_labels_stability_decides() -> None:
    assert (
        chosen({0.1: Judgement(None, 0.0, 0.2), 0.5: Judgement(None, 0.0, 0.9), 0.9: Judgement(None, 0.0, 0.4)}) == 0.5
    )


def test_equal_plans_are_judged_once() -> None:
    judged: list[int] = []

    def judge(plan: PruningPlan) -> Judgement:
        judged.append(len(plan.kept["layer"].query))
        return Judgement(0.5, 0.1, 0.5)

    choice = choose_alpha(lambda alpha: plan_of(2 if alpha < 0.5 else 3), judge)
    assert judged == [2, 3]
    assert len(choice.curve) == 12


def test_standard_error_of_accuracy_is_the_binomial_one() -> None:
    torch.manual_seed(0)
    references = torch.randint(0, 2, (400,))
    right = torch.rand(400) < 0.8
    logits = torch.nn.functional.one_hot(torch.where(right, references, 1 - references), 2).float()
    p = right.float().mean().item()
    found = standard_error(logits, references, name="accuracy", regression=False, resamples=300)
    assert found == pytest.approx((p * (1 - p) / 400) ** 0.5, rel=0.15)
