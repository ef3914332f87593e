"""Which units go together and in what order, by hand: means, ties, and queries that leave all groups alike."""

from typing import Any

import pytest
import torch

from hies_export import Constraints, NonFiniteError, PlanError, RecipeError, Scores, select_units
from hies_export.score.criteria import Removal
from hies_export.select.constraints import bundle_count, bundles_lost, ranked_bundles
from hies_export.select.cost import CostTable
from hies_export.select.joint import chains_of
from hies_export.units.units import Units

GROUPED = Units(name="g", units=6, groups=2)
SINGLE = Units(name="s", units=4)
# In the first group heads 1 and 2 are equal, in the second heads 3 and 5.
VALUES = torch.tensor([3.0, 1.0, 1.0, 2.0, 7.0, 2.0])


def test_the_worst_of_every_group_go_together_or_groups_by_their_mean_and_of_equals_the_later() -> None:
    assert ranked_bundles(VALUES, GROUPED, "query") == [(1.5, (2, 5)), (1.5, (1, 3)), (5.0, (0, 4))]
    assert ranked_bundles(VALUES, GROUPED, "group") == [(5 / 3, (0, 1, 2)), (11 / 3, (3, 4, 5))]
    # Equal groups of unequal units.
    assert ranked_bundles(torch.tensor([0.0, 4, 2, 2, 1, 3]), GROUPED, "group") == [(2.0, (3, 4, 5)), (2.0, (0, 1, 2))]


@pytest.mark.parametrize("unit", ["group", "query"])
def test_units_without_groups_go_one_by_one(unit: str) -> None:
    assert bundle_count(SINGLE, unit) == 4
    found = ranked_bundles(torch.tensor([2.0, 1, 2, 0]), SINGLE, unit)
    assert found == [(0.0, (3,)), (1.0, (1,)), (2.0, (2,)), (2.0, (0,))]


def test_bundles_are_counted_by_group_or_by_query_head() -> None:
    assert (bundle_count(GROUPED, "group"), bundle_count(GROUPED, "query")) == (2, 3)
    selection = {"g": GROUPED.kept((0, 1, 3, 4)), "s": SINGLE.kept(range(4))}
    assert bundles_lost(selection, [GROUPED, SINGLE], unit="query") == {"g": 1}
    selection = {"g": GROUPED.kept((0, 1, 2)), "s": SINGLE.kept((1,))}
    assert bundles_lost(selection, [GROUPED, SINGLE], unit="group") == {"g": 1, "s": 3}


@pytest.mark.parametrize(("value", "other"), [(float("nan"), float("inf")), (float("-inf"), float("nan"))])
def test_the_first_wrong_score_is_named(value: float, other: float) -> None:
    scores = torch.tensor([0.0, 1.0, value, other, 2.0, other])
    with pytest.raises(NonFiniteError, match=f"a finite number, but head 2 of g has {value}; check the criterion"):
        ranked_bundles(scores, GROUPED, "query")


def scores_of(**values: list[float]) -> Scores:
    found = {name: torch.tensor(row, dtype=torch.float64) for name, row in values.items()}
    return Scores("hies", {}, found, found)


def test_ties_over_modules_and_groups_break_towards_the_later() -> None:
    modules = [Units(name="a", units=4, groups=2), Units(name="b", units=4, groups=2)]
    scores = scores_of(a=[1.0] * 4, b=[1.0] * 4)

    def kept(**options: object) -> list[tuple[int, ...]]:
        return [k.units for k in select_units(scores, modules, **options).values()]  # type: ignore[arg-type]

    assert kept(heads=0.25) == [(0, 1, 2, 3), (0, 1)]
    assert kept(heads=0.25, constraints=Constraints(unit="query")) == [(0, 1, 2, 3), (0, 2)]
    assert kept(heads=0.5, constraints=Constraints(unit="query")) == [(0, 2), (0, 2)]
    assert kept(heads=0.5, constraints=Constraints(allocation="uniform", unit="query")) == [(0, 2), (0, 2)]


SCORES = {"g": [1.0] * 6, "s": [1.0] * 4}
FIT = "scores must be of the modules given, one for each unit"
TABLE = CostTable("FLOPs", {"g": (0.0, 0.1, 0.2), "s": (0.0, 0.1, 0.2, 0.3, 0.4)})


