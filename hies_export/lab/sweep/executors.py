"""Evaluate the cells of a sweep in this process, or on the workers of an executor."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from contextlib import contextmanager
from typing import Any

from ...errors import RequestError, StepError, first_line, quoted, require_package
from ...pipeline.recipe import PruningRecipe
from ...progress import SILENT, Progress
from ...select.plan import library_versions
from .cells import Shared, curve_keys, evaluate_cell, load_shared
from .grid import Cell, SweepGrid

_DASK = "dask:"


@contextmanager
def open_executor(name: str, *, progress: Progress = SILENT) -> Iterator[Executor]:
    """Connect to the executor "dask:ADDRESS", where a Dask scheduler listens, and leave it when the block ends.

    Dask evaluates a cell again elsewhere if its worker is gone, three times (`distributed.scheduler.allowed-failures`).

    Raises:
        RequestError: The name is another one, no scheduler answers, or Dask is not installed.
        StepError: Inside the block: the cluster lost a cell's workers too often, or its scheduler.
    """
    address = name.removeprefix(_DASK)
    if not address or address == name:
        raise RequestError(
            f"an executor must be {_DASK}ADDRESS, such as {_DASK}tcp://10.0.0.1:8786, got {quoted(name)}"
        )
    require_package("distributed", who=f"--executor {_DASK}ADDRESS needs", package="Dask", extra="dask")
    from distributed import Client, KilledWorker

    try:
        client = Client(address)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"a Dask scheduler must listen at {address}, but: {first_line(error)}; start one with 'dask scheduler', "
            f"and workers with 'dask worker {address} --nthreads 1'"
        ) from error
    with client:
        workers = len(client.nthreads())
        progress.stage(f"Dask at {address}: {workers} workers" + ("" if workers else "; waits until one has started"))
        try:
            yield client.get_executor()
        except KilledWorker as error:
            raise StepError(
                f"a worker must survive its cell, but {error.allowed_failures + 1} workers died of the same one; it "
                "may need more memory than they have, their logs say more"
            ) from error
        except CancelledError as error:
            raise StepError(
                f"the Dask scheduler at {address} must run until the last cell, but it is gone or has dropped the cells"
            ) from error


def entries_of(
    shared: Shared, cells: Mapping[str, Cell], executor: Executor | None
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Yield the keys and entries of cells as they are finished; `shared` gets what the workers found besides.

    Raises:
        StepError: The executor lost its workers.
    """
    if executor is None:
        yield from ((key, evaluate_cell(shared, cell)) for key, cell in cells.items())
        return
    sweep, versions = uuid.uuid4().hex, library_versions()
    futures: dict[Future[Any], str] = {}
    try:
        for key, cell in cells.items():
            known = {curve: shared.curves[curve] for curve in curve_keys(shared, cell) if curve in shared.curves}
            futures[executor.submit(evaluate, sweep, shared.recipe, shared.grid, cell, known, versions)] = key
        for future in as_completed(futures):
            entry, curves, seconds, evaluations = future.result()
            shared.curves |= curves
            shared.evaluations += evaluations
            spent = shared.base.clock.seconds
            spent |= {work: spent.get(work, 0.0) + more for work, more in seconds.items()}
            yield futures[future], entry
    except BrokenExecutor as error:
        raise StepError(
            f"the workers of the executor must live until the last cell, but one died: {first_line(error)}; look into "
            "its log, and run the same again to go on"
        ) from error
    finally:
        for future in futures:
            future.cancel()


# The sweep whose cells this process evaluates, if it is a worker, and what it loaded for them.
_loaded: tuple[str, Shared] | None = None
# Baselines change the model while they predict, so the threads of a worker take turns.
_turn = threading.Lock()


def evaluate(
    sweep: str,
    recipe: PruningRecipe,
    grid: SweepGrid,
    cell: Cell,
    curves: dict[str, dict[str, Any]],
    versions: dict[str, str],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, float], int]:
    """Evaluate a cell in this process, which keeps the model and a seed's statistics until another sweep begins.

    `sweep` is a name that no other call of `sweep` has, and `curves` is what is known of the alphas of the cell.
    Returns the cell's entry for the journal, the curves that chose its alpha, seconds by kind of work, and how many
    models were judged. Raises RequestError if this process has other `versions` of the libraries than the sweep.
    """
    global _loaded
    with _turn:
        if _loaded is None or _loaded[0] != sweep:
            # The model of the last sweep goes first: there may not be memory for two.
            _loaded = None
            if (here := library_versions()) != versions:
                wanted, there = (", ".join(map(" ".join, found.items())) for found in (versions, here))
                raise RequestError(
                    f"a worker must have the versions of the sweep, {wanted}, but it has {there}; install the same in "
                    "both"
                )
            _loaded = sweep, load_shared(recipe, grid)
        shared = _loaded[1]
        shared.curves |= curves
        before = shared.evaluations
        entry = evaluate_cell(shared, cell)
        found = {key: shared.curves[key] for key in curve_keys(shared, cell)}
        seconds, shared.base.clock.seconds = shared.base.clock.seconds, {}
        return entry, found, seconds, shared.evaluations - before
