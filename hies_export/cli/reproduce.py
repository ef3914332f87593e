"""Repeat a run from its report, and compare plan, scores, metrics and sizes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from ..progress import Progress
from .arguments import a_path, add_output


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run's folder and the new one."""
    parser.add_argument("folder", metavar="RUN", type=a_path, help="folder of a run or quickstart")
    add_output(parser, help="folder to write (default: RUN-again)")


def run(options: Namespace, console: Console, progress: Progress) -> None:
    """Repeat the run, print the comparison, and fail if a result differs."""
    from ..pipeline.reproduce import Compared, reproduce
    from ..report.terminal import PlainTable

    folder = options.folder.absolute()
    found = reproduce(
        options.folder,
        options.output or folder.with_name(f"{folder.name}-again"),
        overwrite=options.overwrite,
        command=options.command_line,
        progress=progress,
    )

    def cells(row: Compared) -> tuple[str, ...]:
        numbers = ("" if number is None else f"{number:.2g}" for number in (row.difference, row.allowed))
        verdict = "shown only" if row.allowed is None else "yes" if row.holds else "NO"
        return (row.name, row.recorded, row.again, *numbers, verdict)

    console.print(PlainTable(("", "recorded", "again", "difference", "allowed", "holds"), [*map(cells, found.rows)]))
    where = "the same machine and versions: units must be equal, and numbers to rounding"
    if not found.same_machine:
        where = "another machine or other versions: small differences are allowed"
    console.print(f"\n{where}; written to {found.output}", soft_wrap=True)
    found.check()
