"""A sweep on the workers of an executor: the same results as in one process, also if a worker is killed."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.sweeps import save_sweep_project
from support.tolerance import assert_same_text

from hies_export import PruningRecipe, RecipeError, RequestError, StepError
from hies_export.cli.main import main
from hies_export.lab.sweep import executors
from hies_export.lab.sweep.cells import Shared, evaluate_cell
from hies_export.lab.sweep.executors import open_executor
from hies_export.lab.sweep.grid import Cell, SweepGrid
from hies_export.lab.sweep.journal import Journal
from hies_export.lab.sweep.sweep import sweep

pytestmark = pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")

# One baseline that changes the model while it predicts, and alphas that are chosen, whose curves workers send back.
GRID = SweepGrid(
    criteria=("his", "random", "hies", "llm-pruner-channel"),
    alphas=("auto-area",),
    sparsities=(0.5,),
    seeds=(0,),
    calibration_sizes=(8,),
    compensations=("none", "least_squares"),
)
OPTIONS = ["--criteria", "his,random,hies,llm-pruner-channel", "--alphas", "auto-area", "--sparsities", "0.5"]
OPTIONS += ["--seeds", "0", "--compensations", "none,least_squares", "--no-figures"]
FILES = ("sweep.json", "details.json", "tables.md", "tables.tex", "sweep.csv", "sweep.html")


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sweep_project(tmp_path_factory.mktemp("project"), budget={"heads": 0.4})


@pytest.fixture(scope="module")
def alone(recipe_file: Path) -> Path:
    """The folder of the sweep in one process."""
    folder = recipe_file.parent / "alone"
    sweep(PruningRecipe.from_yaml(recipe_file), GRID, folder)
    return folder


def assert_same_results(folder: Path, alone: Path) -> None:
    for name in FILES:
        assert_same_text((folder / name).read_text(), (alone / name).read_text())


def rows_in(folder: Path) -> list[str]:
    """Return the keys of the finished cells in the journal."""
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True) if journal.exists() else []
    parsed = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [line["key"] for line in parsed if line["kind"] == "row"]


def test_threads_take_turns_and_find_the_same(recipe_file: Path, alone: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as executor:
        found = sweep(PruningRecipe.from_yaml(recipe_file), GRID, tmp_path / "out", executor=executor)
    assert_same_results(tmp_path / "out", alone)
    assert found.evaluations > 0
    assert found.seconds["evaluate"] > 0


@pytest.mark.slow
def test_processes_find_the_same(recipe_file: Path, alone: Path, tmp_path: Path) -> None:
    # A server that has imported everything forks the processes, which saves their imports.
    multiprocessing.set_forkserver_preload(["support.spawned"])
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver")) as executor:
        sweep(PruningRecipe.from_yaml(recipe_file), GRID, tmp_path / "out", executor=executor)
    assert_same_results(tmp_path / "out", alone)


@pytest.mark.parametrize("error", [StepError("a step failed"), BrokenProcessPool("a process died")])
def test_a_failed_cell_ends_the_sweep_which_then_goes_on(
    error: Exception, recipe_file: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, begun = PruningRecipe.from_yaml(recipe_file), []

    def failing(shared: Shared, cell: Cell) -> dict[str, Any]:
        begun.append(cell)
        if len(begun) == (2 if died else 4):
            raise error
        return evaluate_cell(shared, cell)

    died = isinstance(error, BrokenProcessPool)
    message = "one died: a process died" if died else "a step failed"
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as executor:
        patch.setattr(executors, "evaluate_cell", failing)
        with pytest.raises(StepError, match=message):
            sweep(recipe, GRID, tmp_path / "out", executor=executor)
    assert 0 < len(kept := rows_in(tmp_path / "out")) < len(GRID.cells())
    if died:  # it goes on as after any error
        return
    sweep(recipe, GRID, tmp_path / "out")
    assert rows_in(tmp_path / "out")[: len(kept)] == kept
    assert_same_results(tmp_path / "out", alone)


def test_what_is_finished_is_said_to_be_kept_when_a_sweep_is_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(error: BaseException, *, rows: int) -> None:
        result = {"metric": "accuracy", "quality": 0.9, "quality_dense": 0.9, "stability": 1.0}
        with Journal(tmp_path / "out", asked={"a": 1}) as journal:
            for number in range(rows):
                journal.add(str(number), {"judged": "-", "alpha": None, "samples": 8, "result": result})
            raise error

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        stop(KeyboardInterrupt("stopped"), rows=0)
    with pytest.raises(RequestError, match="refused"):
        stop(RequestError("refused"), rows=2)
    assert not caplog.messages
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        stop(KeyboardInterrupt("stopped"), rows=2)
    assert caplog.messages == [f"2 finished rows are kept in {tmp_path / 'out'}; run the same command again to resume"]


def test_a_worker_with_other_versions_is_refused(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([{"torch": "2.9"}, {"torch": "0.1"}])
    monkeypatch.setattr(executors, "library_versions", lambda: next(found))
    with ThreadPoolExecutor(1) as executor, pytest.raises(RequestError, match=r"of the sweep.*but it has torch 0\.1"):
        sweep(PruningRecipe.from_yaml(recipe_file), GRID, tmp_path / "out", executor=executor)


def test_the_problems_of_a_recipe_come_back_from_another_process() -> None:
    found = pickle.loads(pickle.dumps(RecipeError(["one", "two"])))
    assert (found.problems, str(found)) == (("one", "two"), "2 problems:\n  - one\n  - two")


@pytest.mark.parametrize("name", ["ray:auto", "dask:", "dask"])
def test_an_unknown_executor_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="an executor must be dask:ADDRESS"), open_executor(name):
        pass


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a Dask scheduler on this machine, and its two workers, each a process of one thread."""
    pytest.importorskip("distributed", reason='no Dask: pip install "hies-export[dask]"')
    root, file = Path(__file__).parents[3], tmp_path / "scheduler.json"
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    local = ["--scheduler-file", str(file), "--host", "127.0.0.1", "--no-dashboard"]
    with ExitStack() as stack:

        def start(module: str, *options: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", f"distributed.cli.{module}", *local, *options]
            log = stack.enter_context((tmp_path / f"{module}.log").open("ab"))
            process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start("dask_scheduler", "--port", "0")
        workers = [start("dask_worker", "--no-nanny", "--nthreads", "1") for _ in range(2)]
        until(lambda: file.exists() and file.read_text().endswith("}"))
        yield json.loads(file.read_text())["address"], workers


def until(happened: Any) -> None:
    """Wait until something has happened, for a few minutes at most."""
    end = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_dask_evaluates_the_cells_of_a_killed_worker_on_the_other(
    cluster: tuple[str, list[subprocess.Popen[bytes]]],
    recipe_file: Path,
    alone: Path,
    tmp_path: Path,
) -> None:
    from distributed import Client

    address, (first, _) = cluster
    with Client(address) as client:
        client.wait_for_workers(2, timeout=300)
    folder, total, left = tmp_path / "out", len(GRID.cells()), []

    def kill_when_all_else_is_done() -> None:
        until(lambda: len(rows_in(folder)) >= 3)
        # Stopped, it keeps the cell that it evaluates and at most one more, and the other worker does the rest.
        first.send_signal(signal.SIGSTOP)
        until(lambda: len(rows_in(folder)) >= total - 2)
        time.sleep(1)
        left.append(total - len(rows_in(folder)))
        first.kill()

    killer = threading.Thread(target=kill_when_all_else_is_done)
    killer.start()
    assert main(["sweep", str(recipe_file), "-o", str(folder), *OPTIONS, "--executor", f"dask:{address}"]) == 0
    killer.join()
    assert left[0] in (1, 2)
    assert len(rows_in(folder)) == len(set(rows_in(folder))) == total
    assert_same_results(folder, alone)
