"""Standard error: stages, our warnings and log records. Standard output: results, and last the line of `--json`."""

import io
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

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


def test_a_message_is_printed_once(run_command: Callable[..., Any]) -> None:
    def warn_often(*_: object) -> None:
        for _ in range(1153):
            logging.getLogger("hies_export.somewhere").warning("a metric is undefined")
        logging.getLogger("hies_export.somewhere").warning("something else")

    assert run_command(warn_often).err.splitlines() == ["warning: a metric is undefined", "warning: something else"]


@pytest.mark.parametrize("verbose", [False, True])
def test_only_without_verbose_libraries_are_silenced(
    verbose: bool, run_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read variables when they are imported, which is after that."""
    names = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
    for name in names:
        monkeypatch.setenv(name, "before")
    assert run_command(lambda console, progress: None, verbose=verbose).code == 0
    assert [os.environ[name] for name in names] == (["before"] * 3 if verbose else ["error", "1", "1"])


@pytest.mark.usefixtures("now")
def test_names_of_stages_are_text(run_command: Callable[..., Any]) -> None:
    def run(console: Console, progress: TerminalProgress) -> None:
        progress.stage("[red]benchmark[/] :smile: [/]")
        assert list(progress.track([1], "[/]")) == [1]
        console.print("[red]benchmark[/] :smile: [/]")

    assert run_command(run) == (0, "[red]benchmark[/] :smile: [/]\n", "0:00 · [red]benchmark[/] :smile: [/]\n")


def test_a_terminal_shows_a_bar_and_lines_above_it() -> None:
    file = io.StringIO()
    progress = TerminalProgress(Console(file=file, force_terminal=True, width=80))
    for item in progress.track([1, 2, 3], "score heads"):
        time.sleep(0.11)
        if item == 3:
            progress.stage("[red]later")
    shown = file.getvalue()
    assert "score heads:  33%" in shown
    before, after = shown.split("0:00 ·")[0], shown.split("[red]later")[1]
    # The bar is cleared before the line, and shown again below it.
    assert before.removesuffix("\x1b[2m").endswith(" \r")
    assert "score heads:  67%" in after
    assert shown.endswith(" \r")


def test_a_log_says_now_and_then_how_far_a_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    progress = TerminalProgress(Console(file=file, width=80))
    assert list(progress.track(range(3), "score [units]")) == [0, 1, 2]
    assert file.getvalue() == ""
    monkeypatch.setattr(terminal, "EVERY", 0.05)
    for _ in progress.track(range(10), "score [units]"):
        time.sleep(0.02)
    shown = file.getvalue()
    assert 1 <= shown.count("score [units]:") <= 4
    assert "/10 [00:00<" in shown


def test_the_result_is_the_last_line_and_only_when_asked_for(run_command: Callable[..., Any]) -> None:
    def run(console: Console, progress: TerminalProgress) -> dict[str, Any]:
        progress.stage("load")
        console.print("a table")
        return {"heads": 3, "text": "two\nlines"}

    assert run_command(run)[:2] == (0, "a table\n")
    table, result = run_command(run, json=True).out.splitlines()
    assert (table, json.loads(result)) == ("a table", {"heads": 3, "text": "two\nlines"})
