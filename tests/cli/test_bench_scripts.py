"""bench/gpu.sh on the CPU and on a pretend GPU, and bench/real_llama.py: their code, with tiny models."""

import importlib
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


def gpu_bench(out: Path, *options: str) -> dict[str, Any]:
    run_script(BENCH / "gpu.py", "--dry", "--repeats", 2, "--out", out, *options)
    assert out.with_suffix(".html").read_text().startswith("<!doctype html>")
    return json.loads(out.with_suffix(".json").read_text())


@pytest.mark.slow
def test_everything_is_measured_or_named(tmp_path: Path) -> None:
    found = gpu_bench(tmp_path / "gpu.json", "--only", "latency")
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    rows = [row for table in found["tables"] for row in table["rows"]]
    assert sorted(json.dumps(line["row"]) for line in lines if "row" in line) == sorted(map(json.dumps, rows))
    assert [line["missing"] for line in lines if "missing" in line] == found["missing"]
    latency, scoring = (table["rows"] for table in found["tables"])
    measured = {(row["model"], row["runtime"], row["dtype"], row["phase"]) for row in latency}
    for share in ("0%", "30%", "50%"):
        for dtype in ("float32", "bfloat16"):
            assert (f"tiny BERT -{share}", "torch", dtype, "forward") in measured
    for model in ("LLaMA", "LLaVA"):
        assert {phase for name, _, _, phase in measured if name == f"tiny {model} -50%"} == {"prefill", "decode"}
    assert ("tiny ViT -50%", "torch", "float32", "forward") in measured
    assert ("tiny BERT -50%", "onnxruntime-cpu", "float32", "forward") in measured
    # Half the heads are half of the attention, and the dense model against itself is nothing.
    ratios = {row["model"]: row["flops_ratio"] for row in latency if row["runtime"] == "torch"}
    assert ratios["tiny BERT -0%"] == 1
    assert ratios["tiny BERT -50%"] < ratios["tiny BERT -30%"] < 1
    assert [row["model"] for row in scoring] == ["tiny BERT", "tiny LLaMA"]
    assert len(found["missing"]) == 1
    assert "onnxruntime-cuda" in found["missing"][0]


@pytest.mark.slow
def test_every_check_has_a_line(tmp_path: Path) -> None:
    found = gpu_bench(tmp_path / "here" / "gpu", "--only", "checks")
    lines = [json.loads(line) for line in (tmp_path / "here" / "gpu.jsonl").read_text().splitlines()]
    names = ["environment", "kernels", "statistics", "cuts", "tf32", "memory", "clocks", "compiled", "onnx_runtime"]
    assert [line["check"] for line in lines] == names
    assert all(line["ok"] for line in lines), lines
    checks = {line["check"]: line["found"] for line in lines}
    assert checks["kernels"]["cases"] == 144
    assert checks["onnx_runtime"]["LLaMA, float32"]["decode, 7"] < 1e-4
    assert found["missing"] == []


@pytest.mark.slow
def test_a_llama_is_pruned_by_every_method_and_cells_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    run_script(BENCH / "real_llama.py", "--small")
    assert "| compensated+least_squares:both |" in capsys.readouterr().out


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts of bench/ as modules, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(BENCH)
    before = set(sys.modules)
    with registries_restored():
        yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCH:
            del sys.modules[name]


def test_checks_that_fail_are_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: None
) -> None:
    gpu = importlib.import_module("gpu")
    options = {"device": "cpu", "repeats": 1, "console": Console(quiet=True), "seconds": 60.0}
    session = gpu.Session(tmp_path / "gpu.json", **options)

    def beyond(device: str) -> dict[str, Any]:
        return {"beyond": ["BERT: 2e-3"], "on": device}

    def broken(device: str) -> dict[str, Any]:
        raise ZeroDivisionError("no kernel")

    for check in (broken, beyond, lambda device: {"fine": True}):
        session.check(check)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines[0]["missing"] == "check: broken: ZeroDivisionError: no kernel"
    assert (lines[1]["ok"], lines[1]["found"]["on"], lines[2]["ok"]) == (False, "cpu", True)


def test_checks_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch, scripts: None) -> None:
    checks = importlib.import_module("gpu_checks")
    monkeypatch.setattr(checks, "product", lambda *parts: list(itertools.product(*parts))[::5])
    with pretend_gpus():
        found = {name: getattr(checks, name)("cuda") for name in ("environment", "kernels", "cuts", "tf32")}
    assert not any(part.get("beyond") for part in found.values()), found


def test_what_is_missing_is_named_first(monkeypatch: pytest.MonkeyPatch, scripts: None, capsys: Any) -> None:
    needs = importlib.import_module("gpu_needs")
    wanted = needs.needs(needs.PROJECT.read_text())
    assert {"torch", "transformers", "pydantic", "datasets"} <= wanted.keys()
    have = {**wanted, "transformers": "4.57.6", "torch": "2.14.0+cu130"}
    del have["pydantic"]
    monkeypatch.setattr(needs, "installed", have.get)
    with pytest.raises(SystemExit, match="2"):
        needs.main()
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == f"bench/gpu.sh needs transformers>={wanted['transformers']}, and here it is 4.57.6"
    assert printed[1] == f"bench/gpu.sh needs pydantic>={wanted['pydantic']}, and here it is missing"
    assert printed[2].endswith(
        f'-m pip install "transformers>={wanted["transformers"]}" "pydantic>={wanted["pydantic"]}"'
    )
    monkeypatch.setattr(needs, "installed", wanted.get)
    assert needs.main() is None


def test_files_that_cannot_be_written_are_named(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        run_script(BENCH / "gpu.py", "--dry", "--out", tmp_path / "file" / "gpu")
    assert "--out must name files that can be written" in capsys.readouterr().err


def test_what_takes_too_long_or_breaks_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: None
) -> None:
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.5)
    now = 0.0
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now))

    def session(seconds: float) -> Any:
        options = {"device": "cpu", "repeats": 1, "console": Console(quiet=True), "started": now}
        return gpu.Session(tmp_path / "gpu.json", seconds=seconds, **options)

    def too_long() -> None:
        nonlocal now
        now = 30.0
        signal.pause()

    late, broken = session(0.5), session(60)
    late.attempt("long", too_long)
    late.attempt("next", lambda: pytest.fail("begun"))
    assert late.missing == [
        "long: it was stopped 0.5 s after the 0.00833 minutes were over",
        "next: the 0.00833 minutes were over before it began",
    ]
    now = 0.0
    broken.attempt("wrong", lambda: [][1])
    broken.attempt("right", lambda: broken.scoring.append({}))
    assert broken.missing == ["wrong: IndexError: list index out of range"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["tables"][1]["rows"] == [{}]


def test_the_script_hands_its_arguments_on(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$1" in *gpu_needs.py) exit ${NEEDS:-0};; esac\necho "$HF_HUB_OFFLINE" "$PYTHONPATH" "$@"\n'
    )
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": "there"}
    done = subprocess.run([BENCH / "gpu.sh", "--out", "a b"], capture_output=True, text=True, env=environment)
    assert done.stdout == f"1 {BENCH.parent}:there {BENCH / 'gpu.py'} --out a b\n"
    lacking = subprocess.run([BENCH / "gpu.sh"], capture_output=True, text=True, env={**environment, "NEEDS": "2"})
    assert (lacking.returncode, lacking.stdout) == (2, "")
