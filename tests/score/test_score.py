import pytest
import torch
from torch import Tensor

from hies_export.errors import RecipeError
from hies_export.score.criteria import CRITERIA, DegenerateRangeWarning, criterion, score_units, uses_alpha
from hies_export.values import Calibration, Statistics


def statistics(his: list[list[float]], entropy: list[list[float]], l2: list[list[float]] | None = None) -> Statistics:
    def tensors(values: list[list[float]]) -> dict[str, Tensor]:
        return {f"layer{i}": torch.tensor(v, dtype=torch.float64) for i, v in enumerate(values)}

    return Statistics(
        {"his": tensors(his), "entropy": tensors(entropy), "weight_l2": tensors(l2 or his)},
        Calibration(4, "data", "0" * 64),
    )


STATISTICS = statistics([[1.0, 3.0], [2.0, 5.0]], [[0.2, 0.4], [0.6, 1.0]], [[7.0, 1.0], [4.0, 3.0]])


def as_lists(scores: dict[str, Tensor]) -> list[list[float]]:
    return [[round(x, 9) for x in v.tolist()] for v in scores.values()]


def test_hies_by_hand() -> None:
    found = score_units(STATISTICS, criterion="hies", alpha=0.25)
    # HIS^ = (s-1)/4, AE^ = (e-0.2)/0.8
    expected = [[0.25 * 0 + 0.75 * 1, 0.25 * 0.5 + 0.75 * 0.75], [0.25 * 0.25 + 0.75 * 0.5, 0.25 * 1 + 0.75 * 0]]
    assert as_lists(found.scores) == expected
    assert found.parameters == {"alpha": 0.25, "normalize": "model"}


def test_normalising_each_layer() -> None:
    found = score_units(STATISTICS, criterion="his", normalize="layer")
    assert as_lists(found.scores) == [[0, 1], [0, 1]]
    assert as_lists(score_units(STATISTICS, criterion="his").scores) == [[0, 0.5], [0.25, 1]]


def test_the_baselines_rank_as_they_are_named() -> None:
    assert as_lists(score_units(STATISTICS, criterion="ad").scores) == [[0, 0.25], [0.5, 1]]
    assert as_lists(score_units(STATISTICS, criterion="l2").scores) == [[1, 0], [0.5, round(1 / 3, 9)]]
    at_zero = score_units(STATISTICS, criterion="hies", alpha=0.0).scores
    ad = score_units(STATISTICS, criterion="ad").scores
    assert all(torch.equal(at_zero[k], 1 - ad[k]) for k in ad)


def test_random_follows_its_seed() -> None:
    draws = [as_lists(score_units(STATISTICS, criterion="random", seed=s).scores) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_a_degenerate_range_scores_zero_and_warns() -> None:
    flat = statistics([[2.0, 2.0], [2.0, 2.0]], [[0.2, 0.4], [0.6, 1.0]])
    with pytest.warns(DegenerateRangeWarning, match="HIS is the same for every head"):
        found = score_units(flat, criterion="hies", alpha=0.5)
    assert as_lists(found.scores) == [[0.5, 0.375], [0.25, 0]]
    half_flat = statistics([[2.0, 2.0], [1.0, 3.0]], [[0.2, 0.4], [0.6, 1.0]])
    with pytest.warns(DegenerateRangeWarning, match="HIS in layer0"):
        assert as_lists(score_units(half_flat, criterion="his", normalize="layer").scores) == [[0, 0], [0, 1]]


def test_alpha_is_known_to_be_used() -> None:
    assert [name for name in CRITERIA if uses_alpha(name)] == ["hies", "ae + activation-l2"]
    assert list(CRITERIA)[:6] == ["hies", "his", "fisher", "ad", "l2", "random"]


def test_all_problems_at_once() -> None:
    with pytest.raises(RecipeError, match="3 problems") as error:
        score_units(STATISTICS, criterion="hise", alpha=1.0, normalize="both")
    assert len(error.value.problems) == 3
    assert "criterion must be one of hies, his, fisher, ad, l2, random, " in str(error.value)
    assert ", got 'hise'" in str(error.value)
    assert "alpha must be in [0, 1), got 1.0" in str(error.value)


def test_a_criterion_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hies_export.score.criteria.CRITERIA", dict(CRITERIA))

    @criterion
    def his_squared(statistics: Statistics, *, normalize: str) -> dict[str, Tensor]:
        return {name: values**2 for name, values in statistics["his"].items()}

    found = score_units(STATISTICS, criterion="his-squared")
    assert as_lists(found.scores) == [[1, 9], [4, 25]]
    assert found.parameters == {"normalize": "model"}
