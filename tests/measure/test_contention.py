"""What other work used, from counters of the system that are written here."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hies_export.forms import compare
from hies_export.forms.form import Form
from hies_export.forms.measure import contention
from hies_export.forms.measure.contention import CpuWatch, OtherWork
from hies_export.forms.measure.counts import FlopCount
from hies_export.forms.measure.rows import LatencyRow, with_contradictions
from hies_export.forms.measure.timing import Timing

HEADER = "cpu  9 9 9 9 9 9 9 9 0 0\n"
# Read before any test: while tests run, the counters lie nowhere.
STAT = contention.STAT


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine of three cores, of which two may be used, where this process uses no time unless it is said."""
    state = SimpleNamespace(now=0.0, own=0.0, cores=[[0] * 10, [0] * 10, [0] * 10])

    def write() -> None:
        lines = [f"cpu{i} {' '.join(map(str, core))}\n" for i, core in enumerate(state.cores)]
        (tmp_path / "stat").write_text(HEADER + "".join(lines) + "intr 1 2 3\n")

    def passes(seconds: float, *, own: float = 0.0, **ticks: int) -> None:
        names = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice"]
        state.now, state.own = state.now + seconds, state.own + own
        for column, added in ticks.items():
            state.cores[0][names.index(column)] += added
        state.cores[2][0] += 10_000  # a core that this process may not use
        write()

    write()
    state.passes = passes
    monkeypatch.setattr(contention, "STAT", tmp_path / "stat")
    monkeypatch.setattr(contention.time, "monotonic", lambda: state.now)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "times", lambda: (state.own, 0.0, 0.0, 0.0, 0.0))
    return state


def test_other_work_is_what_cores_did_without_what_this_process_did(machine: SimpleNamespace) -> None:
    watch = CpuWatch()
    machine.passes(10.0, own=8.0, user=1200, system=100, irq=20, softirq=30, nice=50, steal=300, idle=400, iowait=77)
    seen = watch.seen()
    assert seen is not None
    # 17 s of work, 8 of them its own, in 10 s.
    assert (seen.used, seen.cores) == (pytest.approx(0.9), 2)
    assert (seen.matters, str(seen)) == (True, "other work used 0.9 of 2 cores")


def test_an_idle_machine_is_not_worth_a_sentence(machine: SimpleNamespace) -> None:
    watch = CpuWatch()
    # Ticks are coarse: a process may seem to use more than its cores did.
    machine.passes(10.0, own=10.0, user=990)
    assert watch.seen() == {"used": 0.0, "cores": 2}
    machine.passes(10.0, user=210)
    seen = watch.seen()
    assert seen is not None
    assert (seen.used, seen.matters) == (pytest.approx(0.1), False)


def test_where_nothing_is_known_nothing_is_said(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CpuWatch()
    machine.passes(0.4, user=80)
    assert watch.seen() is None
    machine.passes(1.0, user=80)
    assert watch.seen() is not None
    for stat in (Path("/nowhere"), Path(__file__)):
        monkeypatch.setattr(contention, "STAT", stat)
        assert CpuWatch().seen() is None
        assert watch.seen() is None
    monkeypatch.delattr(os, "sched_getaffinity")
    assert CpuWatch().seen() is None


def test_the_counters_of_this_system_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path("/proc/stat")
    lines = place.read_text().splitlines() if place.exists() else []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    told = [core for core in cores if any(line.startswith(f"cpu{core} ") for line in lines)]
    if not told:
        pytest.skip("this system does not tell what its cores do")
    monkeypatch.setattr(contention, "STAT", STAT)
    monkeypatch.setattr(contention, "SHORTEST_SECONDS", 0.0)
    seen = CpuWatch().seen()
    assert seen is not None
    assert seen.cores == len(told)
    assert 0 <= seen.used <= seen.cores


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


def test_a_timing_beside_other_work_says_so(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    percentiles = {
        1: SimpleNamespace(p50_ms=9.0, p90_ms=9.0, p99_ms=9.0),
        8: SimpleNamespace(p50_ms=5.0, p90_ms=5.0, p99_ms=5.0),
    }
    one = SimpleNamespace(median=1.0, low=1.0, high=1.0)

    def compared(dense: Any, slim: Any, batches: Any, **options: Any) -> dict[Any, Any]:
        machine.passes(10.0, own=9.0, user=1800)
        rest = {"provider": "cpu", "dtypes": ("float32",), "noisy": False, "repeats": 3, "loads": 1, "threads": 2}
        rest |= {"cuda_graph": False, "peak_bytes": None, "clock_mhz": None, "ratio": one, "control": one}
        return {
            ((batch, 128), "forward"): SimpleNamespace(dense=times, slim=times, **rest)
            for batch, times in percentiles.items()
        }

    monkeypatch.setattr(compare, "compare_two", compared)
    flops = {shape: FlopCount(10, 8, shape) for shape in ((1, 128), (8, 128))}
    with caplog.at_level(logging.WARNING):
        rows = compare.time_on(
            Form("a", "torch", Path("a")), Form("b", "torch", Path("b")), batches={}, flops=flops, timing=Timing()
        )
    assert [row.noisy for row in rows] == [True, False]
    assert rows[0].other_work == OtherWork(used=pytest.approx(0.9), cores=2)
    assert "other work used 0.9 of 2 cores while torch was timed; measure again on an idle machine" in caplog.text
