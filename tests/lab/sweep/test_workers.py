"""Several processes share a sweep: every cell is computed once, and those of a process that is gone are taken over."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import sweep_worker
from support.models import save_project
from support.tolerance import assert_same_text

from hies_export.cli.main import main
from hies_export.errors import OutputExistsError, RequestError
from hies_export.lab.sweep import claims as claiming
from hies_export.lab.sweep.claims import Claims
from hies_export.lab.sweep.grid import SweepGrid
from hies_export.lab.sweep.journal import Journal
from hies_export.lab.sweep.remaining import remaining
from hies_export.lab.sweep.sweep import sweep
from hies_export.progress import SILENT
from hies_export.recipe import PruningRecipe

ROW = {
    "judged": "-",
    "alpha": None,
    "samples": 8,
    "result": {"metric": "accuracy", "quality": 0.9, "quality_dense": 0.9, "stability": 1.0},
}
CELLS = {
    cell.key(SweepGrid()): cell
    for cell in SweepGrid(criteria=("his", "random", "l2"), sparsities=(0.1, 0.2, 0.3, 0.4), seeds=(0, 1, 2)).cells()
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "POLL_SECONDS", 0.02)


def entries(folder: Path, kind: str = "row") -> list[dict[str, Any]]:
    """Return the complete lines of a kind in all journals of a folder, read here without the package."""
    lines = [line for path in folder.glob("journal*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    parsed = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [line for line in parsed if line["kind"] == kind]


def leave_claim(folder: Path, key: str, *, host: str, pid: int, lease: float) -> Path:
    """Write a claim as a process on some machine leaves it, and return the file."""
    fields = {"pid": pid, "host": host, "mode": "lease", "token": "ab" * 16, "duration": lease}
    path = folder / Claims.name(key)
    path.write_text("filelock/2\n" + "".join(f"{name}={value}\n" for name, value in fields.items()))
    return path


def test_workers_at_once_compute_every_cell_once(tmp_path: Path) -> None:
    folder, begun, errors = tmp_path / "out", [], []
    # No worker finishes its first cell before all have one, or the first might do all while the others start.
    all_have_one = threading.Barrier(4)

    def work() -> None:
        first = True
        try:
            with Journal(folder, asked={"a": 1}) as journal:
                for cell in remaining(CELLS, journal, Claims(folder), SILENT):
                    begun.append(cell)
                    if first:
                        first = False
                        all_have_one.wait(timeout=300)
                    time.sleep(0.002)
                    journal.add(cell.key(SweepGrid()), {**ROW, "by": threading.get_ident()})
                assert set(journal.rows) == set(CELLS)
        except Exception as error:
            errors.append(error)
            all_have_one.abort()

    folder.mkdir()
    workers = [threading.Thread(target=work) for _ in range(all_have_one.parties)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    assert len(begun) == len(set(begun)) == len(CELLS) == len(entries(folder))
    assert len({entry["value"]["by"] for entry in entries(folder)}) == len(workers)
    assert not list(folder.glob(".claim*"))


def test_what_is_finished_is_said_to_be_kept_when_a_sweep_is_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def sweep(error: BaseException, *, rows: int) -> None:
        with Journal(tmp_path / "out", asked={"a": 1}) as journal:
            for number in range(rows):
                journal.add(str(number), ROW)
            raise error

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        sweep(KeyboardInterrupt("stopped"), rows=0)
    with pytest.raises(RequestError, match="refused"):
        sweep(RequestError("refused"), rows=2)
    assert not caplog.messages
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        sweep(KeyboardInterrupt("stopped"), rows=2)
    said = f"2 finished rows are kept in {tmp_path / 'out'}; run the same command again to resume"
    assert caplog.messages == [said]


def test_a_worker_may_begin_while_another_looks_at_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, others, iterdir = tmp_path / "out", [], Path.iterdir

    def listed_late(path: Path) -> Iterator[Path]:
        if path == folder and not others:
            others.append(None)
            with Journal(folder, asked={"a": 1}) as other:
                other.add("first", ROW)
        return iterdir(path)

    folder.mkdir()
    monkeypatch.setattr(Path, "iterdir", listed_late)
    with Journal(folder, asked={"a": 1}) as journal:
        assert others
        assert "first" in journal.rows


def test_a_claim_is_taken_over_when_its_machine_is_silent_and_not_before(tmp_path: Path) -> None:
    key = next(iter(CELLS))
    claim = leave_claim(tmp_path, key, host="another-machine", pid=1, lease=0.3)
    claims = Claims(tmp_path, lease_seconds=0.3)
    assert claims.holder(key) == "process 1 on another-machine"
    # Its machine's clock runs an hour behind or ahead: no clocks are compared.
    for stamp in (time.time() - 3600, time.time() + 3600):
        os.utime(claim, (stamp, stamp))
        # Before the claim is looked at, from when on it counts as silent.
        started = time.monotonic()
        with claims.tried(key) as ours:
            assert not ours
    taken = False
    while not taken:
        assert time.monotonic() < started + 300
        time.sleep(0.02)
        with claims.tried(key) as taken:
            pass
    assert time.monotonic() - started >= 0.3
    assert not claim.exists()


def test_a_claim_of_a_process_that_is_gone_is_taken_over_at_once(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    claims = Claims(tmp_path, lease_seconds=1000.0)
    leave_claim(tmp_path, "work", host=socket.gethostname(), pid=os.getpid(), lease=1000.0)
    with claims.tried("work") as ours:
        assert not ours
    with claims.tried("own") as ours:
        assert ours
        (host,) = [line for line in (tmp_path / Claims.name("own")).read_text().splitlines() if line[:5] == "host="]
    leave_claim(tmp_path, "work", host=host[5:], pid=gone.pid, lease=1000.0)
    taken = False
    for _ in range(3):
        with claims.tried("work") as ours:
            taken = taken or ours
    assert taken


def test_the_next_worker_takes_another_seed(tmp_path: Path) -> None:
    seeds = []
    with Journal(tmp_path / "out", asked={}) as journal:
        workers = [remaining(CELLS, journal, Claims(tmp_path / "out"), SILENT) for _ in range(3)]
        for _ in range(2):
            begun = [next(worker) for worker in workers]
            seeds += [cell.seed for cell in begun]
            for cell in begun:
                journal.add(cell.key(SweepGrid()), {})
        for worker in workers:
            worker.close()
    assert seeds == [0, 1, 2] * 2


def test_workers_of_other_recipes_and_discarding_what_others_work_on_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", asked={"data": 1}) as journal:
        with pytest.raises(RequestError, match="it has another data; choose another folder"):
            Journal(tmp_path / "out", asked={"data": 2})
        # A worker of another recipe that began at the same moment is found out at the next reading.
        line = json.dumps({"kind": "sweep", "format": 1, "asked": {"data": "other"}})
        (tmp_path / "out" / "journal-late.jsonl").write_text(line + "\n")
        with pytest.raises(RequestError, match="it has another data"):
            journal.refresh()
    claims = Claims(tmp_path / "out")
    with claims.tried("cell"), pytest.raises(OutputExistsError, match="must not discard what others work on"):
        Claims(tmp_path / "out").refuse_others()
    claims.refuse_others()


@pytest.mark.slow
def test_a_killed_workers_cell_goes_to_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = save_project(
        tmp_path,
        train=30,
        validation=20,
        calibration={"samples": 8},
        prune={"alpha": 0.5, "budget": {"heads": 0.4}},
        measure={"shapes": [[2, 16]]},
    )
    recipe, folder, alone = PruningRecipe.from_yaml(project / "recipe.yaml"), tmp_path / "out", tmp_path / "alone"
    command = [sys.executable, sweep_worker.__file__, str(project / "recipe.yaml"), str(folder), "3"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        begun = [other.stdout.readline().strip() for _ in range(3)]
        total = len(sweep_worker.GRID.cells())
        left_alone: list[int] = []

        def kill_when_all_else_is_done() -> None:
            while len(entries(folder)) < total - 1 and other.poll() is None:
                time.sleep(0.02)
            time.sleep(0.3)
            left_alone.append(len(entries(folder)))
            other.kill()
            other.wait()  # a zombie still counts as a process

        killer = threading.Thread(target=kill_when_all_else_is_done)
        killer.start()
        shared = sweep(recipe, sweep_worker.GRID, folder)
        killer.join()
    # While the other one lived, even asleep, its cell was left to it.
    assert left_alone == [total - 1]
    keys = [entry["key"] for entry in entries(folder)]
    assert len(keys) == len(set(keys)) == total
    assert begun[2] in keys
    assert not list(folder.glob(".claim*"))
    expected = sweep(recipe, sweep_worker.GRID, alone)
    assert shared.rows == expected.rows
    assert 0 < shared.evaluations < expected.evaluations
    for name in ("sweep.json", "details.json", "tables.md", "tables.tex", "sweep.csv", "sweep.html"):
        assert_same_text((folder / name).read_text(), (alone / name).read_text())
    # A third worker that comes late finds everything done.
    options = ["--criteria", "his,random,l2,ad", "--sparsities", "0.2,0.5", "--seeds", "0,1", "--no-figures"]
    assert main(["sweep", str(project / "recipe.yaml"), "-o", str(folder), *options]) == 0
    assert "0 models judged" in capsys.readouterr().out
