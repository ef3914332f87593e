"""Show a finished run or sweep, or the saved JSON of a bench, again."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ..errors import RequestError
from ..progress import Progress
from .arguments import a_path, add_json
from .paths import refuse_other_than


def add_arguments(parser: ArgumentParser) -> None:
    """Add the folder and what to draw."""
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=a_path,
        help="the folder of a run or a sweep, or a file with what `bench --json` printed",
    )
    parser.add_argument(
        "--figures",
        metavar="DIR",
        type=a_path,
        help="draw the figures of a run or a sweep as SVG",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=a_path,
        help="write it as one self-contained page (of a sweep, by default its sweep.html)",
    )
    add_json(parser)


def run(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    """Print the report, draw what was asked for, and return the report's values."""
    from ..checkpoint.contents import Contents, contents
    from ..checkpoint.folders import refuse_other_file, replace_file
    from ..report.bench import Bench, print_bench, read_report, render_bench
    from ..report.figures import draw_report, write_figures
    from ..report.html import is_page, render_html
    from ..report.report import Report
    from ..report.terminal import print_report

    if options.html is not None:
        refuse_other_file(options.html, "a page of hies-export", is_page)
    if contents(options.folder) is Contents.SWEEP:
        return _show_sweep(options, console, progress)
    if options.folder.is_dir() and not (options.folder / "report.json").is_file():
        needs = "a report needs the folder of a finished run or sweep"
        refuse_other_than(options.folder, Contents.RUN, Contents.SWEEP, needs=needs)
    found = read_report(options.folder)
    if isinstance(found, Bench):
        if options.figures is not None:
            raise RequestError(f"figures are drawn of a run, but {options.folder} is what a bench found; use --html")
        page, values = render_bench(found), asdict(found)
        print_bench(found, console)
    else:
        page, values = render_html(found), found.summary()
        print_report(found, console)
    if options.html is not None:
        replace_file(options.html, page)
        progress.stage(f"written: {options.html}")
    if options.figures is not None and isinstance(found, Report):
        files = write_figures(draw_report(found), options.figures)
        progress.stage(f"drawn in {options.figures}: {', '.join(file.name for file in files)}")
    return values


def _show_sweep(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    """Print the tables of a sweep, render its page, and return its rows."""
    from ..checkpoint.folders import refuse_other_file, replace_file
    from ..report.figures import write_figures
    from ..report.html import is_page
    from ..sweep.figures import draw_sweep
    from ..sweep.page import PAGE, lead_text, read_sweep, render_sweep
    from .sweep import print_tables

    page = options.html or options.folder / PAGE
    refuse_other_file(page, "a page of hies-export", is_page)
    rows, about = read_sweep(options.folder)
    console.print(lead_text(rows), markup=False, soft_wrap=True)
    print_tables(rows, console)
    replace_file(page, render_sweep(rows, about, name=options.folder.absolute().name))
    progress.stage(f"written: {page}")
    if options.figures is not None:
        files = write_figures(draw_sweep(options.folder), options.figures)
        progress.stage(f"drawn in {options.figures}: {', '.join(file.name for file in files)}")
    return {"rows": rows}
