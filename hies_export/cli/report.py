"""Show a finished run or bench again, and draw its figures."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.folders import refuse_other_file, replace_file
from ..errors import RequestError
from .arguments import Options, refuse_other_than_run


def add_arguments(parser: ArgumentParser) -> None:
    """Add the folder and what to draw."""
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="folder of a run, or file with the output of `bench --json`")
    add("--figures", metavar="DIR", type=Path, help="draw the figures of a run here, as SVG")
    add("--html", metavar="FILE", type=Path, help="write one self-contained page")


def run(options: Options) -> dict[str, Any]:
    """Print a run or bench, write the page and draw the figures that were asked for, and return its values."""
    if not options.folder.is_file() and not (options.folder / "report.json").is_file():
        refuse_other_than_run(options.folder, needs="a report needs the folder of a finished run")
    from ..report.comparison import Bench, print_bench, read_report, render_bench  # after the refusals: takes seconds
    from ..report.figures import draw_report, write_figures
    from ..report.html import is_page, render_html
    from ..report.tables import print_report

    if options.html is not None:
        refuse_other_file(options.html, "a page of hies-export", is_page)
    result = read_report(options.folder)
    if not isinstance(result, Bench):
        print_report(result, options.console)
    elif options.figures is not None:
        raise RequestError(f"figures are drawn for a run, but {options.folder} is the result of a bench; use --html")
    else:
        print_bench(result, options.console)
    if options.html is not None:
        replace_file(options.html, render_bench(result) if isinstance(result, Bench) else render_html(result))
        options.progress.stage(f"written: {options.html}")
    if options.figures is not None and not isinstance(result, Bench):
        files = write_figures(draw_report(result), options.figures)
        options.progress.stage(f"drawn in {options.figures}: {', '.join(file.name for file in files)}")
    return asdict(result) if isinstance(result, Bench) else result.summary()