@pytest.mark.parametrize(
    ("scores", "budget", "error", "message"),
    [
        (SCORES, {}, RecipeError, "needs one budget: heads"),
        (SCORES, {"heads": 0.5, "ratio": 0.5, "table": TABLE}, RecipeError, "needs one budget: heads"),
        (SCORES, {"ratio": 0.5}, RecipeError, "needs one budget: heads"),
        (SCORES, {"table": TABLE}, RecipeError, "needs one budget: heads"),
        ({"t": [1.0, 2.0]}, {"heads": 0.5}, PlanError, FIT),
        (SCORES | {"s": [1.0] * 5}, {"ratio": 0.9, "table": TABLE}, PlanError, FIT),
    ],
)
def test_budgets_and_scores_that_do_not_fit_are_refused(
    scores: dict[str, list[float]], budget: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        select_units(scores_of(**scores), [GROUPED, SINGLE], **budget)


def test_queries_go_by_the_mean_over_groups_and_in_the_order_of_each() -> None:
    modules = [GROUPED, Units(name="h", units=6, groups=2)]
    # Bundles of g score 1.5, 1.5 and 5, those of h 0.75, 2.75 and 6.
    scores = scores_of(g=VALUES.tolist(), h=[9.0, 0.5, 2.5, 3.0, 1.0, 3.0])

    def removed(share: float, **options: object) -> list[tuple[int, ...]]:
        constraints = Constraints(unit="query", **options)  # type: ignore[arg-type]
        return [k.removed for k in select_units(scores, modules, heads=share, constraints=constraints).values()]

    assert removed(1 / 6) == [(), (1, 4)]
    assert removed(2 / 6) == [(2, 5), (1, 4)]
    assert removed(3 / 6) == [(1, 2, 3, 5), (1, 4)]
    assert removed(4 / 6) == [(1, 2, 3, 5), (1, 2, 4, 5)]
    # At least three heads of a module are two of each group.
    assert removed(2 / 6, min_heads=3) == [(2, 5), (1, 4)]
    with pytest.raises(PlanError, match="remove 3 of 6 query heads per group, but .* let 1 to 2 go"):
        removed(3 / 6, min_heads=3)
    table = CostTable("FLOPs", {"g": (0.0, 0.1, 0.2), "h": (0.0, 0.15, 0.3)})
    # Under a budget of cost, g loses 1.5 or 3, and h 0.75 or 3.5.
    for ratio, counts in ((0.85, [0, 1]), (0.75, [1, 1]), (0.65, [2, 1]), (0.6, [1, 2]), (0.5, [2, 2])):
        found = select_units(scores, modules, table=table, ratio=ratio, constraints=Constraints(unit="query"))
        assert bundles_lost(found, modules, unit="query") == {m: k for m, k in zip("gh", counts, strict=True) if k}


def test_chains_say_the_order_within_a_budget_of_cost_only() -> None:
    """Heads that `compensated` ranks go in the order of its chains; a share of heads goes by the scores."""
    found = {"s": torch.tensor([0.0, 1.0, 2.0, 3.0])}
    chain = tuple(Removal("s", (unit,), float(4 - unit)) for unit in (3, 2, 1))
    scores = Scores("compensated", {}, found, found, chains=(chain,))
    uniform = Constraints(allocation="uniform")
    table = CostTable("FLOPs", {"s": (0.0, 0.1, 0.2, 0.3)})
    assert select_units(scores, [SINGLE], heads=0.5, constraints=uniform)["s"].removed == (0, 1)
    assert select_units(scores, [SINGLE], table=table, ratio=0.8, constraints=uniform)["s"].removed == (2, 3)


def test_chains_of_queries_add_up_effects_of_all_their_units() -> None:
    chain = (Removal("g", (2, 5), 3.0), Removal("g", (1, 3), 6.0), Removal("g", (0, 4), 16.0))
    assert chains_of(scores_of(g=VALUES.tolist()), [GROUPED], unit="query") == (chain,)
    groups = (Removal("g", (0, 1, 2), 5.0), Removal("g", (3, 4, 5), 16.0))
    assert chains_of(scores_of(g=VALUES.tolist()), [GROUPED]) == (groups,)
