"""Optimise by Olive for the CPU: by its command `optimize`, and by the passes of its BERT example.

Source: https://microsoft.github.io/Olive/how-to/cli/cli-optimize.html, and examples/bert of its repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.program import Given, Stopped, Way, main

os.environ["OLIVE_DISABLE_TELEMETRY"] = "1"
TASK = "text-classification"
# The last line of a traceback.
ERROR = re.compile(r"[\w.]*Error: ")


def optimise(given: Given, out: Path, *more: str) -> None:
    """Run `olive optimize`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("olive")), "optimize", "-t", TASK, "-o", "out", *more]
        command += ["-m", str(given.checkpoint.resolve())]
        command += ["--device", "cpu", "--provider", "CPUExecutionProvider", "--precision", "int8"]
        # Its cache is in the working folder.
        done = subprocess.run(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, cwd=folder
        )
        print(done.stdout)
        if not (Path(folder) / "out").is_dir() or not list((Path(folder) / "out").rglob("*.onnx")):
            said = [line for line in done.stdout.splitlines() if ERROR.match(line)]
            raise Stopped(said[-1] if said else "it wrote no file")
        take(Path(folder) / "out", out)


def exporter(given: Given, out: Path) -> None:
    """Run it with an exporter that knows encoders; it then quantises statically, from a data set of the Hub."""
    optimise(given, out, "--exporter", "torchscript_exporter")


def passes(given: Given, out: Path) -> None:
    """Convert, optimise and quantise dynamically, each pass by its defaults."""
    import olive

    model = {"type": "HfModel", "model_path": str(given.checkpoint), "task": TASK}
    steps: dict[str, Any] = {
        "conversion": {"type": "OnnxConversion"},
        "transformers": {"type": "OrtTransformersOptimization"},
        "quantization": {"type": "OnnxDynamicQuantization"},
    }
    with tempfile.TemporaryDirectory() as folder:
        config = {"input_model": model, "passes": steps, "output_dir": f"{folder}/out", "cache_dir": f"{folder}/cache"}
        olive.run(config)
        take(Path(folder) / "out", out)


def take(folder: Path, out: Path) -> None:
    """Copy the graph that was written, with what lies beside it."""
    (file,) = folder.rglob("*.onnx")
    shutil.copytree(file.parent, out, dirs_exist_ok=True)
    if file.name != "model.onnx":
        (out / file.name).rename(out / "model.onnx")


WAYS = {
    "1-optimize": Way("Olive optimize", "int8", optimise),
    "2-exporter": Way("Olive optimize, torchscript_exporter", "int8", exporter),
    "3-passes": Way("Olive, passes for BERT", "int8", passes),
}

if __name__ == "__main__":
    main(WAYS)
