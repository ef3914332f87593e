"""What the processes of tests/test_processes.py do: spawned processes import it by name."""

from __future__ import annotations

import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from hies_export import processes
from hies_export.calibrate.collect import collect_statistics
from hies_export.calibrate.effects import collect_effects
from hies_export.errors import DataError, HiesError
from hies_export.pipeline.choose import choose
from hies_export.pipeline.prepare import prepare
from hies_export.pipeline.prune import prune
from hies_export.pipeline.run import evaluate_run
from hies_export.progress import SILENT
from hies_export.recipe import PruningRecipe
from support.runs import hies, without_tracing

ALL_STATISTICS = ("his", "activation_l2", "output_norm", "obs", "taylor", "channel_taylor")


def outcome(recipe_file: Path, output: Path) -> dict[str, Any]:
    """Return what a run of a recipe comes to, but for export and measurement."""
    recipe = PruningRecipe.from_yaml(recipe_file)
    prepared = prepare(recipe)
    choice = choose(prepared, recipe, progress=SILENT)
    options: dict[str, Any] = {"compensation": choice.compensation, "refit": choice.refit}
    pruned = prune(prepared, choice.plan, recipe, output, **options, progress=SILENT)
    evaluation = evaluate_run(prepared, pruned.slim, choice.plan, recipe, progress=SILENT)
    return {
        "plan": choice.plan.to_json(),
        "scores": dict(choice.scores.scores),
        "tried": str(choice.tried) + str(choice.alpha_curve),
        "fits": str(pruned.fits),
        "weights": {name: tensor.clone() for name, tensor in pruned.slim.state_dict().items()},
        "metrics": str(evaluation),
    }


def statistics(recipe_file: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return every statistic, and effects, of a recipe's model."""
    prepared = prepare(PruningRecipe.from_yaml(recipe_file))
    sites, batches = prepared.scored, prepared.calibration
    found = collect_statistics(prepared.model, batches, sites, needs=ALL_STATISTICS)
    effects = collect_effects(prepared.model, batches, sites)
    return {
        **{name: dict(values) for name, values in found.values.items()},
        "inputs": {name: layer.inputs for name, layer in effects.layers.items()},
        "gradients": {name: layer.gradients for name, layer in effects.layers.items()},
    }


def failing(rank: int, folder: Path) -> dict[str, Any]:
    """Return what each process is told when the data of one of them is refused, in the middle of a run."""
    started = time.monotonic()
    try:
        with processes.together():
            processes.agree()
            if processes.rank() == rank:
                raise DataError("row 3 has no text")
            outcome(folder / "recipe.yaml", folder / f"never-{rank}")
    except HiesError as error:
        return {"said": str(error), "code": error.exit_code, "seconds": time.monotonic() - started}
    return {}


def command(folder: Path) -> dict[str, Any]:
    """Return the exit code of a whole run by the command line."""
    with without_tracing():
        code = hies("run", folder / "recipe.yaml", "-o", folder / "run")
    return {"code": code}


def work(local: int, ports: list[int], folder: Path) -> None:
    """Do everything in the process with this number, of four and then of two, and write down what came out.

    Every meeting takes a port.
    """
    free = iter(ports)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, count in (("four", 4), ("two", 2)):
        if local >= count:
            return
        os.environ |= environment(local, count, next(free))
        found: dict[str, Any] = {}
        with processes.together():
            for project in ("bert", "llama", *(["auto"] if count == 2 else [])):
                found[project] = outcome(folder / project / "recipe.yaml", folder / f"{project}-{name}")
            if count == 2:
                found["statistics"] = statistics(folder / "bert" / "recipe.yaml")
            else:  # two batches for four processes
                found["statistics of few rows"] = statistics(folder / "few" / "recipe.yaml")
        if count == 4:
            os.environ |= environment(local, count, next(free))
            found["failed"] = [failing(0, folder / "bert")]
            os.environ |= environment(local, count, next(free))
            found["failed"] += [failing(2, folder / "bert")]
        else:
            os.environ |= environment(local, count, next(free))
            found["command"] = command(folder / "bert")
        torch.save(found, folder / f"{name}-{local}.pt")


def environment(local: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun would put into the environment of a process."""
    numbers = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
