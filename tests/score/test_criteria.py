"""Every criterion by hand on a few numbers, and heads and neurons scored together."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hies_export import CRITERIA, RecipeError, Statistics, criterion, score_units
from hies_export.calibrate.statistics import Calibration
from hies_export.kinds import ATTENTION, BOTH
from hies_export.score.criteria import AUTO, COMPENSATED, DegenerateRangeWarning, criterion_names, needs_of, uses_alpha
from hies_export.units.units import Units

MODULES = (Units(name="a", units=2), Units(name="m", units=3, kind="mlp"), Units(name="b", units=2))
HEADS = {"a": [1.0, 3.0], "b": [2.0, 5.0]}
NEURONS = {"m": [9.0, 5.0, 7.0]}


def statistics(**values: dict[str, list[float]]) -> Statistics:
    tensors = {
        name: {module: torch.tensor(row, dtype=torch.float64) for module, row in rows.items()}
        for name, rows in values.items()
    }
    return Statistics(tensors, Calibration(4, "data", "0" * 64))


def as_lists(scores: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: [round(x, 9) for x in row.tolist()] for name, row in scores.items()}


# Criterion -> the statistic that it scales to [0, 1].
PLAIN = {"his": "his", "fisher": "fisher", "ad": "entropy", "l2": "weight_l2", "activation": "activation_l2"}


@pytest.mark.parametrize("name", PLAIN)
def test_a_criterion_is_its_statistic_scaled_over_the_model_or_each_layer(name: str) -> None:
    given = statistics(**{PLAIN[name]: HEADS})
    assert as_lists(score_units(given, criterion=name).scores) == {"a": [0, 0.5], "b": [0.25, 1]}
    assert as_lists(score_units(given, criterion=name, normalize="layer").scores) == {"a": [0, 1], "b": [0, 1]}
    assert CRITERIA[name].needs == (PLAIN[name],)


def test_random_draws_one_number_per_unit_from_its_seed() -> None:
    found = score_units(statistics(his=HEADS), criterion="random", seed=7)
    generator = torch.Generator().manual_seed(7)
    expected = {name: torch.rand(2, generator=generator, dtype=torch.float64) for name in HEADS}
    assert found.parameters == {"seed": 7}
    assert score_units(both_kinds(), MODULES, criterion="random").parameters == {"seed": 0}
    assert as_lists(found.scores) == as_lists(expected)


def test_hies_by_hand() -> None:
    given = statistics(his=HEADS, entropy={"a": [0.2, 0.4], "b": [0.6, 1.0]})
    found = score_units(given, criterion="hies", alpha=0.25)
    # The importance is (s - 1) / 4, the entropy (e - 0.2) / 0.8.
    expected = {"a": [0.75, 0.25 * 0.5 + 0.75 * 0.75], "b": [0.25 * 0.25 + 0.75 * 0.5, 0.25]}
    assert as_lists(found.scores) == expected
    assert found.parameters == {"alpha": 0.25, "normalize": "model"}
    assert as_lists(score_units(given, criterion="hies", alpha=0.0).scores) == {"a": [1, 0.75], "b": [0.5, 0]}


def test_a_degenerate_range_scores_zero_and_warns() -> None:
    flat = statistics(his={"a": [2.0, 2.0], "b": [2.0, 2.0]}, entropy={"a": [0.2, 0.4], "b": [0.6, 1.0]})
    with pytest.warns(DegenerateRangeWarning, match="HIS is the same for every head"):
        found = score_units(flat, criterion="hies", alpha=0.5)
    assert as_lists(found.scores) == {"a": [0.5, 0.375], "b": [0.25, 0]}
    half_flat = statistics(his={"a": [2.0, 2.0], "b": [1.0, 3.0]})
    with pytest.warns(DegenerateRangeWarning, match="HIS in a is the same"):
        assert as_lists(score_units(half_flat, criterion="his", normalize="layer").scores) == {"a": [0, 0], "b": [0, 1]}


def test_names_needs_and_alpha() -> None:
    assert criterion_names() == (*CRITERIA, COMPENSATED, AUTO)
    assert {name for name, found in CRITERIA.items() if found.kinds == BOTH} == {*PLAIN, "random"} - {"ad"}
    assert needs_of("hies", "activation", "compensated", "his") == ("his", "entropy", "activation_l2")
    assert needs_of("no such criterion") == ()
    assert [name for name in criterion_names() if uses_alpha(name)] == ["hies"]


def both_kinds() -> Statistics:
    fisher = {"a": [0.1, 0.3], "b": [0.2, 0.5], "m": [0.09, 0.05, 0.07]}
    entropy = {"a": [0.2, 0.4], "b": [0.6, 1.0]}
    weights = {"a": [1.0, 2.0], "b": [3.0, 4.0], "m": [7.0, 8.0, 9.0]}
    return statistics(his=HEADS | NEURONS, fisher=fisher, entropy=entropy, weight_l2=weights)


def test_hies_ranks_heads_and_fisher_scores_neurons() -> None:
    given = both_kinds()
    found = score_units(given, MODULES, criterion="hies", alpha=0.25)
    heads = score_units(given.of(["a", "b"]), criterion="hies", alpha=0.25)
    assert as_lists(found.scores) == as_lists(heads.scores) | {"m": [1.0, 0.0, 0.5]}
    assert (found.criterion, found.parameters) == ("hies", {"alpha": 0.25, "normalize": "model"})


def test_a_criterion_of_both_kinds_scales_each_kind_by_itself() -> None:
    given = both_kinds()
    found = score_units(given, MODULES, criterion="his", normalize="layer")
    assert as_lists(found.scores) == {"a": [0, 1], "b": [0, 1], "m": [1, 0, 0.5]}
    assert found.parameters == {"normalize": "layer"}
    found = score_units(given, MODULES, criterion="his")
    assert as_lists(found.scores) == {"a": [0, 0.5], "b": [0.25, 1], "m": [1, 0, 0.5]}


@pytest.mark.parametrize(
    ("criterion", "effect", "ranked"),
    [
        ("fisher", "fisher", ()),
        ("his", "his", ()),
        ("l2", "fisher", BOTH),
        ("random", "fisher", BOTH),
        ("hies", "fisher", (ATTENTION,)),  # heads are ranked among themselves, neurons compared by their effects
    ],
)
def test_effects_compare_kinds_in_a_unit_of_their_own(criterion: str, effect: str, ranked: tuple[str, ...]) -> None:
    given = both_kinds()
    found = score_units(given, MODULES, criterion=criterion)
    assert found.ranked == ranked
    assert as_lists(found.effects) == as_lists(given[effect])
    # For one kind alone, scores are those of `score_units` without modules.
    alone = score_units(given, [MODULES[0], MODULES[2]], criterion=criterion)
    expected = score_units(given.of(["a", "b"]), criterion=criterion)
    assert (alone.parameters, as_lists(alone.scores)) == (expected.parameters, as_lists(expected.scores))


def test_a_criterion_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hies_export.score.criteria.CRITERIA", dict(CRITERIA))

    @criterion
    def his_squared(statistics: Statistics, *, normalize: str) -> dict[str, Tensor]:
        return {name: values**2 for name, values in statistics["his"].items()}

    found = score_units(both_kinds().of(["a", "b"]), criterion="his-squared")
    assert as_lists(found.scores) == {"a": [1, 9], "b": [4, 25]}
    assert found.parameters == {"normalize": "model"}


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({"criterion": "compensated"}, ["criterion must be one of hies, his, .*, got 'compensated'"]),
        (
            {"criterion": "activation"},
            [r"needs statistics with activation_l2; .*collect_statistics\(..., needs=\['activation_l2'\]\)"],
        ),
        ({"alpha": -0.01}, [r"alpha must be in \[0, 1\), got -0.01; for importance alone use criterion: his"]),
        (
            {"criterion": "hise", "alpha": 1.0, "normalize": "both"},
            ["got 'hise'", r"alpha must be in \[0, 1\), got 1.0", "normalize must be model or layer, got 'both'"],
        ),
    ],
)
def test_all_that_is_wrong_is_said_at_once(options: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(RecipeError, match=problems[0]) as error:
        score_units(both_kinds(), MODULES, **options)
    assert len(error.value.problems) == len(problems)
    for found, expected in zip(error.value.problems, problems, strict=True):
        assert re.search(expected, found)
