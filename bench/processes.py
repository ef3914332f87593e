"""Run recipes in 1, 2 and 4 processes, and show that they keep the same units, and what each took.

python bench/processes.py [--processes 1 2 4] [--only NAME] [--shared DIR] [--folder DIR]

Heads and neurons of MiniLM, fine-tuned on STS-B, and of a LLaMA of 260,000 parameters, trained on stories, go by
`compensated`, and least squares refits what reads them. Every process has one thread. One process is
`python -m hies_export run`; several are the same under `torchrun`. What each run wrote is compared with what the first
one wrote: kept units, scores, every weight, the metrics. Nothing of the package is imported. The exit code is 0 if all
keep the same units by scores within 1e-6 of the largest, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
LEAST_SQUARES = {"method": "least_squares", "samples": 512}
BOTH = {"modules": ["attention", "mlp"], "criterion": "compensated", "compensation": LEAST_SQUARES}
MEASURE = {"runtimes": [], "shapes": [[1, 64]]}
# Scores, as a share of the largest.
CLOSE = 1e-6
HEADER = f"{'model':<8} {'processes':>9} {'kept units':>10} {'differ':>6} {'scores':>8} {'weights':>8} {'quality':>22} "
HEADER += f"{'score s':>8} {'cut s':>6} {'run s':>6}"


def recipes(shared: Path) -> dict[str, dict[str, Any]]:
    """Return the recipes by name."""
    stsb, stories = shared / "data" / "stsb", shared / "data" / "tinystories_cased" / "train.txt.gz"
    return {
        "minilm": {
            "model": str(shared / "models" / "minilm-stsb"),
            "task": "text-classification",
            "data": {
                "files": {split: str(stsb / f"{split}.jsonl.gz") for split in ("train", "validation")},
                "text": ["sentence1", "sentence2"],
                "label": "label",
                "max_length": 128,
            },
            # Neither 100 rows nor batches of 16 are a multiple of the processes.
            "calibration": {"samples": 100, "batch_size": 16},
            "evaluation": {"metrics": ["pearson", "spearman"]},
            "prune": {**BOTH, "budget": {"flops": 0.6}},
            "measure": MEASURE,
        },
        "llama": {
            "model": str(shared / "data" / "checkpoints" / "stories260K"),
            "task": "text-generation",
            "data": {"files": {"all": str(stories)}, "text": "text", "max_length": 128, "bos": False},
            "calibration": {"split": "all[:70%]", "samples": 100, "batch_size": 16},
            "evaluation": {"split": "all[70%:]"},
            "prune": {**BOTH, "budget": {"flops": 0.7}},
            "measure": MEASURE,
        },
    }


def run(recipe: Path, output: Path, processes: int) -> float:
    """Run a recipe, and return how many seconds that took."""
    alone = [sys.executable, "-m"]
    several = [*alone, "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    command = [*(alone if processes == 1 else several), "hies_export", "run", str(recipe), "-o", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def written(output: Path) -> dict[str, Any]:
    """Return what a run wrote."""
    report = json.loads((output / "report.json").read_text())
    scores = json.loads((output / "scores.json").read_text())["scores"]
    kept = {
        (module, unit)
        for module, part in json.loads((output / "plan.json").read_text())["kept"].items()
        for unit in part["units"]
    }
    return {
        "kept": kept,
        "scores": [value for module in sorted(scores) for value in scores[module]],
        "weights": load_file(output / "slim" / "model.safetensors"),
        "quality": report["details"]["metrics"],
        "stability": report["stability"],
        "slim": report["quality"]["slim"],
        "seconds": report["seconds"],
    }


def row(name: str, processes: int, one: dict[str, Any], other: dict[str, Any], seconds: float) -> tuple[str, bool]:
    """Return a line of the table, and whether the promise holds."""
    differ = len(one["kept"] ^ other["kept"])
    scores = max(abs(a - b) for a, b in zip(one["scores"], other["scores"], strict=True)) / max(map(abs, one["scores"]))
    weights = differ or max(_distance(one["weights"][n], w) for n, w in other["weights"].items())
    spent = other["seconds"]
    line = f"{name:<8} {processes:>9} {len(other['kept']):>10} {differ:>6} {scores:>8.1g} {weights:>8.1g} "
    line += f"{other['slim']:>22.17g} {spent['score']:>8.1f} {spent['cut']:>6.1f} {seconds:>6.1f}"
    return line, not differ and scores <= CLOSE


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, as a share of the largest number."""
    return ((one - other).abs().max() / one.abs().max().clamp(min=1e-30)).item()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--only", help="minilm or llama")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of the models and data")
    parser.add_argument("--folder", type=Path, help="where to write the runs; by default a temporary folder")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"python bench/processes.py, {cores} cores, one thread in every process\n")
    print(HEADER)
    all_kept = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, recipe in recipes(options.shared).items():
            if options.only not in (None, name):
                continue
            path = folder / f"{name}.yaml"
            path.write_text(yaml.safe_dump({**recipe, "output": f"{name}-out"}))
            first = None
            for processes in options.processes:
                output = folder / f"{name}-{processes}"
                seconds = run(path, output, processes)
                found = written(output)
                first = first or found
                line, kept = row(name, processes, first, found, seconds)
                all_kept &= kept
                print(line, flush=True)
    print(f"\nsame units, scores within {CLOSE:g}: {'yes' if all_kept else 'no'}")
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
