"""Progress that ends a search when its time is over."""

import time

import pytest

from hies_export.progress import SILENT, OutOfTime, Until


def test_nothing_begins_after_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Until(SILENT, 12.0)
    progress.stage("rank")
    items = progress.track(range(9), "judge")
    for number in range(3):
        assert next(items) == number
        now[0] += 1
    with pytest.raises(OutOfTime, match="the time is over before: judge"):
        next(items)
    with pytest.raises(OutOfTime, match="the time is over before: time the cuts"):
        progress.stage("time the cuts")
