"""What the processes of tests/test_processes.py do: spawned processes import it by name."""

import gc
import os
import socket
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.exporters import OnnxExporter

from hies_export import DataError, HiesError, PruningRecipe, collect_statistics, processes
from hies_export.checkpoint import folders
from hies_export.model.internals import attributes_set
from support.cuts import effects
from support.loading import load_pruning
from support.runs import hies, without_tracing

OnnxExporter()  # it imports much: once, for all processes that are forked from there
ALL_STATISTICS = ("his", "activation_l2")


def run(project: Path, name: str) -> None:
    """Run a project's recipe by the command line, into the folder of that name, which comes late to its place."""
    put = folders._put

    def put_late(written: Path, output: Path) -> None:
        time.sleep(0.3)
        put(written, output)

    with without_tracing(), attributes_set([(folders, "_put", put_late)]):
        assert hies("run", project / "recipe.yaml", "-o", project / name) == 0


def statistics(project: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return every statistic, and effects, of a project's model."""
    prepared = load_pruning(PruningRecipe.from_yaml(project / "recipe.yaml"))
    sites, batches = prepared.scored, prepared.rows.score
    found = collect_statistics(prepared.model, batches, sites, needs=ALL_STATISTICS)
    layers = effects(prepared.model, batches, sites)
    return {
        **{name: dict(values) for name, values in found.values.items()},
        "inputs": {name: layer.inputs for name, layer in layers.items()},
        "gradients": {name: layer.gradients for name, layer in layers.items()},
    }


def work(local: int, ports: list[int], folder: Path, projects: Sequence[str]) -> None:
    """Collect statistics in the process with this number, of four and then of two, which also run the projects.

    Every meeting takes a port.
    """
    _be_quiet()
    for name, count, port in (("four", 4, ports[0]), ("two", 2, ports[1])):
        if local >= count:
            return
        os.environ |= environment(local, count, port)
        with processes.together():
            for project in projects if count == 2 else ():
                run(folder / project, name)
            # Of the few rows, there are two batches for four processes.
            found = statistics(folder / ("bert" if count == 2 else "few"))
        torch.save(found, folder / f"{name}-{local}.pt")


def fail(local: int, failing: int, port: int, folder: Path) -> None:
    """Write down what each of two processes is told when the data of one is refused, in the middle of a run."""
    _be_quiet()
    os.environ |= environment(local, 2, port)
    started = time.monotonic()
    try:
        with processes.together():
            if local == failing:
                raise DataError("row 3 has no text")
            statistics(folder / "bert")
    except HiesError as error:
        torch.save((str(error), error.exit_code, time.monotonic() - started), folder / f"failed-{failing}-{local}.pt")


def _be_quiet() -> None:
    gc.freeze()  # or every timing collects garbage among the objects of what is imported
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def environment(local: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun would put into the environment of a process."""
    numbers = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
