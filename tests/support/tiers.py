"""Run what a tier of tests runs in an environment of its own, and show what it found."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest


def run_in(python: Path, script: str, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
    """Run a script of this folder by another interpreter, and fail with what it printed if it fails."""
    command = [str(python), str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def table_of(variable: str, *columns: str) -> Any:
    """Return a fixture for a file of tests: a list of rows, printed at the end, and written where a variable says."""

    @pytest.fixture(scope="module")
    def table() -> Iterator[list[tuple[str, ...]]]:
        rows: list[tuple[str, ...]] = [columns]
        yield rows
        widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
        text = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
        print(f"\n{text}")
        if variable in os.environ:
            Path(os.environ[variable]).write_text(text + "\n", encoding="utf-8")

    return table
