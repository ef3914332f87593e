"""Report progress, and silence libraries that print while they work."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """What a long function reports its stages and loops to, as in `for batch in progress.track(batches, "score")`."""

    def stage(self, name: str) -> None:
        """Report that a stage begins."""

    def track(self, items: Sequence[T], name: str) -> Iterable[T]:
        """Return the items of a loop in order, and report each, e.g. on a bar."""
        return items


class Silent(Progress):
    """Progress that shows nothing."""

    def stage(self, name: str) -> None:
        """Do nothing."""


SILENT: Progress = Silent()


class Clock:
    """Stopwatch by kind of work. Time in a nested block counts for the nested block only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # by name of the work

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block, without that of nested blocks, to `seconds[name]`."""
        started, recorded = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            nested = sum(self.seconds.values()) - recorded  # what nested blocks have added meanwhile
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started - nested


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """Keep transformers from showing progress bars and reports of loading and saving while the block runs."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet(*, verbose: bool = False) -> Iterator[None]:
    """Discard warnings, log records and prints, of all threads, while the block runs, unless `verbose`."""
    if verbose:
        yield
        return
    disabled_level = logging.root.manager.disable  # logging has no public function that reads it
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
            logging.disable(disabled_level)
