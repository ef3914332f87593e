"""Commands run by the real `main`: those that there are, and one that does what a test says."""

import argparse
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from hies_export.cli.arguments import Options
from hies_export.cli.main import main
from hies_export.progress import Progress


class Said(NamedTuple):
    """What a command ended with and printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, Any]]:
    """Run a command; return its exit code, what it printed on standard error as one line, and the result of --json."""

    def run(*command: object) -> tuple[int, str, Any]:
        capsys.readouterr()
        try:
            code = main([str(word) for word in command])
        except SystemExit as refused:
            code = int(str(refused.code))
        out, err = capsys.readouterr()
        result = json.loads(out.splitlines()[-1]) if code == 0 and "--json" in command else {}
        return code, " ".join(err.split()), result

    return run


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run a function as a command."""

    def run_command(function: Callable[[Console, Progress], Any], *, json: bool = False, verbose: bool = False) -> Said:
        def run(options: Options) -> Any:
            return function(options.console, options.progress)

        parser = argparse.ArgumentParser()
        parser.set_defaults(command=SimpleNamespace(run=run), json=json, verbose=verbose)
        return Said(main([], parser=parser), *capsys.readouterr())

    return run_command
