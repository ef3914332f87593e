"""Report progress, and silence libraries that print while they work."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# Wraps the items of a loop, e.g. in a progress bar.
Track = Callable[[Sequence[Any]], Iterable[Any]]


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


@contextlib.contextmanager
def quiet(*, verbose: bool = False) -> Iterator[None]:
    """Swallow warnings, log records and prints inside the block, and put every channel back afterwards.

    Process-wide while it lasts: what other threads print or log in the meantime is swallowed too.

    Args:
        verbose: Let everything through; the block then changes nothing.
    """
    if verbose:
        yield
        return
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
