"""Several processes on the CPU: what one computes, four and two compute to the last bit, and they fail together."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.models import causal_lm, generative_tokenizer, save_project
from support.runs import hies
from support.spawned import free_port, outcome, statistics, work

from hies_export import processes
from hies_export.calibrate.stream import grouped
from hies_export.checkpoint.refits import REFIT, read_refit
from hies_export.errors import RequestError
from hies_export.values import PruningPlan

BOTH = ["attention", "mlp"]
SMALL = {"repeats": 2, "shapes": [[1, 8]], "runtimes": ["torch"]}


def save_bert(folder: Path, *, rows: int = 21, held_out: int = 13, **prune: Any) -> None:
    """Rows that neither four nor two divide, nor do batches of them."""
    folder.mkdir()
    least_squares = {"method": "least_squares", "samples": 18, "token_weights": 0.3, "memory_gb": 1e-4}
    wanted: dict[str, Any] = {"modules": BOTH, "criterion": "compensated", "budget": {"flops": 0.7}}
    save_project(
        folder,
        train=rows,
        validation=held_out,
        calibration={"samples": min(rows, 21), "batch_size": 4},
        evaluation={"batch_size": 3},
        prune={**wanted, "compensation": least_squares} | prune,
        measure=SMALL,
    )


def save_llama(folder: Path) -> None:
    folder.mkdir()
    causal_lm().save_pretrained(folder / "model")
    generative_tokenizer().save_pretrained(folder / "model")
    letters = "abcdefghijkl"
    lines = [" ".join(letters[(i * 5 + j * (1 + i % 3)) % 12] for j in range(4 + i % 9)) for i in range(120)]
    (folder / "text.txt").write_text("\n".join(lines))
    recipe = {
        "model": "model",
        "task": "text-generation",
        "data": {"files": {"train": "text.txt"}, "text": "text", "max_length": 24},
        "calibration": {"split": "train[:60%]", "samples": 13, "batch_size": 4},
        "evaluation": {"split": "train[60%:]", "batch_size": 4},
        "prune": {
            "modules": BOTH,
            "criterion": "compensated",
            "budget": {"parameters": 0.8},
            "compensation": {"method": "least_squares", "samples": 15, "sequential": True},
        },
        "measure": SMALL,
        "output": "out",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each process wrote down, by number of processes and its own number; and what one process computes."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    folder = tmp_path_factory.mktemp("processes")
    torch.manual_seed(0)
    save_bert(folder / "bert")
    save_bert(folder / "few", rows=6, held_out=2)
    save_bert(folder / "auto", rows=200, criterion="auto", budget={"heads": 0.3}, modules=["attention"])
    save_llama(folder / "llama")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few tokens
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        # A server that has imported everything forks the four, which saves their imports.
        multiprocessing.set_forkserver_preload(["support.spawned"])
        ports = [free_port() for _ in range(5)]
        torch.multiprocessing.start_processes(work, (ports, folder), nprocs=4, start_method="forkserver")
        alone = {name: outcome(folder / name / "recipe.yaml", folder / f"{name}-one") for name in PROJECTS}
        alone |= {name: statistics(folder / rows / "recipe.yaml") for name, rows in STATISTICS.items()}
    torch.set_num_threads(threads)
    results = {"one": alone, "folder": folder}
    for name, count in (("four", 4), ("two", 2)):
        results[name] = [torch.load(folder / f"{name}-{n}.pt", weights_only=False) for n in range(count)]
    return results


PROJECTS = ("bert", "auto", "llama")
STATISTICS = {"statistics": "bert", "statistics of few rows": "few"}


def assert_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, Mapping):
        assert list(one) == list(other), where
        for name, value in one.items():
            assert_same(value, other[name], f"{where} {name}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), f"{where}: {(one - other).abs().max()}"
    else:
        assert one == other, where


@pytest.mark.slow
@pytest.mark.parametrize("what", [*PROJECTS, *STATISTICS])
def test_all_processes_compute_what_one_does(found: dict[str, Any], what: str) -> None:
    for name in ("four", "two"):
        for number, results in enumerate(found[name]):
            if what in results:
                assert_same(found["one"][what], results[what], f"process {number} of {name}:")
    assert what in found["two"][1] or what in found["four"][3]


@pytest.mark.slow
def test_one_process_writes(found: dict[str, Any]) -> None:
    assert all(results["command"]["code"] == 0 for results in found["two"])
    report = json.loads((found["folder"] / "bert" / "run" / "report.json").read_text())
    assert report["environment"]["processes"] == 2
    written = PruningPlan.from_file(found["folder"] / "bert" / "run" / "plan.json")
    chosen = PruningPlan.from_json(found["one"]["bert"]["plan"])
    assert replace(written, compensation=chosen.compensation) == chosen
    read_refit(written, found["folder"] / "bert" / "run" / REFIT)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "rank"), [(0, 0), (1, 2)])
def test_a_failure_of_one_ends_all(found: dict[str, Any], which: int, rank: int) -> None:
    for number, results in enumerate(found["four"]):
        failed = results["failed"][which]
        told = "row 3 has no text" if number == rank else f"process {rank} of 4 (from 0) stopped: row 3 has no text"
        assert (failed["said"], failed["code"]) == (told, 2)
        assert failed["seconds"] < 60
    assert not [*(found["folder"] / "bert").glob("*never*")]


def test_modules_are_shared_out_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"attention 0": 1.0, "mlp 0": 16.0, "attention 1": 1.0, "mlp 1": 16.0}
    assert set(processes.owners(sizes).values()) == {0}
    monkeypatch.setattr(processes, "world", lambda: 2)
    assert processes.owners(sizes) == {"attention 0": 0, "mlp 0": 1, "attention 1": 0, "mlp 1": 0}


def test_groups_fill_the_memory_of_every_process() -> None:
    class Module:
        def __init__(self, name: str):
            self.name = name

    modules: Any = [Module(name) for name in "abcdef"]
    alone = grouped(modules, [2] * 6, 4, dict.fromkeys("abcdef", 0))
    assert [len(group) for group in alone] == [2, 2, 2]
    shared = grouped(modules, [2] * 6, 4, dict(zip("abcdef", [0, 1, 0, 1, 0, 1], strict=True)))
    assert [len(group) for group in shared] == [4, 2]


def test_gpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.own_devices() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert processes.own_devices() == [4, 5, 6, 7]


def test_processes_need_accelerate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hies_export.errors.find_spec", lambda name: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert hies("run", "recipe.yaml") == 2
    assert "several processes (WORLD_SIZE) need accelerate, which is not installed" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert hies("run", "recipe.yaml") == 2
    assert capsys.readouterr().err == ""  # only the first process prints


def test_processes_must_know_how_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(
            RequestError, match="needs RANK, LOCAL_RANK, .* lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start it by"
        ),
        processes.together(),
    ):
        pass
