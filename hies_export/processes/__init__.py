"""Share the work of a run among the processes that accelerate, torchrun or Slurm started.

Every process runs the same program on a model of its own. `share` splits batches. `to_owners` brings what each batch
gives to the process that owns its module, in the order of the batches, so that sums are those of a single process to
the last bit. `gather` and `broadcast` give everyone what one of them has. `on_main` is for what only one may do.

Outside of `together`, and inside of `on_main`, there is one process, and all of this is plain function calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from .group import Group, Piece, asked, own_devices

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Piece",
    "agree",
    "asked",
    "broadcast",
    "gather",
    "is_first",
    "merged",
    "on_main",
    "own_devices",
    "owners",
    "rank",
    "share",
    "to_owners",
    "together",
    "world",
]

T = TypeVar("T")

# The processes, inside of `together`.
_group: Group | None = None


def world() -> int:
    """Return the number of processes that share the work."""
    return 1 if _group is None or _group.alone else _group.world


def rank() -> int:
    """Return the number of this process, from 0."""
    return 0 if _group is None else _group.rank


def is_first() -> bool:
    """Return whether this process prints, also before `together` and after it."""
    return asked() == 1 or os.environ.get("RANK", "0") == "0"


def share(items: Sequence[T]) -> list[tuple[int, T]]:
    """Return this process's part of a list, each item with its number in the list."""
    return list(enumerate(items))[rank() :: world()]


def owners(sizes: Mapping[str, float]) -> dict[str, int]:
    """Return which process owns each module: in their order, the one that has least so far.

    Args:
        sizes: Module -> how much memory or work it takes.
    """
    load = [0.0] * world()
    found = {}
    for name, size in sizes.items():
        found[name] = load.index(min(load))
        load[found[name]] += size
    return found


def to_owners(batches: Iterable[Iterable[Piece]]) -> Iterator[Piece]:
    """Yield what all batches add to the sums that this process owns, in the order of the batches.

    Args:
        batches: The pieces of each of this process's batches, in the order of `share`.
    """
    if world() == 1:
        yield from chain.from_iterable(batches)
        return
    assert _group is not None
    remaining = iter(batches)
    while True:
        pieces_of_batch = next(remaining, None)
        found = _group.exchange(None if pieces_of_batch is None else list(pieces_of_batch))
        if found is None:
            return
        yield from found
        del found  # before the next batch takes its memory


def gather(value: T) -> list[T]:
    """Return the value of every process, in their order; it is pickled, and tensors come to the same kind of device."""
    if world() == 1:
        return [value]
    assert _group is not None
    return _group.gather(value)


def merged(values: Mapping[str, T]) -> dict[str, T]:
    """Return what all processes have by name, one after the other."""
    return {name: value for part in gather(values) for name, value in part.items()}


def broadcast(tensor: Tensor, owner: int) -> None:
    """Overwrite a tensor with the one that its owner has, of the same shape and dtype."""
    if world() > 1:
        assert _group is not None
        _group.broadcast(tensor, owner)


def on_main(function: Callable[[], T]) -> T:
    """Call a function in the first process only, and return its result in all of them; the others wait."""
    if world() == 1:
        return function()
    assert _group is not None
    if rank() > 0:
        return _group.gather(None)[0]
    _group.alone = True
    try:
        value = function()
    finally:
        _group.alone = False
    return _group.gather(value)[0]


def agree() -> None:
    """Wait until all processes are here.

    Raises:
        HiesError: One of them has failed or is gone.
    """
    if world() > 1:
        assert _group is not None
        _group.meet()


@contextmanager
def together() -> Iterator[None]:
    """Join the processes that the environment names, for the length of the block; they leave it together.

    A process that fails tells the others, which then fail at their next exchange with what it said. Without a
    WORLD_SIZE above one in the environment, or inside another such block, nothing is done.

    Raises:
        MissingRuntimeError: There are several processes, and accelerate is not installed.
        RequestError: The environment does not say how to meet, or there are fewer GPUs than processes.
        HiesError: Another process failed.
    """
    global _group
    if _group is not None or asked() == 1:
        yield
        return
    group = _group = Group.join()
    try:
        yield
        group.meet()
    except BaseException as error:
        group.tell(error)
        raise
    finally:
        _group = None
        group.leave()
