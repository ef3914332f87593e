"""The programs of bench/: all of them start, and what measures a GPU or a LLaMA runs on tiny models."""

import importlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.pretend import pretend_gpus
from support.runs import registries_restored, run_script

BENCH = Path(__file__).resolve().parents[2] / "bench"
PROGRAMS = sorted(path for path in BENCH.glob("*.py") if "parse_args()" in path.read_text())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_says_what_it_does(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^0$"):
        run_script(program, "--help")
    assert capsys.readouterr().out.startswith(f"usage: {program.name} ")


def test_a_llama_is_pruned_by_several_methods_and_cells_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["compensated+least_squares:both", "hies+none:attention", "slicegpt"]
    run_script(BENCH / "real_llama.py", "--small", "--methods", *methods)
    printed = capsys.readouterr().out
    assert all(f"| {method} |" in printed for method in methods)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """bench/gpu.py as a module, which is forgotten afterwards with what it imports from its folder."""
    monkeypatch.syspath_prepend(BENCH)
    before = set(sys.modules)
    with registries_restored():
        yield importlib.import_module("gpu")
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCH:
            del sys.modules[name]


def session_of(gpu: Any, folder: Path, **options: Any) -> Any:
    """Return a session that writes nothing on the terminal."""
    how = {"device": "cpu", "repeats": 2, "console": Console(quiet=True), "seconds": 60.0}
    return gpu.Session(folder / "gpu.json", **(how | options))


def lines_of(session: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in session.out.with_suffix(".jsonl").read_text().splitlines()]


def test_models_are_timed_and_what_cannot_be_is_named(gpu: Any, tmp_path: Path) -> None:
    session = session_of(gpu, tmp_path)
    shape = gpu.bert("tiny", **gpu.TINY, vocab_size=100, max_position_embeddings=64)
    both = ["torch", "onnxruntime-cuda"]
    gpu.time_models(session, shape, runtimes=both, dtypes=["float32"], sizes=[(2, 12)])
    gpu.time_scoring(session, shape, dtype="float32", size=(2, 12))
    lines = lines_of(session)
    assert [line["row"]["model"] for line in lines if "row" in line] == ["tiny -0%", "tiny -30%", "tiny -50%", "tiny"]
    (missing,) = (line["missing"] for line in lines if "missing" in line)
    assert missing.startswith("tiny, onnxruntime-cuda, float32: ")
    # Half the heads are half of the attention, and the dense model against itself is nothing.
    none, third, half = (row["flops_ratio"] for row in session.latency)
    assert half < third < none == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [table["rows"] for table in found["tables"]] == [session.latency, session.scoring]
    session.console = Console(file=io.StringIO(), width=140)
    session.show()
    shown = session.console.file.getvalue()
    assert "tiny -30%" in shown
    assert "not measured: tiny, onnxruntime-cuda, float32: " in shown


def test_what_fails_or_takes_too_long_is_told_and_the_rest_goes_on(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now))
    session = session_of(gpu, tmp_path, seconds=0.3, started=now)

    def beyond(device: str) -> dict[str, Any]:
        return {"beyond": ["BERT: 2e-3"], "on": device}

    def broken(device: str) -> dict[str, Any]:
        raise ZeroDivisionError("no kernel")

    def long(device: str) -> None:
        nonlocal now
        now = 30.0
        signal.pause()

    for check in (broken, beyond, lambda device: {"fine": True}, long):
        session.check(check)
    session.attempt("next", lambda: pytest.fail("begun"))
    assert session.missing == [
        "check: broken: ZeroDivisionError: no kernel",
        "check: long: it was stopped 0.2 s after the 0.005 minutes were over",
        "next: the 0.005 minutes were over before it began",
    ]
    first, second, third, *_ = lines_of(session)
    assert first["missing"] == session.missing[0]
    assert (second["ok"], second["found"]["on"], third["ok"]) == (False, "cpu", True)


def test_checks_run_on_a_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = importlib.import_module("gpu_checks")
    monkeypatch.setattr(checks, "product", lambda *parts: list(itertools.product(*parts))[::19])
    with pretend_gpus():
        found = {name: getattr(checks, name)("cuda") for name in ("environment", "kernels", "cuts")}
    assert not any(part.get("beyond") for part in found.values()), found


def test_files_that_cannot_be_written_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        run_script(BENCH / "gpu.py", "--dry", "--out", tmp_path / "file" / "gpu")
    assert "--out must name files that can be written" in capsys.readouterr().err


def test_the_script_hands_its_arguments_on(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$HF_HUB_OFFLINE" "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": "there"}
    done = subprocess.run([BENCH / "gpu.sh", "--out", "a b"], capture_output=True, text=True, env=environment)
    assert done.stdout == f"1 {BENCH.parent}:there {BENCH / 'gpu.py'} --out a b\n"
