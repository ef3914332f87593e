"""bench/gpu.sh on the CPU: the code that runs on a GPU, with tiny models."""

import importlib
import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.runs import run_script

BENCH = Path(__file__).resolve().parents[2] / "bench"


def gpu_bench(out: Path, *options: str) -> dict[str, Any]:
    run_script(BENCH / "gpu.py", "--dry", "--repeats", 2, "--out", out, *options)
    assert out.with_suffix(".html").read_text().startswith("<!doctype html>")
    return json.loads(out.read_text())


@pytest.mark.slow
def test_everything_is_measured_or_named(tmp_path: Path) -> None:
    found = gpu_bench(tmp_path / "gpu.json")
    latency, scoring = (table["rows"] for table in found["tables"])
    rows = {(row["model"], row["runtime"], row["dtype"], row["phase"]) for row in latency}
    for share in ("0%", "30%", "50%"):
        for dtype in ("float32", "bfloat16"):
            assert (f"tiny BERT -{share}", "torch", dtype, "forward") in rows
    for model in ("LLaMA", "LLaVA"):
        assert {phase for name, _, _, phase in rows if name == f"tiny {model} -50%"} == {"prefill", "decode"}
    assert ("tiny ViT -50%", "torch", "float32", "forward") in rows
    assert ("tiny BERT -50%", "onnxruntime-cpu", "float32", "forward") in rows
    # Half the heads are half of the attention, and the dense model against itself is nothing.
    ratios = {row["model"]: row["flops_ratio"] for row in latency if row["runtime"] == "torch"}
    assert ratios["tiny BERT -0%"] == 1
    assert ratios["tiny BERT -50%"] < ratios["tiny BERT -30%"] < 1
    assert [row["model"] for row in scoring] == ["tiny BERT", "tiny LLaMA"]
    assert len(found["missing"]) == 1
    assert "onnxruntime-cuda" in found["missing"][0]


def test_what_takes_too_long_or_breaks_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH)
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
    python.write_text('#!/bin/sh\necho "$HF_HUB_OFFLINE" "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": "there"}
    done = subprocess.run([BENCH / "gpu.sh", "--out", "a b"], capture_output=True, text=True, env=environment)
    assert done.stdout == f"1 {BENCH.parent}:there {BENCH / 'gpu.py'} --out a b\n"
