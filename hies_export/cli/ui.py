"""Explore the plans of a finished run or sweep in the browser."""

from __future__ import annotations

from argparse import ArgumentParser

from .arguments import Options, a_number, a_path
from .paths import refuse_other_than


def add_arguments(parser: ArgumentParser) -> None:
    """Add the folder and how to serve it."""
    add = parser.add_argument
    add("folder", metavar="DIR", type=a_path, help="folder of a run or sweep")
    add("--port", metavar="N", type=a_number(int, 1, 65535), help="where to listen (default: a free one from 7860)")
    add("--no-browser", action="store_true", help="do not open the page, only serve it")


def run(options: Options) -> None:
    """Serve the page until it is interrupted."""
    from ..checkpoint.folders import Contents
    from ..lab.ui.app import show

    wanted = (Contents.RUN, Contents.SWEEP)
    refuse_other_than(options.folder, *wanted, needs="ui needs the folder of a finished run or sweep")
    page = show(options.folder, port=options.port, open_browser=not options.no_browser)
    options.console.print(f"{page.local_url} shows {options.folder}; Ctrl-C ends it")
    page.block_thread()
