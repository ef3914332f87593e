"""Let processes share one sweep, kill one with SIGKILL in the middle of a cell, and print what each did.

    python bench/workers.py --workers 2 --kill-after 5

The model is the quickstart's, trained here for a few epochs. Its rows are compared with those of one process alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from hies_export.pipeline.quickstart import prepare_quickstart
from hies_export.report.terminal import PlainTable

GRID = ("--criteria", "hies,his,l2,random", "--alphas", "0.5", "--sparsities", "0.2,0.4,0.6", "--seeds", "0,1,2,3")
GRID = (*GRID, "--compensations", "none,least_squares", "--modules", "attention", "--no-figures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-after", type=int, default=5, help="rows of the first worker before it is killed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        recipe = prepare_quickstart(Path(temporary), epochs=3)
        alone, shared = Path(temporary) / "alone", Path(temporary) / "shared"
        started = time.perf_counter()
        if start(recipe, alone).wait():
            raise SystemExit("the sweep of one process failed; run it by hand to see why")
        seconds = {"alone": time.perf_counter() - started}
        started = time.perf_counter()
        workers = [start(recipe, shared) for _ in range(options.workers)]
        held = kill_in_a_cell(workers[0], shared, rows=options.kill_after)
        for worker in workers[1:]:
            worker.communicate()
        seconds["shared"] = time.perf_counter() - started
        show(workers, shared, alone, held, seconds)


def start(recipe: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start a sweep as a process of its own."""
    command = [sys.executable, "-m", "hies_export", "sweep", str(recipe), "-o", str(folder), *GRID]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rows_of(worker: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """Return the keys of the rows that a worker has finished."""
    lines = [line for path in folder.glob(f"journal-*-{worker.pid}-*.jsonl") for line in path.read_bytes().split(b"\n")]
    found = [json.loads(line) for line in lines[:-1]]
    return [line["key"] for line in found if line["kind"] == "row"]


def kill_in_a_cell(worker: subprocess.Popen[bytes], folder: Path, *, rows: int) -> str:
    """Kill a worker while it holds the claim of a cell, after so many rows, and return the name of the claim."""
    while worker.poll() is None:
        if len(rows_of(worker, folder)) >= rows:
            # Stopped, it neither finishes the cell nor begins another while we look.
            worker.send_signal(signal.SIGSTOP)
            claims = [path for path in folder.glob(".claim-*") if f"pid={worker.pid}\n" in path.read_text()]
            if claims:
                worker.kill()
                worker.wait()
                return claims[0].name
            worker.send_signal(signal.SIGCONT)
        time.sleep(0.002)
    raise SystemExit("the worker ended before it could be killed; lower --kill-after")


def show(
    workers: list[subprocess.Popen[bytes]], shared: Path, alone: Path, held: str, seconds: dict[str, float]
) -> None:
    """Print the table."""
    keys = [rows_of(worker, shared) for worker in workers]
    lines = [
        (
            f"worker {number + 1}",
            str(len(found)),
            str(worker.returncode),
            f"killed, holding {held}" if not number else "",
        )
        for number, (worker, found) in enumerate(zip(workers, keys, strict=True))
    ]
    console = Console(width=100)
    console.print(PlainTable(("process", "rows", "exit code", ""), lines))
    every = [key for found in keys for key in found]
    total = len(json.loads((alone / "sweep.json").read_text()))
    console.print(
        f"\ncells of the grid {total}, rows in all journals {len(every)}, cells with two rows "
        f"{len(every) - len(set(every))}"
    )
    console.print(f"claims left: {len(list(shared.glob('.claim-*')))}")
    for name in ("sweep.json", "details.json", "sweep.csv", "tables.md", "tables.tex"):
        same = (shared / name).read_bytes() == (alone / name).read_bytes()
        console.print(f"{name}: {'the same bytes as' if same else 'DIFFERS FROM'} one process alone")
    console.print(f"seconds: one process {seconds['alone']:.0f}, shared with one killed {seconds['shared']:.0f}")


if __name__ == "__main__":
    main()
