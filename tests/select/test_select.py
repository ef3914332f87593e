from __future__ import annotations

import itertools

import pytest
import torch
from support.cuts import plan_of

from hies_export.errors import NonFiniteError, PlanError, RecipeError
from hies_export.units import Units
from hies_export.values import PruningPlan, Scores


def make_sites(*counts: int, group_size: int = 1) -> tuple[Units, ...]:
    return tuple(Units(name=f"l{i}", units=n * group_size, groups=n) for i, n in enumerate(counts))


def make_scores(*layers: list[float]) -> Scores:
    return Scores("hies", {"alpha": 0.5}, {f"l{i}": torch.tensor(v, dtype=torch.float64) for i, v in enumerate(layers)})


def kept(plan: PruningPlan) -> list[tuple[int, ...]]:
    return [k.units for k in plan.kept.values()]


def test_the_smallest_scores_go_first() -> None:
    plan = plan_of(make_scores([0.1, 0.9, 0.5], [0.2, 0.8, 0.7]), make_sites(3, 3), heads=0.5)
    assert kept(plan) == [(1,), (1, 2)]
    assert (plan.heads, plan.removed, plan.alpha, plan.criterion) == (6, 3, 0.5, "hies")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("min_heads", "keep_layers"), [(1, ()), (2, ()), (1, (0,)), (1, (-1,))])
def test_no_other_choice_keeps_more(seed: int, min_heads: int, keep_layers: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    plan = plan_of(
        make_scores(*scores.tolist()), make_sites(4, 4, 4), heads=0.4, min_heads=min_heads, keep_layers=keep_layers
    )
    total = sum(scores[i, list(k)].sum().item() for i, k in enumerate(kept(plan)))
    protected = {i % 3 for i in keep_layers}
    best = 0.0
    for removed in itertools.combinations(range(12), round(0.4 * 12)):
        left = [sum(1 for head in range(4) if 4 * i + head not in removed) for i in range(3)]
        if all(n >= min_heads for n in left) and all(left[i] == 4 for i in protected):
            best = max(best, scores.flatten().sum().item() - scores.flatten()[list(removed)].sum().item())
    assert plan.removed == 5
    assert total == pytest.approx(best)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused(value: float) -> None:
    scores, sites = make_scores([0.1, 0.9], [0.2, value]), make_sites(2, 2)
    with pytest.raises(NonFiniteError, match=f"must be a finite number, but head 1 of l1 has {value}; check"):
        plan_of(scores, sites, heads=0.5)


def test_min_heads_protects_a_weak_layer() -> None:
    scores = make_scores([0.0, 0.1, 0.2, 0.3], [0.6, 0.7, 0.8, 0.9])
    assert kept(plan_of(scores, make_sites(4, 4), heads=0.5)) == [(3,), (1, 2, 3)]
    assert kept(plan_of(scores, make_sites(4, 4), heads=0.5, min_heads=2)) == [(2, 3), (2, 3)]


def test_ties_always_break_the_same_way() -> None:
    plan = plan_of(make_scores([0.5] * 4, [0.5] * 4), make_sites(4, 4), heads=0.5, min_heads=1)
    assert kept(plan) == [(0, 1, 2), (0,)]


def test_uniform_removes_as_many_everywhere() -> None:
    scores = make_scores([0.0, 0.1, 0.2, 0.3], [0.9, 0.6, 0.8, 0.7], [0.4, 0.3, 0.5, 0.2])
    plan = plan_of(scores, make_sites(4, 4, 4), heads=0.5, allocation="uniform")
    assert kept(plan) == [(2, 3), (0, 2), (0, 2)]
    plan = plan_of(scores, make_sites(4, 4, 4), heads=0.5, allocation="uniform", keep_layers=(1,))
    assert kept(plan) == [(2, 3), (0, 1, 2, 3), (0, 2)]


def test_the_share_is_rounded() -> None:
    scores = torch.arange(72, dtype=torch.float64).view(6, 12) / 72
    plan = plan_of(make_scores(*scores.tolist()), make_sites(*[12] * 6), heads=0.3)
    assert plan.removed == round(0.3 * 72) == 22


def test_groups_go_together() -> None:
    scores = make_scores([0.1, 0.9, 0.2, 0.3], [0.8, 0.8, 0.7, 0.7])
    plan = plan_of(scores, make_sites(2, 2, group_size=2), heads=0.25)
    assert kept(plan) == [(0, 1), (0, 1, 2, 3)]
    assert plan.kept["l0"].kept_groups == (0,)


def test_a_plan_survives_json_byte_for_byte() -> None:
    plan = plan_of(make_scores([0.1, 0.9], [0.2, 0.8]), make_sites(2, 2), heads=0.5, seed=3, calibration={"samples": 4})
    again = PruningPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert plan.versions["torch"] == torch.__version__


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "kept": {"a": {}}}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="a plan must be JSON written by hies_export"):
        PruningPlan.from_json(text)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.2, -0.1])
def test_the_share_must_be_inside_0_1(share: float) -> None:
    with pytest.raises(RecipeError, match=rf"must be in \(0, 1\), got {share}"):
        plan_of(make_scores([0.1, 0.2]), make_sites(2), heads=share)


def test_impossible_budgets_say_what_is_possible() -> None:
    scores, sites = make_scores([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]), make_sites(4, 4)
    with pytest.raises(PlanError, match="remove 6 of 8 heads, but min_heads 2 leave only 4"):
        plan_of(scores, sites, heads=0.75, min_heads=2)
    with pytest.raises(PlanError, match=r"remove 3 of 4 heads, but min_heads 2 leave only 2"):
        plan_of(scores, sites, heads=0.75, min_heads=2, allocation="uniform")
    with pytest.raises(PlanError, match=r"min_heads 1 and keep_layers \[1\] leave only 3"):
        plan_of(scores, sites, heads=0.5, keep_layers=(-1,))
    with pytest.raises(PlanError, match="at least one head, but heads: 0.01 of 8 rounds to none"):
        plan_of(scores, sites, heads=0.01)
    with pytest.raises(RecipeError, match="3 problems") as error:
        plan_of(scores, sites, heads=0.5, allocation="best", min_heads=0, keep_layers=(2,))
    assert len(error.value.problems) == 3
