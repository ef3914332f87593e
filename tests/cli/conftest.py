"""A command that does what a test says, run by the real `main`."""

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from hies_export.cli.main import main
from hies_export.progress import Progress


class Said(NamedTuple):
    """What a command ended with and printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run a function as a command."""

    def run_command(function: Callable[[Console, Progress], Any], *, json: bool = False, verbose: bool = False) -> Said:
        def run(options: argparse.Namespace, console: Console, progress: Progress) -> Any:
            return function(console, progress)

        parser = argparse.ArgumentParser()
        parser.set_defaults(command=SimpleNamespace(run=run), json=json, verbose=verbose)
        return Said(main([], parser=parser), *capsys.readouterr())

    return run_command
