"""Run a pass over the rows, or as many as a memory limit makes necessary for what is large."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..model.modes import threads_for
from ..processes import added_up, mapped, on_main
from ..progress import SILENT, Progress
from ..units.units import PrunableModule

logger = logging.getLogger(__name__)

# Most bytes that a stream holds at once, by default; on a GPU a share of what is free, if that is more.
LIMIT_BYTES = 4 << 30
SHARE_OF_FREE = 0.5

T = TypeVar("T")
Item = TypeVar("Item")
Batch = TypeVar("Batch", bound=Mapping[str, Any])


def run_pass(
    model: nn.Module,
    batches: Sequence[Batch],
    work: Callable[[int, Batch], T],
    sums: Iterable[Tensor] = (),
    *,
    name: str = "",
    progress: Progress = SILENT,
) -> list[T]:
    """Return what `work` returns of the number and the rows of each batch, in order, shown by `name`.

    Several processes share the batches (see `mapped`), and `sums` are what `work` adds to; each process has all results
    and the sums of all.
    """
    with threads_for(model, batches):
        found = mapped(batches, work, name, progress)
    added_up(sums)
    return found


class Stream(ABC, Generic[T]):
    """Pairs of a module and its collected data, in the order in which the model defines their consumers.

    Consecutive modules form groups that fit the limit together; a group has at least one module. Each group takes a
    pass over the data. A group is a stretch of the model, so a backward pass ends at its first layer. If there is one
    group only, it is kept, so all iterations together take one pass. Otherwise every iteration collects group by group
    again; `passes` counts them.

    Several processes share each pass, so all must come to the passes of all streams in the same order.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[PrunableModule],
        sizes: Sequence[int],
        limit_bytes: float | None,
        *,
        what: str,
    ):
        limit = usual_limit(model) if limit_bytes is None else limit_bytes
        places = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
        found = sorted(zip(modules, sizes, strict=True), key=lambda pair: places[pair[0].consumer])
        modules, sizes = [module for module, _ in found], [size for _, size in found]
        self.groups = grouped(modules, sizes, limit)
        self.passes = 0
        self._kept: dict[str, T] | None = None
        largest = max(sizes, default=0)
        if largest > limit:
            name = modules[list(sizes).index(largest)].name
            logger.warning(
                "%s of %s take %.2g GiB, more than the limit of %.2g GiB: going on with one module at a time",
                *(what, name, largest / (1 << 30), limit / (1 << 30)),
            )

    @abstractmethod
    def _collect(self, group: Sequence[PrunableModule]) -> dict[str, T]:
        """Return what one pass over the data collects, by module."""

    def __iter__(self) -> Iterator[tuple[PrunableModule, T]]:
        return self.of(None)

    def of(self, names: Collection[str] | None) -> Iterator[tuple[PrunableModule, T]]:
        """Yield the pairs of some modules, None for all; a group without any of them takes no pass."""
        for group in self.groups:
            wanted = [module for module in group if names is None or module.name in names]
            if not wanted:
                continue
            found = self._kept
            if found is None:
                found = self._collect(group if len(self.groups) == 1 else wanted)
                self.passes += 1
            if len(self.groups) == 1:
                self._kept = found
            for module in wanted:
                # Data that is not kept is freed as soon as the caller is done with the module.
                yield module, found[module.name] if self._kept is not None else found.pop(module.name)


def usual_limit(model: nn.Module) -> float:
    """Return the most bytes that a stream over a model's modules holds at once, unless the user says another number."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return LIMIT_BYTES
    # One number for all processes, which must form the same groups.
    return on_main(lambda: max(LIMIT_BYTES, SHARE_OF_FREE * torch.cuda.mem_get_info(device)[0]))


def grouped(items: Sequence[Item], sizes: Sequence[int], limit_bytes: float) -> tuple[tuple[Item, ...], ...]:
    """Return consecutive items in groups whose sizes add up to no more than the limit, each at least one item."""
    groups: list[list[Item]] = []
    left = 0.0
    for item, size in zip(items, sizes, strict=True):
        if not groups or size > left:
            groups.append([])
            left = limit_bytes
        groups[-1].append(item)
        left -= size
    return tuple(map(tuple, groups))
