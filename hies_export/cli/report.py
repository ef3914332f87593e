"""Show a finished run, sweep or bench again, and draw its figures."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..errors import RequestError
from .arguments import Options, a_path
from .paths import refuse_other_than

# The values for --json, the page, and what draws the figures.
Shown = tuple[dict[str, Any], str, Callable[[], dict[str, str]]]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the folder and what to draw."""
    add = parser.add_argument
    folder = "folder of a run or sweep, or file with the output of `bench --json`"
    add("folder", metavar="DIR", type=a_path, help=folder)
    add("--figures", metavar="DIR", type=a_path, help="draw the figures of a run here, as SVG")
    page = "write one self-contained page (default for a sweep: its sweep.html)"
    add("--html", metavar="FILE", type=a_path, help=page)


def run(options: Options) -> dict[str, Any]:
    """Print what was found, write the page and draw the figures that were asked for, and return the values."""
    from ..checkpoint.folders import Contents, contents, refuse_other_file, replace_file
    from ..report.figures import write_figures
    from ..report.html import is_page

    is_sweep = contents(options.folder) is Contents.SWEEP
    html = options.folder / "sweep.html" if is_sweep and options.html is None else options.html
    if html is not None:
        refuse_other_file(html, "a page of hies-export", is_page)
    values, page, draw = (_show_sweep if is_sweep else _show_report)(options)
    if html is not None:
        replace_file(html, page)
        options.progress.stage(f"written: {html}")
    if options.figures is not None:
        files = write_figures(draw(), options.figures)
        options.progress.stage(f"drawn in {options.figures}: {', '.join(file.name for file in files)}")
    return values


def _show_report(options: Options) -> Shown:
    from ..checkpoint.folders import Contents
    from ..report.comparison import Bench, print_bench, read_report, render_bench
    from ..report.figures import draw_report
    from ..report.html import render_html
    from ..report.tables import print_report

    if options.folder.is_dir() and not (options.folder / "report.json").is_file():
        needs = "a report needs the folder of a finished run or sweep"
        refuse_other_than(options.folder, Contents.RUN, Contents.SWEEP, needs=needs)
    found = read_report(options.folder)
    if not isinstance(found, Bench):
        print_report(found, options.console)
        return found.summary(), render_html(found), lambda: draw_report(found)
    if options.figures is not None:
        raise RequestError(f"figures are drawn for a run, but {options.folder} is the result of a bench; use --html")
    print_bench(found, options.console)
    return asdict(found), render_bench(found), dict


def _show_sweep(options: Options) -> Shown:
    from ..lab.sweep.page import lead_text, read_sweep, render_sweep
    from .sweep import print_tables

    if options.figures is not None:
        raise RequestError(f"figures are drawn for a run, but {options.folder} is a sweep; use --html")

    rows, about = read_sweep(options.folder)
    options.console.print(lead_text(rows), soft_wrap=True)
    print_tables(rows, options)
    return {"rows": rows}, render_sweep(rows, about, name=options.folder.absolute().name), dict
