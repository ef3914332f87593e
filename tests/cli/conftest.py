"""A command that does what a test says, run by the real `main`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hies_export.cli.main import main
from hies_export.progress import Progress

Run = Callable[[Console, Progress], Any]


@pytest.fixture
def run_command() -> Callable[..., int]:
    """Run a function as a command and return the exit code."""

    def run_command(function: Run, *, json: bool = False, verbose: bool = False) -> int:
        def run(options: argparse.Namespace, console: Console, progress: Progress) -> Any:
            return function(console, progress)

        parser = argparse.ArgumentParser()
        parser.set_defaults(command=SimpleNamespace(run=run), json=json, verbose=verbose)
        return main([], parser=parser)

    return run_command
