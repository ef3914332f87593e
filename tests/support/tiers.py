"""Show what a tier of tests found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def show_table(rows: Sequence[Sequence[str]], *, variable: str) -> None:
    """Print rows in columns, and write them into the file that a variable of the environment names, if it names one."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    print(f"\n{text}")
    if variable in os.environ:
        Path(os.environ[variable]).write_text(text + "\n", encoding="utf-8")
