"""The program: its parser, assembled from the commands, and what exit code an error or an interrupt becomes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from types import FrameType, ModuleType
from typing import Any

from rich.console import Console

from .. import processes
from ..entry_points import entry_points_of, load_point
from ..errors import LONGEST_QUOTE, HiesError, RequestError, memory_failure, root_cause
from ..progress import SILENT
from ..version import __version__
from . import apply, bench, deploy, export, generate, inspect, prune, push, quickstart, report, run, score, upgrade
from .arguments import Options
from .terminal import TerminalProgress, show_messages

# In the order of --help.
COMMANDS: tuple[ModuleType, ...] = (
    *(run, deploy, prune, export, bench, inspect, report, push, apply, quickstart),
    *(generate, upgrade, score),
)

# These share their work among the processes that accelerate or torchrun started.
SHARED = (run, score, prune)

EPILOG = """\
examples:
  {prog} quickstart
  {prog} run recipe.yaml --set prune.budget.heads=0.5 -o runs/half
  {prog} bench dense-folder slim-folder --runtime onnxruntime-cpu --shape 8x128
"""


def main(arguments: Sequence[str] | None = None, *, parser: argparse.ArgumentParser | None = None) -> int:
    """Run one command, by default that of the process, and return its exit code.

    0: done. 2: the request was wrong. 1: a step failed, and nothing half-written was left behind. 130: interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = (parser or build_parser()).parse_args(arguments, Options())
    options.command_line = shlex.join(["hies-export", *arguments])  # which reports record
    # Of several processes that share the work, only the first prints.
    shared = options.command in SHARED
    quiet = shared and not processes.is_first()
    # Names are printed as they are. Into a file or a pipe, tables are as wide as they need.
    console: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "quiet": quiet}
    out = Console(width=None if sys.stdout.isatty() else 120, **console)
    err = Console(stderr=True, **console)
    if quiet:
        # Otherwise torch prints the stack when the first process is gone.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    options.console, options.progress = out, SILENT if quiet else TerminalProgress(err)
    interrupt = _Interrupt()
    try:
        with interrupt, show_messages(err, verbose=options.verbose), processes.together() if shared else nullcontext():
            result = options.command.run(options)
            if result is not None and options.json and not quiet:
                print(json.dumps(result))
        return 0
    except (Exception, KeyboardInterrupt) as error:
        # Some libraries catch an interrupt and raise something else.
        if interrupt.happened or isinstance(error, KeyboardInterrupt):
            err.print("interrupted; nothing half-written was left behind", style="red")
            return 130
        if quiet:
            # The first process prints the error that all fail with; the launcher meanwhile ends the others.
            time.sleep(processes.HEAD_START)
            err.quiet = False
        if isinstance(error, HiesError):
            err.print(f"error: {error}", style="red", soft_wrap=True)
            return error.exit_code
        if options.verbose:
            raise
        failure = memory_failure(error) or f"{root_cause(error, limit=LONGEST_QUOTE)} (--verbose shows where)"
        err.print(f"error: {failure}; nothing half-written was left behind", style="red", soft_wrap=True)
        return 1


def build_parser(prog: str = "hies-export") -> argparse.ArgumentParser:
    """Return the parser of every command, for a program called `prog`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Remove the attention heads and feed-forward neurons a Transformer can lose, and ship what is "
        "left: a slim checkpoint, an ONNX model and a measured report.",
        epilog=EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hies-export {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Subparser)
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        subparser = subparsers.add_parser(name, help=command.__doc__, description=command.__doc__)
        command.add_arguments(subparser)
        _add_common_options(subparser, command)
    for name, point in entry_points_of("commands").items():
        package = point.value.partition(".")[0]
        subparsers.add_parser(name, help=f"A command of {package}; --help says more.").point = point
    return parser


class _Subparser(argparse.ArgumentParser):
    """The parser of a command; one of another package is imported when it is called."""

    point: EntryPoint | None = None  # of a command that is not imported yet

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        """Import the command first, if it is of another package, and add its options."""
        if self.point is not None:
            try:
                command, self.point = load_point(self.point), None
            except RequestError as error:
                self.error(str(error))
            self.description = command.__doc__
            command.add_arguments(self)
            _add_common_options(self, command)
        return super().parse_known_args(*arguments, **named)


def _add_common_options(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    """Add the options that all commands have, and --json to those that return a result."""
    if command.run.__annotations__["return"] != "None":
        parser.add_argument("--json", action="store_true", help="print the result as one line of JSON, last on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show warnings and progress of the libraries too")
    parser.set_defaults(command=command)


class _Interrupt:
    """Raises KeyboardInterrupt in its block on SIGINT and SIGTERM, so that both clean up, and remembers it."""

    def __init__(self) -> None:
        self.happened = False

    def __enter__(self) -> None:
        # Handlers can only be set in the main thread; elsewhere the host program decides. SIGALRM is for `_handle`.
        in_main_thread = threading.current_thread() is threading.main_thread()
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)]
        self._previous = {number: signal.signal(number, self._handle) for number in numbers} if in_main_thread else {}

    def __exit__(self, *_: object) -> None:
        if self.happened and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, as the handler of a signal that came while `frame` was running."""
        self.happened = True
        # Python discards what a finaliser raises, and torch spends much of its time in them: try again by a timer.
        while frame is not None and hasattr(signal, "setitimer"):
            if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                return
            frame = frame.f_back
        raise KeyboardInterrupt
