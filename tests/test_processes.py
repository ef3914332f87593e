"""Several processes on the CPU: they keep the units that one keeps, by scores within 1e-6, and fail together."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import save_project, save_stories, save_text_model
from support.runs import hies
from support.spawned import environment, fail, free_port, run, statistics, work
from support.tolerance import REFITTED, assert_near, assert_same_plan

from hies_export import PruningPlan, RequestError, processes
from hies_export.checkpoint.save import REFIT, read_refit
from hies_export.processes import VARIABLES

BOTH = ["attention", "mlp"]
WANTED: dict[str, Any] = {"modules": BOTH, "criterion": "compensated"}
UNTIMED: dict[str, Any] = {"runtimes": []}


def save_bert(folder: Path, *, rows: int = 21, held_out: int = 13, **prune: Any) -> None:
    """Rows that two does not divide, nor do batches of them."""
    folder.mkdir()
    least_squares = {"method": "least_squares", "samples": 18, "token_weights": 0.3}
    save_project(
        folder,
        train=rows,
        validation=held_out,
        calibration={"samples": min(rows, 21), "batch_size": 4},
        evaluation={"batch_size": 3},
        prune={**WANTED, "budget": {"flops": 0.7}, "compensation": least_squares} | prune,
        measure=UNTIMED,
    )
    save_text_model(folder / "model", num_hidden_layers=2)


def save_llama(folder: Path) -> None:
    folder.mkdir()
    least_squares = {"method": "least_squares", "samples": 15, "sequential": True}
    save_stories(
        folder,
        lines=70,
        calibration={"split": "train[:60%]", "samples": 13, "batch_size": 4},
        evaluation={"split": "train[60%:]", "batch_size": 4},
        prune={**WANTED, "budget": {"parameters": 0.8}, "compensation": least_squares},
        measure=UNTIMED,
    )


PROJECTS = ("bert", "llama", "auto")
SCORES = 1e-6  # of the largest: what docs/guides/many-processes.md promises


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one and two processes have run the projects."""
    folder = tmp_path_factory.mktemp("processes")
    torch.manual_seed(0)
    save_bert(folder / "bert")
    save_bert(folder / "few", rows=6, held_out=2)
    save_bert(folder / "auto", rows=60, criterion="auto", budget={"heads": 0.3}, modules=["attention"])
    save_llama(folder / "llama")
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few tokens
        torch.set_num_threads(1)
        spawn(work, 4, [free_port(), free_port()], folder, PROJECTS)
        for project in PROJECTS:
            run(folder / project, "one")
    torch.set_num_threads(threads)
    return folder


def spawn(function: Callable[..., None], count: int, *arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        # A server that has imported everything forks the processes; it looks for modules where this variable says.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.set_forkserver_preload(["support.spawned"])
        torch.multiprocessing.start_processes(function, arguments, nprocs=count, start_method="forkserver")


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_two_processes_keep_the_units_that_one_does(found: Path, project: str) -> None:
    one, other = (
        {file: json.loads((found / project / n / f"{file}.json").read_text()) for file in ("scores", "report")}
        for n in ("one", "two")
    )
    # The digest of the refitted weights is the only difference.
    plans = [replace(PruningPlan.from_file(found / project / n / "plan.json"), compensation={}) for n in ("two", "one")]
    assert_same_plan(*plans)
    for what in ("scores", "his", "entropy", "weight_l2"):
        assert_near(other["scores"][what], one["scores"][what], within=SCORES, where=what)
    weights = [load_file(found / project / n / "slim" / "model.safetensors") for n in ("two", "one")]
    assert_near(*weights, within=REFITTED, where="weights")
    assert one["report"]["stability"] == other["report"]["stability"]
    assert other["report"]["quality"]["slim"] == pytest.approx(one["report"]["quality"]["slim"], rel=1e-5)
    assert other["report"]["environment"]["processes"] == 2
    if project != "auto":
        read_refit(PruningPlan.from_file(found / project / "two" / "plan.json"), found / project / "two" / REFIT)
    # One process writes.
    assert {path.name for path in (found / project).iterdir() if path.is_dir()} == {"model", "one", "two"}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "name", "count"), [("bert", "two", 2), ("few", "four", 4)])
def test_all_processes_have_the_same_statistics(found: Path, rows: str, name: str, count: int) -> None:
    expected = statistics(found / rows)
    first, *others = (torch.load(found / f"{name}-{n}.pt") for n in range(count))
    for what, values in expected.items():
        assert_near(first[what], values, where=what)
        for other in others:  # in the same bits, because each process chooses by its own
            assert_near(other[what], first[what], within=0, where=what)


@pytest.mark.slow
def test_a_failure_of_one_ends_all(tmp_path: Path) -> None:
    failing = 1
    save_bert(tmp_path / "bert")
    spawn(fail, 2, failing, free_port(), tmp_path)
    said, code, _ = torch.load(tmp_path / f"failed-{failing}-{failing}.pt")
    assert (said, code) == ("row 3 has no text", 2)
    said, code, seconds = torch.load(tmp_path / f"failed-{failing}-{1 - failing}.pt")
    assert said.startswith("another process failed or is gone")
    assert code == 1
    # Long enough for a busy machine. A process that is not told waits for days.
    assert seconds < 600


@pytest.mark.parametrize("count", [2, 3, 4])
def test_large_and_small_modules_in_turn_are_shared_out_evenly(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "world", lambda: count)
    modules = ["attention", "mlp"] * count
    shared = [[of for number, of in enumerate(modules) if processes._worker(number) == rank] for rank in range(count)]
    assert [sorted(part) for part in shared] == [["attention", "mlp"]] * count


REFUSED = {
    "no torch.distributed": "need a torch that was built with torch.distributed",
    "no address": "needs RANK, LOCAL_RANK, .* lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start it by",
    "few GPUs": "every process must have a GPU of its own, but there are 2 processes and 1 GPUs; start fewer processes",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_environment_lacks_is_said(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    given = {"RANK": "0", "WORLD_SIZE": "2"} if why == "no address" else environment(0, 2, 1)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: why != "no torch.distributed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: why == "few GPUs")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RequestError, match=REFUSED[why]), processes.together():
        pass


def test_the_first_process_speaks_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected in (("0", []), ("1", [processes.HEAD_START])):
        monkeypatch.setenv("RANK", rank)
        assert hies("run", "recipe.yaml") == 2
        assert capsys.readouterr().err.startswith("error: one process of several needs")
        assert waited == expected


@pytest.mark.slow
def test_what_accelerate_starts_on_cpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("with several GPUs accelerate starts what it is told to")
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom hies_export import processes\n"
        "with processes.together():\n"
        "    rank = os.environ.get('RANK', '0')\n"
        "    open('of-' + rank, 'w').write(str(processes.world()))\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", "--multi_gpu"]
    subprocess.run([*launch, str(script)], capture_output=True, timeout=300, check=True, cwd=tmp_path)
    # A file a process: what two processes print into one pipe can interleave.
    assert {file.name: file.read_text() for file in tmp_path.glob("of-*")} == {"of-0": "2", "of-1": "2"}
