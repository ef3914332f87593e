"""Open the executor that a command line names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager

from ...errors import RequestError, StepError, first_line, quoted, require_package
from ...progress import SILENT, Progress

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
