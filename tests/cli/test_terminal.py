"""Standard error: stages, our warnings and log records. Standard output: results, and last the line of `--json`."""

import io
import json
import logging
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hies_export.cli import terminal
from hies_export.cli.terminal import TerminalProgress


class OurWarning(UserWarning):
    """As if defined in the package."""


OurWarning.__module__ = "hies_export.somewhere"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that stages and loops are told: it passes when a test says so."""
    told = [100.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: told[0]))
    return told


def warn(*_: object) -> None:
    warnings.simplefilter("always")
    warnings.warn("ours [dim]", OurWarning, stacklevel=1)
    warnings.warn("theirs", UserWarning, stacklevel=1)
    logging.getLogger("hies_export.somewhere").warning("a record of [dim] %d", 3)
    logging.getLogger("hies_export.somewhere").info("a detail")


@pytest.mark.parametrize(("verbose", "theirs"), [(False, ""), (True, "warning: theirs\n")])
def test_messages_are_single_lines_ours_alone_without_verbose(
    verbose: bool, theirs: str, run_command: Callable[..., Any]
) -> None:
    said = f"warning: ours [dim]\n{theirs}warning: a record of [dim] 3\n"
    handlers, show = list(logging.getLogger("hies_export").handlers), warnings.showwarning
    assert run_command(warn, verbose=verbose) == (0, "", said)
    assert (logging.getLogger("hies_export").handlers, warnings.showwarning) == (handlers, show)


def test_a_message_is_printed_once_and_counted(run_command: Callable[..., Any]) -> None:
    def warn_often(*_: object) -> None:
        for _ in range(1153):
            logging.getLogger("hies_export.somewhere").warning("a metric is undefined: %s", "x" * 100)
        logging.getLogger("hies_export.somewhere").warning("something else")

    beginning = "warning: a metric is undefined: "
    first, second, last = run_command(warn_often).err.splitlines()
    assert (first, second) == (beginning + "x" * 100, "warning: something else")
    assert last == beginning + "x" * (100 - len(beginning)) + "... (1,153 times in all)"


@pytest.mark.parametrize("verbose", [False, True])
def test_only_without_verbose_transformers_is_silenced(verbose: bool, run_command: Callable[..., Any]) -> None:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    try:
        assert run_command(lambda console, progress: None, verbose=verbose).code == 0
        assert transformers_logging.get_verbosity() == (logging.INFO if verbose else logging.ERROR)
    finally:
        transformers_logging.set_verbosity(before)


@pytest.mark.usefixtures("now")
def test_names_of_stages_are_text(run_command: Callable[..., Any]) -> None:
    def run(console: Console, progress: TerminalProgress) -> None:
        progress.stage("[red]benchmark[/] :smile: [/]")
        assert list(progress.track([1], "[/]")) == [1]
        console.print("[red]benchmark[/] :smile: [/]")

    assert run_command(run) == (0, "[red]benchmark[/] :smile: [/]\n", "0:00 · [red]benchmark[/] :smile: [/]\n")


def test_a_terminal_shows_a_bar() -> None:
    file = io.StringIO()
    progress = TerminalProgress(Console(file=file, force_terminal=True, width=80))
    assert list(progress.track([1, 2, 3], "score heads")) == [1, 2, 3]
    assert "score heads" in file.getvalue()


def test_a_log_says_now_and_then_how_far_a_loop_is(now: list[float]) -> None:
    file = io.StringIO()
    progress = TerminalProgress(Console(file=file, width=80))
    now[0] += 3725
    progress.stage("score")
    for _ in progress.track(range(1000), "score [units]"):
        now[0] += 0.125
    assert file.getvalue().splitlines() == [
        "1:02:05 · score",
        "  score [units]: 240 of 1,000, 0:30 so far, about 1:35 left",
        "  score [units]: 480 of 1,000, 1:00 so far, about 1:05 left",
        "  score [units]: 720 of 1,000, 1:30 so far, about 0:35 left",
        "  score [units]: 960 of 1,000, 2:00 so far, about 0:05 left",
    ]
    assert list(progress.track([], "nothing")) == []


def test_a_stage_that_shows_nothing_for_long_says_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SILENCE", 0.05)
    file = io.StringIO()
    progress = TerminalProgress(Console(file=file, width=80))
    with progress.telling():
        time.sleep(0.2)  # before the first stage there is nothing to tell
        assert file.getvalue() == ""
        progress.stage("export to ONNX")
        while file.getvalue().count("\n") < 3:
            time.sleep(0.01)
    told = file.getvalue()
    assert told.splitlines()[1:3] == ["  export to ONNX: 0:00 so far"] * 2
    time.sleep(0.15)
    assert file.getvalue() == told


def test_the_result_is_the_last_line_and_only_when_asked_for(run_command: Callable[..., Any]) -> None:
    def run(console: Console, progress: TerminalProgress) -> dict[str, Any]:
        progress.stage("load")
        console.print("a table")
        return {"heads": 3, "text": "two\nlines"}

    assert run_command(run)[:2] == (0, "a table\n")
    table, result = run_command(run, json=True).out.splitlines()
    assert (table, json.loads(result)) == ("a table", {"heads": 3, "text": "two\nlines"})
