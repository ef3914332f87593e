"""Constraints of heads and of neurons, and the messages of those that cannot hold."""

from collections.abc import Sequence
from typing import Any

import pytest

from hies_export import Constraints, PlanError, RecipeError
from hies_export.select.constraints import check_budget, check_constraints, most_removable, removable_counts
from hies_export.units.units import Units

MODULES = (
    Units(name="a0", units=12),
    Units(name="a1", units=12, groups=4),
    Units(name="m0", units=64, kind="mlp"),
    Units(name="m1", units=48, kind="mlp"),
)


@pytest.mark.parametrize(
    ("modules", "constraints", "problems"),
    [
        (MODULES[:1], Constraints(multiple_of={"heads": 5}), ["a0 has 12 heads, and would keep a multiple of 5"]),
        (
            MODULES,
            Constraints(unit="query", multiple_of={"heads": 8}),
            ["a1 has 12 heads, and would keep a multiple of 8"],
        ),
        (
            MODULES,
            Constraints(multiple_of={"heads": 3, "neurons": 7}),
            ["a1 has 12 heads, and would keep a multiple of 9", "m1 has 48 neurons, and would keep a multiple of 7"],
        ),
    ],
)
def test_a_multiple_that_does_not_divide_is_refused(
    modules: Sequence[Units], constraints: Constraints, problems: list[str]
) -> None:
    with pytest.raises(RecipeError, match="multiple_of must divide the units of every layer, but ") as error:
        check_constraints(modules, constraints)
    assert [problem.partition("but ")[2] for problem in error.value.problems] == problems


def test_a_multiple_of_each_kind_may_differ_and_is_nothing_to_the_other() -> None:
    check_constraints(MODULES, Constraints(multiple_of={"heads": 4, "neurons": 16}))
    check_constraints(MODULES, Constraints(unit="query", multiple_of={"heads": 6, "neurons": 8}))
    check_constraints(MODULES[:2], Constraints(multiple_of={"neurons": 5}))
    check_constraints(MODULES[2:], Constraints(multiple_of={"heads": 5}, min_heads=40))


@pytest.mark.parametrize(
    "wrong",
    [
        {"multiple_of": 2},
        {"multiple_of": {"heads": 0}},
        {"min_heads": 0},
        {"unit": "heads"},
        {"allocation": {"mlp": "best"}},
        {"allocation": "best"},
    ],
)
def test_constraints_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"1 validation error for Constraints|{next(iter(wrong))}"):
        Constraints(**wrong)


def test_what_may_go_is_by_kind() -> None:
    assert most_removable(MODULES, Constraints()) == [11, 3, 63, 47]
    # Heads alone have a least number; five query heads are two groups of three.
    assert most_removable(MODULES, Constraints(min_heads=5)) == [7, 2, 63, 47]
    # Layers are counted among those of a kind.
    assert most_removable(MODULES, Constraints(keep_layers=(0,))) == [0, 3, 0, 47]
    assert most_removable(MODULES, Constraints(keep_layers=(-1,))) == [11, 0, 63, 0]
    found = removable_counts(MODULES, Constraints(multiple_of={"heads": 2, "neurons": 16}))
    assert found == [[0, 2, 4, 6, 8, 10], [0, 2], [0, 16, 32, 48], [0, 16, 32]]
    assert removable_counts(MODULES, Constraints(unit="query", multiple_of={"heads": 8}))[1] == [0, 1]
    assert removable_counts(MODULES, Constraints()) == [[*range(12)], [0, 1, 2, 3], [*range(64)], [*range(48)]]


def test_a_layer_beyond_the_larger_kind_is_refused() -> None:
    modules = (*MODULES, Units(name="m2", units=16, kind="mlp"))
    check_constraints(modules, Constraints(keep_layers=(2, -3)))
    assert most_removable(modules, Constraints(keep_layers=(2,))) == [11, 3, 63, 47, 0]
    for layer in (3, -4):
        with pytest.raises(RecipeError, match=f"keep_layers must name layers 0 to 2, got {layer}"):
            check_constraints(modules, Constraints(keep_layers=(layer,)))


HEADS = (Units(name="a0", units=12), Units(name="a1", units=12, groups=4))


@pytest.mark.parametrize(
    ("share", "constraints", "expected"),
    [
        (0.5, Constraints(), 8),  # of 12 + 4 groups
        (0.4, Constraints(unit="query"), 6),  # of 12 + 3 bundles
        (0.5, Constraints(allocation="uniform", unit="query"), [6, 2]),
        (0.5, Constraints(allocation="uniform", keep_layers=(1,)), [6, 0]),
        (0.4, Constraints(allocation="uniform", multiple_of={"heads": 4}), [4, 0]),
        (14 / 16, Constraints(), 14),  # all but one of each
        (2 / 16, Constraints(multiple_of={"heads": 2}), 2),  # the fewest that may go
    ],
)
def test_a_budget_of_heads_in_bundles(share: float, constraints: Constraints, expected: int | list[int]) -> None:
    assert check_budget(HEADS, heads=share, constraints=constraints) == expected


@pytest.mark.parametrize(
    ("share", "constraints", "message"),
    [
        (15 / 16, Constraints(), "remove 15 of 16 key/value groups, but min_heads, .* let 1 to 14 go; change"),
        (0.95, Constraints(unit="query"), "remove 14 of 15 query heads per group, but .* let 1 to 13 go"),
        (0.9, Constraints(allocation="uniform", min_heads=3, keep_layers=(1,)), "remove 11 of 12 .* let 1 to 9 go"),
        (0.03, Constraints(), "remove 0 of 16 key/value groups, but .* let 1 to 14 go"),
        (
            1 / 16,
            Constraints(multiple_of={"heads": 2}),
            "remove 1 of 16 key/value groups, .* and multiple_of let 2 to 14 go",
        ),
    ],
)
def test_a_budget_that_cannot_be_met_says_how_much_can(share: float, constraints: Constraints, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_budget(HEADS, heads=share, constraints=constraints)
    with pytest.raises(PlanError, match="remove 12 of 12 heads, but .* let 1 to 11 go"):
        check_budget(HEADS[:1], heads=0.99)  # without groups there are none to name


@pytest.mark.parametrize("share", [0, 1])
def test_a_share_and_other_problems_are_reported_together(share: float) -> None:
    with pytest.raises(RecipeError, match="2 problems") as error:
        check_budget(HEADS, heads=share, constraints=Constraints(keep_layers=(2,)))
    assert [*error.value.problems] == [
        f"sparsity (budget.heads) must be in (0, 1), got {share}",
        "keep_layers must name layers 0 to 1, got 2",
    ]
