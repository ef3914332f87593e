"""Share the work of a run among the processes that torchrun, accelerate or Slurm started, by torch.distributed.

Every process runs the same program on its own copy of the model. `mapped` shares out the items of a loop, `added_up`
adds up what the processes have summed, and `on_main` runs work that only one process may do. Outside of `together`, and
inside of `on_main`, these are plain function calls in one process. If a process fails or is lost, the others fail at
their next exchange; the rest is left to the launcher.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import RequestError, StepError, memory_failure
from .progress import SILENT, Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
Result = TypeVar("Result")

# One process may export and measure for hours while the others wait.
LONGEST_WAIT = timedelta(days=7)
# Seconds in which the first process prints the common error, and the launcher ends the others.
HEAD_START = 5.0
# Environment variables that a process needs.
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class _Group:
    """The joined processes."""

    group: Any  # of torch.distributed
    rank: int  # of this process
    world: int  # how many processes there are
    device: torch.device  # that tensors are exchanged on
    alone: bool = False  # whether this process works while the others wait


_group: _Group | None = None  # outside of `together`


def _number(variable: str) -> int:
    """Return the whole number that an environment variable holds; 1 if it is unset or holds something else."""
    given = os.environ.get(variable, "1")
    return int(given) if given.isdecimal() else 1


def refuse_several(what: str) -> None:
    """Raise a RequestError if a launcher started several processes; `what` names the command."""
    if (count := _number("WORLD_SIZE")) > 1:
        raise RequestError(f"{what} runs in one process, and the launcher started {count}; start it without one")


def is_first() -> bool:
    """Return whether this process prints and writes, also before `together` and after it."""
    return _number("WORLD_SIZE") == 1 or os.environ.get("RANK", "0") == "0"


def world() -> int:
    """Return the number of processes that share the work; 1 outside of `together` and inside of `on_main`."""
    return 1 if _group is None or _group.alone else _group.world


def mapped(
    items: Iterable[T], work: Callable[[int, T], Result], name: str = "", progress: Progress = SILENT
) -> list[Result]:
    """Return `work(number, item)` for all items, in order.

    Several processes share the work, and each gets all results, with tensors on the CPU; a single process gets its
    results as they are. Every process iterates over all of `items`, so the iteration may itself be shared work. With a
    `name`, progress is shown under it, and all items are taken before the first is worked on.
    """
    numbered: Iterable[tuple[int, T]] = ((number, item) for number, item in enumerate(items) if is_own(number))
    if name:
        numbered = progress.track([*numbered], name)
    results = [work(number, item) for number, item in numbered]
    if world() == 1:
        return results
    by_rank = [_broadcast(results, rank) for rank in range(world())]
    # Each process has its results in the order of their items, so the next one of an item's worker is the item's.
    remaining = [iter(of_rank) for of_rank in by_rank]
    return [next(remaining[_worker(number)]) for number in range(sum(map(len, by_rank)))]


def is_own(number: int) -> bool:
    """Return whether this process works on item `number` of `mapped`."""
    return _worker(number) == _rank()


def _worker(number: int) -> int:
    """Return the rank of the process that works on an item, for two processes 0, 1, 1, 0, 0, 1, ..."""
    position = number % (2 * world())  # up the ranks and down again, so items of growing size are shared evenly
    return min(position, 2 * world() - 1 - position)


def added_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor, in place, by its sum over all processes, with the same bits in each process."""
    if world() == 1:
        return
    with _exchange() as (dist, joined):
        for tensor in tensors:
            total = tensor.to(joined.device).contiguous()
            # Not by `all_reduce`, which may round differently in each process: all must choose by the same numbers.
            dist.reduce(total, dst=0, group=joined.group)
            dist.broadcast(total, src=0, group=joined.group)
            tensor.copy_(total)


def on_main(function: Callable[[], T]) -> T:
    """Call a function in the first process only, and return its result in all of them; the others wait."""
    if world() == 1:
        return function()
    assert _group is not None
    value: Any = None
    if _group.rank == 0:
        _group.alone = True
        try:
            value = function()
        finally:
            _group.alone = False
    return _broadcast(value, 0)


def _rank() -> int:
    """Return the rank of this process; 0 outside of `together`."""
    return 0 if _group is None else _group.rank


def _broadcast(value: T, source: int) -> T:
    """Return, in all processes, the value of the process of rank `source`; that of the others is not read.

    It is pickled. Tensors arrive on the CPU: another process may not see their device. Not by `broadcast_object_list`,
    which copies the value several times: the effects of a pass are large.
    """
    import torch

    is_source = _rank() == source
    buffer = io.BytesIO()
    if is_source:
        torch.save(value, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    with _exchange() as (dist, joined):
        size = torch.tensor(buffer.tell())  # in bytes; of the source, in all processes after the next line
        dist.broadcast(size, src=source, group=joined.group)
        if not is_source:
            buffer = io.BytesIO(bytes(int(size)))
        dist.broadcast(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), src=source, group=joined.group)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=False)


@contextmanager
def _exchange() -> Iterator[tuple[Any, _Group]]:
    """Yield torch.distributed and the joined processes; raise a StepError if the connection to one is lost."""
    import torch.distributed as dist

    assert _group is not None
    try:
        yield dist, _group
    except RuntimeError as error:
        if memory_failure(error) is not None:
            raise
        raise StepError(
            "another process failed or is gone (killed, or out of memory); see what it or its launcher says, and "
            "start all again"
        ) from error


@contextmanager
def together() -> Iterator[None]:
    """Share work with the processes that the environment names while the block runs; a nested block changes nothing."""
    global _group
    if _group is not None or _number("WORLD_SIZE") == 1:
        yield
        return
    import torch.distributed as dist

    # The calling program, such as one with an Accelerator, may have joined the processes, and then leaves them itself.
    already_joined = dist.is_available() and dist.is_initialized()
    _group = _join()
    try:
        yield
    finally:
        _group = None
    # After a failure the connections stay until this process ends, so that it prints its error before others notice.
    if not already_joined:
        dist.destroy_process_group()


def _join() -> _Group:
    """Meet the other processes, on a GPU for each if there are GPUs; a RequestError says what is missing for that."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise RequestError("several processes (WORLD_SIZE) need a torch that was built with torch.distributed")
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise RequestError(
            f"one process of several needs {', '.join(VARIABLES)} in its environment, but it lacks "
            f"{', '.join(missing)}; start it by torchrun or accelerate launch, or set them"
        )
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        if _number("LOCAL_WORLD_SIZE") > torch.cuda.device_count():
            raise RequestError(
                f"every process must have a GPU of its own, but there are {os.environ['LOCAL_WORLD_SIZE']} processes "
                f"and {torch.cuda.device_count()} GPUs; start fewer processes"
            )
        # Objects go by gloo, so that waiting takes no GPU.
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=LONGEST_WAIT)
    group = dist.new_group(backend=backend, timeout=LONGEST_WAIT)
    # A process that fails at once takes the store away, which the others need until they have met; so wait for them.
    dist.all_reduce(torch.zeros(1), group=group)
    return _Group(group, dist.get_rank(), dist.get_world_size(), device)
