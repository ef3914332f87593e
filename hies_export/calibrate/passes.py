"""Collect something large for every module, in as many passes over the data as a memory limit makes necessary."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import nn

from .. import processes
from ..units import PrunableModule

logger = logging.getLogger(__name__)

# Most bytes that a stream holds at once, by default; on a GPU a share of what is free, if that is more.
LIMIT_BYTES = 4 << 30
SHARE_OF_FREE = 0.5

T = TypeVar("T")
Item = TypeVar("Item")


class Stream(ABC, Generic[T]):
    """Pairs of a module and its collected data, in the order of the modules.

    Consecutive modules form groups that fit the limit together; a group has at least one module. Each group takes a
    pass over the data. If there is one group only, it is kept, so all iterations together take one pass. Otherwise
    every iteration collects group by group again; `passes` counts them.

    Several processes share each pass (see `processes`): in the end the owner of a module has the data that all of them
    collected for it, and each process iterates over the modules it owns. Modules are assigned to owners by size.
    """

    def __init__(
        self,
        modules: Sequence[PrunableModule],
        sizes: Sequence[int],
        limit_bytes: float,
        *,
        what: str,
        owners: Mapping[str, int] | None = None,
    ):
        by_size = {module.name: size for module, size in zip(modules, sizes, strict=True)}
        self.owners = processes.owners(by_size) if owners is None else owners
        self.groups = grouped(modules, sizes, limit_bytes)
        self.passes = 0
        self._kept: dict[str, T] | None = None
        largest = max(sizes, default=0)
        if largest > limit_bytes:
            name = modules[list(sizes).index(largest)].name
            logger.warning(
                "%s of %s take %.2g GiB, more than the limit of %.2g GiB: going on with one module at a time",
                *(what, name, largest / (1 << 30), limit_bytes / (1 << 30)),
            )

    @abstractmethod
    def _collect(self, group: Sequence[PrunableModule]) -> dict[str, T]:
        """Return what one pass over the data collects, by module that this process owns."""

    def __iter__(self) -> Iterator[tuple[PrunableModule, T]]:
        return self.of(None)

    def of(self, names: Collection[str] | None) -> Iterator[tuple[PrunableModule, T]]:
        """Yield the pairs of some modules, None for all; a group without any of them takes no pass."""
        return ((module, found) for module, found in self.each(names) if found is not None)

    def each(self, names: Collection[str] | None) -> Iterator[tuple[PrunableModule, T | None]]:
        """Yield the pairs of some modules as `of` does, with None for modules that another process owns.

        Two streams that are iterated over side by side must come to their passes in the same order in all processes.
        """
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
                yield module, found.get(module.name) if self._kept is not None else found.pop(module.name, None)


def usual_limit(model: nn.Module) -> float:
    """Return the most bytes that a stream over a model's modules holds at once, unless the user says another number."""
    device = next(model.parameters()).device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return max(LIMIT_BYTES, SHARE_OF_FREE * free)


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
