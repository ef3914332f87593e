"""The rounds of a budget, and selections and values of one round after another, by hand."""

import pytest
import torch

from hies_export.errors import PlanError
from hies_export.select.constraints import Constraints
from hies_export.select.iterative import HeadTarget, compose, filled_in, head_targets
from hies_export.units import Kept, Units

MODULES = (Units(name="a", units=8), Units(name="b", units=4))
GROUPED = (Units(name="g", units=12, groups=4),)


def rounds(share: float, count: int, **constraints: object) -> list[HeadTarget]:
    return [*head_targets(MODULES, heads=share, count=count, constraints=Constraints(**constraints))]  # type: ignore[arg-type]


def test_rounds_remove_equal_shares_of_all_modules() -> None:
    assert [part.wanted for part in rounds(0.5, 3)] == [2, 4, 6]
    assert [part.wanted for part in rounds(0.5, 1)] == [6]
    assert {(*part.dense, part.unit) for part in rounds(0.5, 3)} == {(8, 4, "group")}


def test_rounds_that_would_remove_nothing_are_left_out() -> None:
    # 24 rounds of half a head: those that round to nothing, or to what was removed before, do not appear.
    assert [part.wanted for part in rounds(0.5, 24)] == [1, 2, 3, 4, 5, 6]
    # Of 8 and of 4: 0.8, 1.6, 2.4, 3.2 and 4 heads; 0.4, 0.8, 1.2, 1.6 and 2.
    wanted = [part.wanted for part in rounds(0.5, 5, allocation="uniform")]
    assert wanted == [[1, 0], [2, 1], [3, 2], [4, 2]]


def test_a_budget_that_cannot_be_met_is_refused_in_the_last_round() -> None:
    with pytest.raises(PlanError, match="must remove at least one head, but heads: 0.01 of 12 rounds to none"):
        rounds(0.01, 3)
    # The first rounds fit; only all of it does not.
    found = head_targets(MODULES, heads=0.9, count=2, constraints=Constraints(min_heads=2))
    assert next(found).wanted == 5
    with pytest.raises(PlanError, match="remove 11 of 12 heads, but min_heads 2 leave only 8"):
        next(found)


def test_the_size_of_a_round_is_counted_on_the_model_that_is_left() -> None:
    left = (Units(name="a", units=5), Units(name="b", units=4))
    # 6 of 12 in all, and 3 of them are gone.
    assert HeadTarget(6, (8, 4), "group").size(left) == (3 / 9, None)
    assert HeadTarget([4, 2], (8, 4), "group").size(left) == (None, [1, 2])
    left = (Units(name="g", units=8, groups=4),)
    assert HeadTarget(2, (3,), "query").size(left) == (1 / 2, None)
    assert HeadTarget([2], (3,), "query").size(left) == (None, [1])
    (first, *_) = head_targets(GROUPED, heads=0.7, count=2, constraints=Constraints(unit="query"))
    assert (first.wanted, first.dense, first.unit) == (1, [3], "query")


def test_units_are_numbered_as_in_the_first_model() -> None:
    first = {"a": Kept((0, 1, 2, 6, 7, 8), 12, 4), "b": Kept((0, 1, 2, 3), 4), "m": Kept((1, 3, 5, 7), 8, kind="mlp")}
    second = {"a": Kept((3, 4, 5), 6, 2), "b": Kept((1, 3), 4), "m": Kept((0, 2), 4, kind="mlp")}
    assert compose(first, second) == {
        "a": Kept((6, 7, 8), 12, 4, "attention"),
        "b": Kept((1, 3), 4),
        "m": Kept((1, 5), 8, 8, "mlp"),
    }


def test_values_of_units_that_are_gone_stay_those_of_before() -> None:
    earlier = {"a": torch.arange(5.0), "b": torch.arange(3.0)}
    later = {"a": torch.tensor([10.0, 30.0]), "b": torch.tensor([7.0, 8.0, 9.0])}
    kept = {"a": Kept((1, 3), 5), "b": Kept((0, 1, 2), 3)}
    found = filled_in(earlier, later, kept)
    assert {name: row.tolist() for name, row in found.items()} == {"a": [0, 10, 2, 30, 4], "b": [7, 8, 9]}
    assert earlier["a"].tolist() == [0, 1, 2, 3, 4]
