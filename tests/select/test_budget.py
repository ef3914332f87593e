"""What goes under a budget of heads or of cost: by hand, and against all choices."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cuts import plan_of

from hies_export import Constraints, PlanError, PruningPlan, Scores, select_units
from hies_export.select.cost import CostTable, check_reachable, shares_to_try
from hies_export.select.joint import least_loss
from hies_export.units.units import Units


def counts_within(scores: Scores, modules: Sequence[Units], table: CostTable, **how: Any) -> list[int]:
    """Return how many groups each module loses within a budget of cost."""
    found = select_units(scores, modules, table=table, **how)
    return [len(kept.removed) * kept.groups // kept.total for kept in found.values()]


def sites_of(*counts: int, group_size: int = 1) -> tuple[Units, ...]:
    return tuple(Units(name=f"l{i}", units=n * group_size, groups=n) for i, n in enumerate(counts))


def scores_of(values: torch.Tensor | list[list[float]]) -> Scores:
    rows = {f"l{i}": torch.as_tensor(row, dtype=torch.float64) for i, row in enumerate(values)}
    return Scores("hies", {"alpha": 0.5}, rows)


def test_the_program_knows_every_total() -> None:
    costs, losses = [[0, 3, 5], [0, 2]], [[0.0, 0.4, 0.1], [0.0, 0.2]]
    best, trace = least_loss(costs, losses, 6)
    assert best.tolist() == pytest.approx([0.0, float("inf"), 0.2, 0.4, float("inf"), 0.1, float("inf")])
    assert trace(5) == [2, 0]
    assert trace(2) == [0, 1]
    # Of equals, the earlier option.
    assert least_loss([[2, 2, 2]], [[0.5, 0.1, 0.1]], 2)[1](2) == [1]


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_multiple_of_is_kept_by_a_budget_of_heads(allocation: str) -> None:
    scores, sites = scores_of(torch.rand(3, 8, generator=torch.Generator().manual_seed(1))), sites_of(8, 8, 8)
    plan = plan_of(scores, sites, heads=0.5, allocation=allocation, multiple_of={"heads": 4})
    kept = [len(k.units) for k in plan.kept.values()]
    assert plan.removed == 12
    assert set(kept) <= {4, 8}
    with pytest.raises(PlanError, match="and multiple_of let 4 to"):
        plan_of(scores, sites, heads=0.1, allocation=allocation, multiple_of={"heads": 4})
    # Of all choices that keep 4 or 8 in every layer, the one that loses least.
    if allocation == "global":
        lost = [float(row.sort().values[:4].sum()) for row in scores.scores.values()]
        plan = plan_of(scores, sites, heads=0.2, multiple_of={"heads": 4})
        assert [len(k.units) for k in plan.kept.values()].index(4) == lost.index(min(lost))


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_budget_that_is_met_exactly_takes_no_more(allocation: str) -> None:
    table = CostTable("FLOPs", {f"l{i}": (0.0, 0.125, 0.25, 0.375) for i in range(2)})
    constraints = Constraints(allocation=allocation)
    for ratio, expected in ((0.75, [1, 1]), (0.5, [2, 2]), (0.25, [3, 3])):
        scores = scores_of(torch.tensor([[0.0, 1, 2, 3], [0.0, 1, 2, 3]]))
        assert counts_within(scores, sites_of(4, 4), table, ratio=ratio, constraints=constraints) == expected
        check_reachable(sites_of(4, 4), table, ratio=0.25, constraints=constraints)


def test_no_budget_is_exceeded_by_a_step_of_the_grid() -> None:
    # A head of the first layer is cheaper to lose, and saves a hundred-thousandth too little.
    table = CostTable("FLOPs", {"l0": (0.0, 0.1), "l1": (0.0, 0.10002)})
    scores = scores_of(torch.tensor([[0.5, 5.0], [1.0, 5.0]]))
    assert counts_within(scores, sites_of(2, 2), table, ratio=1 - 0.10001) == [0, 1]
    assert counts_within(scores, sites_of(2, 2), table, ratio=1 - 0.1) == [1, 0]


def test_no_more_than_a_thousand_shares_are_tried() -> None:
    shares = shares_to_try(sites_of(900, 900), Constraints())
    assert (len(shares), shares[0], shares[-1]) == (999, 0.001, 0.999)


def kept(plan: PruningPlan) -> list[tuple[int, ...]]:
    return [k.units for k in plan.kept.values()]


THREE = [[0.0, 0.1, 0.2, 0.3], [0.9, 0.6, 0.8, 0.7], [0.4, 0.3, 0.5, 0.2]]


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        ([[0.0, 0.1, 0.2, 0.3], [0.6, 0.7, 0.8, 0.9]], {}, [(3,), (1, 2, 3)]),
        ([[0.0, 0.1, 0.2, 0.3], [0.6, 0.7, 0.8, 0.9]], {"min_heads": 2}, [(2, 3), (2, 3)]),
        ([[0.5] * 4, [0.5] * 4], {}, [(0, 1, 2), (0,)]),  # of equals the later
        (THREE, {"allocation": "uniform"}, [(2, 3), (0, 2), (0, 2)]),
        (THREE, {"allocation": "uniform", "keep_layers": (1,)}, [(2, 3), (0, 1, 2, 3), (0, 2)]),
    ],
)
def test_half_of_the_heads_go(layers: list[list[float]], options: dict[str, Any], expected: list[Any]) -> None:
    plan = plan_of(scores_of(layers), sites_of(*map(len, layers)), heads=0.5, **options)
    assert kept(plan) == expected
    assert (plan.alpha, plan.criterion) == (0.5, "hies")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("min_heads", "keep_layers"), [(1, ()), (2, ()), (1, (0,)), (1, (-1,))])
def test_no_other_choice_keeps_more(seed: int, min_heads: int, keep_layers: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    plan = plan_of(scores_of(scores), sites_of(4, 4, 4), heads=0.4, min_heads=min_heads, keep_layers=keep_layers)
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
    plan = plan_of(scores_of([[0.1, 0.9], [0.2, 0.8]]), sites_of(2, 2), heads=0.5, seed=3, calibration={"samples": 4})
    again = PruningPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert torch.__version__.startswith(plan.versions["torch"])
    whole = replace(plan, alpha=0)  # a whole number stays one
    assert PruningPlan.from_json(whole.to_json()).to_json() == whole.to_json()
    for text in ("", '{"format": 99}'):
        with pytest.raises(PlanError, match="a plan must be JSON written by hies_export"):
            PruningPlan.from_json(text)
