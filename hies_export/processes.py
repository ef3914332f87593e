"""Share the work of a run among the processes that torchrun, accelerate or Slurm started, by torch.distributed.

Every process runs the same program on its own copy of the model. `mapped` shares out the items of a loop, `added_up`
adds up what the processes have summed, and `on_main` runs work that only one process may do. Handling a failed or lost
process is left to the launcher: the others fail at their next exchange.

Outside of `together`, and inside of `on_main`, there is one process, and all of these are plain function calls.
"""

from __future__ import annotations

import io
import logging
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
Found = TypeVar("Found")

logger = logging.getLogger(__name__)

# One process may export and measure for hours while the others wait.
LONGEST_WAIT = timedelta(days=7)
# Seconds in which the first process prints the common error, and the launcher ends the others.
HEAD_START = 5.0
# Variables that a process needs in its environment.
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class _Group:
    """The processes, the device that they exchange tensors on, and whether this one works while the others wait."""

    group: Any
    rank: int
    world: int
    device: torch.device
    alone: bool = False


# The processes, inside of `together`.
_group: _Group | None = None


def _number(variable: str) -> int:
    given = os.environ.get(variable, "1")
    return int(given) if given.isdecimal() else 1


def refuse_several(what: str) -> None:
    """Refuse to run as one of several processes of a launcher."""
    if (count := _number("WORLD_SIZE")) > 1:
        raise RequestError(f"{what} runs in one process, and the launcher started {count}; start it without one")


def is_first() -> bool:
    """Return whether this process prints and writes, also before `together` and after it."""
    return _number("WORLD_SIZE") == 1 or os.environ.get("RANK", "0") == "0"


def world() -> int:
    """Return the number of processes that share the work."""
    return 1 if _group is None or _group.alone else _group.world


def mapped(
    items: Iterable[T], work: Callable[[int, T], Found], name: str = "", progress: Progress = SILENT
) -> list[Found]:
    """Return `work(number, item)` of all items, in order.

    Several processes share the items, and each gets all results, with tensors on the CPU. A single process gets its
    results as they are. Every process iterates over all of `items`, so the iteration may itself be shared work. With a
    `name`, the loop is shown under it, and all items are taken before it starts.
    """
    own = ((number, item) for number, item in enumerate(items) if is_own(number))
    done = [work(number, item) for number, item in (progress.track([*own], name) if name else own)]
    if world() == 1:
        return done
    parts = [_sent(done, source) for source in range(world())]
    following = [iter(part) for part in parts]
    return [next(following[_turn(number)]) for number in range(sum(map(len, parts)))]


def is_own(number: int) -> bool:
    """Return whether this process works on the item of a number in `mapped`."""
    return _turn(number) == _rank()


def _turn(number: int) -> int:
    """Return which process an item is for: in turn, to and fro, because large items often follow small ones."""
    place = number % (2 * world())
    return min(place, 2 * world() - 1 - place)


def added_up(tensors: Iterable[Tensor]) -> None:
    """Add up the tensors of all processes, in place, to the same bits in each."""
    if world() == 1:
        return
    with _exchange() as (dist, ours):
        for tensor in tensors:
            moved = tensor.to(ours.device).contiguous()
            # `all_reduce` may round differently in each process, but all processes choose by these numbers.
            dist.reduce(moved, dst=0, group=ours.group)
            dist.broadcast(moved, src=0, group=ours.group)
            tensor.copy_(moved)


def on_main(function: Callable[[], T]) -> T:
    """Call a function in the first process only, and return its result in all of them; the others wait."""
    if world() == 1:
        return function()
    assert _group is not None
    value: Any = None
    if _rank() == 0:
        _group.alone = True
        try:
            value = function()
        finally:
            _group.alone = False
    return _sent(value, 0)


def _rank() -> int:
    return 0 if _group is None else _group.rank


class _Pickler(pickle.Pickler):
    """Pickles tensors of any device so that they arrive on the CPU: another process may not see that device."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _sent(value: T, source: int) -> T:
    import torch

    buffer = io.BytesIO()
    if mine := _rank() == source:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    with _exchange() as (dist, ours):
        size = torch.tensor(buffer.tell())
        dist.broadcast(size, src=source, group=ours.group)
        # Not by `broadcast_object_list`, which copies it several times: the effects of a pass are large.
        if mine:
            sent = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        else:
            sent = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(sent, src=source, group=ours.group)
    found: T = pickle.loads(sent.numpy().data)
    return found


@contextmanager
def _exchange() -> Iterator[tuple[Any, _Group]]:
    """Yield torch.distributed and the group; a lost connection becomes a one-sentence error."""
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
    """Join the processes that the environment names, if it names several and this is the outermost such block."""
    global _group
    if _group is not None or _number("WORLD_SIZE") == 1:
        if _group is None:
            _warn_of_one()
        yield
        return
    import torch.distributed as dist

    # The calling program may have joined the processes before, as with an Accelerator, and leave them later.
    met = dist.is_available() and dist.is_initialized()
    _group = _join()
    try:
        yield
    finally:
        _group = None
    # After a failure the connections stay until this process ends, so that it prints its error before the others
    # notice.
    if not met:
        dist.destroy_process_group()


def _warn_of_one() -> None:
    """Warn if a launcher was asked for several processes, but this one does all of the work."""
    if _number("SLURM_STEP_NUM_TASKS") > 1:
        logger.warning("srun started several processes, but without WORLD_SIZE each of them does all of the work")
    # accelerate sets the port only if several processes are wanted, and the world size only if it starts them.
    elif {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        logger.warning(
            "accelerate launch was asked for several processes and started one, as it does without several GPUs; start "
            "them by torchrun, or add --multi_gpu, which starts them on CPUs too"
        )


def _join() -> _Group:
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
