"""Rows of a comparison that contradict others."""

from typing import Any

import pytest

from hies_export.forms.measured import LatencyRow, with_contradictions


def a_row(batch: int, sequence: int, dense_ms: float, slim_ms: float, **other: Any) -> LatencyRow:
    numbers: dict[str, Any] = {
        **{"runtime": "torch", "batch": batch, "sequence": sequence, "dense_ms": dense_ms, "slim_ms": slim_ms},
        **{"ratio": 0.8, "ratio_low": 0.8, "ratio_high": 0.8},
        **{"control_ratio": 1.0, "control_low": 1.0, "control_high": 1.0},
    }
    return LatencyRow(**(numbers | other))


def noisy(*rows: LatencyRow) -> list[bool]:
    return [row.noisy for row in with_contradictions(rows)]


def test_a_row_that_took_longer_than_a_larger_one_is_noisy() -> None:
    whole = a_row(8, 128, 20.0, 16.0)
    assert noisy(a_row(1, 128, 30.0, 5.0), whole) == [True, False]
    assert noisy(whole, a_row(8, 64, 5.0, 18.0)) == [False, True]
    assert noisy(a_row(1, 128, 21.0, 16.5), whole) == [False, False]  # within a tenth
    assert noisy(a_row(1, 512, 90.0, 80.0), whole) == [False, False]  # longer: neither is the larger one
    assert noisy(whole, a_row(8, 128, 30.0, 25.0)) == [False, False]
    assert noisy(a_row(1, 128, 1.0, 1.0, noisy=True), whole) == [True, False]


@pytest.mark.parametrize("other", [{"runtime": "x"}, {"dtype": "float16"}, {"phase": "decode"}, {"provider": "cuda"}])
def test_only_rows_of_one_kind_are_compared(other: dict[str, Any]) -> None:
    assert noisy(a_row(1, 128, 30.0, 25.0), a_row(8, 128, 20.0, 16.0, **other)) == [False, False]
