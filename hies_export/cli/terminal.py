"""Progress, warnings and log records on a terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

if TYPE_CHECKING:
    from ..select.plan import PruningPlan

T = TypeVar("T")

# Seconds between two lines of a loop, if there is no bar.
EVERY = 30.0
# Seconds without any line after which one says that a stage still runs.
SILENCE = 60.0
# Characters of a warning that is counted.
_SHORT = 100
# Advice for callers in Python -> the same on the command line.
_FLAGS = {
    "plan.kept (to apply_plan: force=True)": "--force",
    "overwrite=True": "--overwrite",
    "license=": "--license",
    "base_model=": "--base-model",
    "refit=None": "--no-refit",
    "refit=": "--refit",
    "anew with compensate": "anew in Python, by prune(model, batches, plan=PLAN, compensation=...)",
}


class TerminalProgress:
    """Progress on a terminal: a line per stage with the time since the start, and a bar for a loop while it runs.

    If the output is not a terminal but, say, a log, a loop prints a line every `EVERY` seconds instead of the bar.
    """

    def __init__(self, console: Console):
        self.console, self._started = console, time.monotonic()
        # The stage that runs, when it began, and when something was last shown.
        self._stage, self._began, self._shown = "", self._started, self._started

    def stage(self, name: str) -> None:
        """Print the time since the start, and the stage's name."""
        from rich.text import Text

        self._stage, self._began = name, time.monotonic()
        so_far = minutes(self._began - self._started)
        self._print(Text.assemble((f"{so_far} ·", "dim"), f" {name}"))

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Print, while the block runs, a line after every `SILENCE` seconds in which nothing else was shown."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(max(0.0, self._shown + SILENCE - time.monotonic())):
                now = time.monotonic()
                if now < self._shown + SILENCE:  # something was shown meanwhile
                    continue
                self._shown = now
                if self._stage:
                    self._print(f"  {self._stage}: {minutes(now - self._began)} so far", style="dim")

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()

    def _print(self, text: Any, **style: Any) -> None:
        self._shown = time.monotonic()
        self.console.print(text, markup=False, soft_wrap=True, **style)

    def track(self, items: Sequence[T], name: str) -> Iterable[T]:
        """Return the items of a loop, showing how many are done, the time so far and an estimate of the time left."""
        return self._bar(items, name) if self.console.is_terminal else self._lines(items, name)

    def _bar(self, items: Sequence[T], name: str) -> Iterator[T]:
        from rich import progress
        from rich.markup import escape

        columns = (
            progress.TextColumn(f"  {escape(name)}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=self.console, transient=True) as bar:
            for item in bar.track(items, description=name):
                self._shown = time.monotonic()
                yield item

    def _lines(self, items: Sequence[T], name: str) -> Iterator[T]:
        started = last = time.monotonic()
        for done, item in enumerate(items):
            now = time.monotonic()
            if done and now - last >= EVERY:
                last, so_far = now, now - started
                left = so_far / done * (len(items) - done)
                text = f"  {name}: {done:,} of {len(items):,}, {minutes(so_far)} so far, about {minutes(left)} left"
                self._print(text, style="dim")
            yield item


def minutes(seconds: float) -> str:
    """Return a time such as "1:05", or with hours "2:01:05"."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def in_flags(message: str) -> str:
    """Return a message of the package with command-line flags in place of Python parameters."""
    for parameter, flag in _FLAGS.items():
        message = message.replace(parameter, flag)
    return message


@contextlib.contextmanager
def show_messages(console: Console, *, verbose: bool) -> Iterator[None]:
    """Print this package's warnings and log records as single lines while the block runs, each text once.

    The libraries say nothing unless `verbose`.
    """

    def show(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if verbose or category.__module__.startswith("hies_export"):
            messages.say(f"warning: {message}")

    messages = _Messages(console)
    logger = logging.getLogger("hies_export")
    logger.addHandler(messages)
    with warnings.catch_warnings():
        warnings.showwarning = show
        if not verbose:
            _silence_libraries()
        try:
            yield
        finally:
            logger.removeHandler(messages)
            messages.count_repeats()


def _silence_libraries() -> None:
    """Turn off log records and progress bars of transformers, datasets and the Hub's client.

    They are not imported for that, which takes seconds: they read these variables when they are imported.
    """
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    if "datasets" in sys.modules:
        import datasets

        datasets.disable_progress_bars()


class _Messages(logging.Handler):
    """Prints log records and other texts, each once, and counts how often each came."""

    def __init__(self, console: Console):
        super().__init__(logging.WARNING)
        self._console = console
        self._times: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"{record.levelname.lower()}: {record.getMessage()}")

    def say(self, text: str) -> None:
        """Print a text, unless it was printed before."""
        text = in_flags(text)
        self._times[text] += 1
        if self._times[text] == 1:
            self._print(text)

    def count_repeats(self) -> None:
        """Print how often each text came, if more than once."""
        for text, times in self._times.items():
            if times > 1:
                self._print(f"{text if len(text) <= _SHORT else text[:_SHORT] + '...'} ({times:,} times in all)")

    def _print(self, text: str) -> None:
        self._console.print(text, style="yellow", soft_wrap=True)


def print_plan(plan: PruningPlan, console: Console) -> None:
    """Print which heads, and how many neurons, of every module the plan keeps."""
    from ..report.tables import map_text, plan_maps

    for index, units in enumerate(plan_maps(plan)):
        if index:
            console.print()
        console.print(map_text(units, console.width))


def plan_text(plan: PruningPlan) -> str:
    """Return how much a plan removes, such as "20 of 72 heads and 4,300 of 9,216 neurons removed"."""
    from ..report.report import plan_counts
    from ..report.words import removed_text

    return removed_text(*plan_counts(plan))


def plan_totals(plan: PruningPlan) -> dict[str, dict[str, int]]:
    """Return for --json how many heads, and neurons if the plan covers them, there were and how many go."""
    totals = {"heads": {"total": plan.heads, "removed": plan.removed}}
    if plan.neurons:
        totals["neurons"] = {"total": plan.neurons, "removed": plan.removed_neurons}
    return totals


def print_json(result: Mapping[str, Any]) -> None:
    """Print a result as one line on standard output, after everything that was printed there."""
    sys.stdout.flush()
    print(json.dumps(result))
