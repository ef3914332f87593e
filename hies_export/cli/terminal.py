"""Progress, warnings and log records on a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

if TYPE_CHECKING:
    from ..select.plan import PruningPlan

T = TypeVar("T")

# Seconds between two bars of a loop in a log.
EVERY = 30.0


class TerminalProgress:
    """Progress on a terminal: a line per stage with the time since the start, and a bar for a loop while it runs.

    If the output is not a terminal but, say, a log, the bar is printed anew every `EVERY` seconds.
    """

    def __init__(self, console: Console):
        self.console, self._started = console, time.monotonic()

    def stage(self, name: str) -> None:
        """Print the time since the start and the stage's name."""
        from rich.text import Text

        passed = minutes(time.monotonic() - self._started)
        print_above_bars(self.console, Text.assemble((f"{passed} ·", "dim"), f" {name}"))

    def track(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Yield the items of a loop, showing how many are done, the time so far and an estimate of the time left."""
        from tqdm import tqdm

        seconds = 0.1 if self.console.is_terminal else EVERY
        timing: dict[str, Any] = {"mininterval": seconds, "maxinterval": seconds, "delay": seconds}
        yield from tqdm(items, f"  {name}", file=self.console.file, leave=False, **timing)


def print_above_bars(console: Console, text: Any, **style: Any) -> None:
    """Print a line, which is text and no markup, above the bars of loops that run."""
    from tqdm import tqdm

    # In a file or a pipe, no bar can be cleared.
    with tqdm.external_write_mode(file=console.file) if console.is_terminal else contextlib.nullcontext():
        console.print(text, markup=False, soft_wrap=True, **style)


def minutes(seconds: float) -> str:
    """Return a time such as "1:05", or with hours "2:01:05"."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


@contextlib.contextmanager
def show_messages(console: Console, *, verbose: bool) -> Iterator[None]:
    """Print this package's warnings and log records as lines, each once, in the block; the libraries' if `verbose`."""

    def show(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if verbose or category.__module__.startswith("hies_export"):
            messages.say(f"warning: {message}")

    messages = _Messages(console)
    logger = logging.getLogger("hies_export")
    logger.addHandler(messages)
    with warnings.catch_warnings():
        warnings.showwarning = show
        if not verbose:
            # Libraries read these when they are imported, which takes seconds.
            os.environ["TRANSFORMERS_VERBOSITY"] = "error"
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        try:
            yield
        finally:
            logger.removeHandler(messages)


class _Messages(logging.Handler):
    """Prints log records and other texts, each once."""

    def __init__(self, console: Console):
        super().__init__(logging.WARNING)
        self._console = console
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record, unless the same text was printed before."""
        self.say(f"{record.levelname.lower()}: {record.getMessage()}")

    def say(self, text: str) -> None:
        """Print a text, unless it was printed before."""
        if text not in self._said:
            self._said.add(text)
            print_above_bars(self._console, text, style="yellow")


def print_plan(plan: PruningPlan, console: Console) -> None:
    """Print which heads, and how many neurons, of every module the plan keeps."""
    from ..report.tables import plan_maps, print_maps

    print_maps(plan_maps(plan), console)


def plan_text(plan: PruningPlan) -> str:
    """Return how much a plan removes, such as "20 of 72 heads and 4,300 of 9,216 neurons removed"."""
    from ..report.report import plan_counts
    from ..report.words import removed_text

    return removed_text(plan_counts(plan))


def plan_totals(plan: PruningPlan) -> dict[str, dict[str, int]]:
    """Return for --json how many heads, and neurons if the plan covers them, there were and how many go."""
    from ..report.report import plan_counts

    return {units: {"total": count.total, "removed": count.removed} for units, count in plan_counts(plan).items()}
