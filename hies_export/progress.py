"""What a run tells about itself while it works; the command line shows it, a library user may ignore it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Told about stages and loops."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def track(self, items: Sequence[T], name: str) -> Iterable[T]:
        """Wrap a loop, e.g. in a progress bar."""


class Silent:
    """Progress that says nothing."""

    def stage(self, name: str) -> None:
        """Say nothing."""

    def track(self, items: Sequence[T], name: str) -> Iterable[T]:
        """Iterate, and say nothing."""
        return items
