"""What goes under a share of heads: by hand, and against all choices."""

import itertools
from typing import Any

import pytest
import torch
from support.cuts import plan_of

from hies_export.errors import PlanError, RecipeError
from hies_export.units import Units
from hies_export.values import PruningPlan, Scores


def make_sites(*counts: int, group_size: int = 1) -> tuple[Units, ...]:
    return tuple(Units(name=f"l{i}", units=n * group_size, groups=n) for i, n in enumerate(counts))


def make_scores(*layers: list[float]) -> Scores:
    return Scores("hies", {"alpha": 0.5}, {f"l{i}": torch.tensor(v, dtype=torch.float64) for i, v in enumerate(layers)})


def kept(plan: PruningPlan) -> list[tuple[int, ...]]:
    return [k.units for k in plan.kept.values()]


THREE = [[0.0, 0.1, 0.2, 0.3], [0.9, 0.6, 0.8, 0.7], [0.4, 0.3, 0.5, 0.2]]


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        ([[0.1, 0.9, 0.5], [0.2, 0.8, 0.7]], {}, [(1,), (1, 2)]),  # the smallest first
        ([[0.0, 0.1, 0.2, 0.3], [0.6, 0.7, 0.8, 0.9]], {}, [(3,), (1, 2, 3)]),
        ([[0.0, 0.1, 0.2, 0.3], [0.6, 0.7, 0.8, 0.9]], {"min_heads": 2}, [(2, 3), (2, 3)]),
        ([[0.5] * 4, [0.5] * 4], {}, [(0, 1, 2), (0,)]),  # of equals the later
        (THREE, {"allocation": "uniform"}, [(2, 3), (0, 2), (0, 2)]),
        (THREE, {"allocation": "uniform", "keep_layers": (1,)}, [(2, 3), (0, 1, 2, 3), (0, 2)]),
    ],
)
def test_half_of_the_heads_go(layers: list[list[float]], options: dict[str, Any], expected: list[Any]) -> None:
    plan = plan_of(make_scores(*layers), make_sites(*map(len, layers)), heads=0.5, **options)
    assert kept(plan) == expected
    assert (plan.alpha, plan.criterion) == (0.5, "hies")


def test_groups_go_together() -> None:
    scores = make_scores([0.1, 0.9, 0.2, 0.3], [0.8, 0.8, 0.7, 0.7])
    plan = plan_of(scores, make_sites(2, 2, group_size=2), heads=0.25)
    assert kept(plan) == [(0, 1), (0, 1, 2, 3)]
    assert plan.kept["l0"].kept_groups == (0,)


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
    assert plan.removed == 5  # 4.8, rounded
    assert total == pytest.approx(best)


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


def test_impossible_budgets_are_refused() -> None:
    scores, sites = make_scores([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]), make_sites(4, 4)
    with pytest.raises(PlanError, match=r"remove 3 of 4 heads, but min_heads 2 leave only 2"):
        plan_of(scores, sites, heads=0.75, min_heads=2, allocation="uniform")
    with pytest.raises(RecipeError, match="4 problems"):
        plan_of(scores, sites, heads=1.2, allocation="best", min_heads=0, keep_layers=(2,))
