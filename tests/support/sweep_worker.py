"""One process of a shared sweep: `python sweep_worker.py RECIPE FOLDER STOP`.

It prints the key of every cell that it begins, and in the middle of number STOP, from 1, it sleeps until it is killed.
"""

import sys
import time
from pathlib import Path
from typing import Any

from hies_export.lab.sweep.grid import SweepGrid
from hies_export.lab.sweep.sweep import _Runner, sweep
from hies_export.recipe import PruningRecipe

GRID = SweepGrid(
    criteria=("his", "random", "l2", "ad"), sparsities=(0.2, 0.5), seeds=(0, 1), calibration_sizes=(8,), alphas=(0.5,)
)


def main(recipe: str, folder: str, stop: str) -> None:
    begun = []
    evaluate = _Runner._evaluate

    def observed(runner: _Runner, cell: Any) -> Any:
        begun.append(runner._chooser.key(cell))
        print(begun[-1], flush=True)
        if len(begun) == int(stop):
            time.sleep(600)
        return evaluate(runner, cell)

    _Runner._evaluate = observed  # type: ignore[method-assign]
    sweep(PruningRecipe.from_yaml(recipe), GRID, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
