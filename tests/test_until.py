"""Progress that ends a search when its time is over."""

import time

import pytest

from hies_export.progress import SILENT, OutOfTime, Until


def test_nothing_begins_after_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress, seen = Until(SILENT, 12.0), []
    progress.stage("rank")
    with pytest.raises(OutOfTime, match="the time is over before: judge"):
        for item in progress.track(range(9), "judge"):
            seen.append(item)
            now[0] += 1
    assert seen == [0, 1, 2]  # what has begun by the moment is finished
    with pytest.raises(OutOfTime, match="the time is over before: time the cuts"):
        progress.stage("time the cuts")
