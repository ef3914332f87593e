"""The command line: arguments, errors and exit codes, progress. Libraries log; only the command line prints."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console

from .. import __version__
from ..errors import HiesError
from . import commands

# torch, transformers and the stages are imported by the commands that need them: --help answers at once.

T = TypeVar("T")

EXAMPLES = """\
examples:
  hies-export quickstart
  hies-export run recipes/bert-sst2.yaml
  hies-export run recipe.yaml --set prune.budget.heads=0.5 -o runs/half
  hies-export apply plan.json dense-folder -o slim-folder
  hies-export bench dense-folder slim-folder --runtime onnxruntime-cpu --shape 8x128
"""


def main(arguments: Sequence[str] | None = None, *, parser: argparse.ArgumentParser | None = None) -> int:
    """Run one command.

    Args:
        arguments: By default those of the process.
        parser: Makes `options.command` and what it reads of them; by default that of every command.

    Returns:
        0 done; 2 the request was wrong; 1 a step failed, nothing half-written left behind; 130 interrupted.
    """
    options = (parser or build_parser()).parse_args(arguments)
    # Into a file or a pipe, tables are as wide as they need.
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    err = Console(stderr=True, highlight=False)
    interrupt = _Interrupt()
    try:
        with interrupt, _chatter(options.verbose, err, libraries=options.command is not commands.architectures_command):
            options.command(options, out, _Terminal(err))
        return 0
    except (Exception, KeyboardInterrupt) as error:
        # Some libraries catch an interrupt and raise something else.
        if interrupt.happened or isinstance(error, KeyboardInterrupt):
            err.print("interrupted; nothing half-written was left behind", style="red")
            return 130
        if isinstance(error, HiesError):
            err.print(f"error: {error}", markup=False, style="red", soft_wrap=True)
            return error.exit_code
        if options.verbose or not isinstance(error, OSError):
            raise
        err.print(f"error: {error}; nothing half-written was left behind", markup=False, style="red", soft_wrap=True)
        return 1


class _Interrupt:
    """Inside the block, SIGINT and SIGTERM raise KeyboardInterrupt, and are remembered: both clean up alike."""

    def __init__(self) -> None:
        self.happened = False

    def __enter__(self) -> None:
        # Handlers can only be set in the main thread; elsewhere the host program decides.
        main = threading.current_thread() is threading.main_thread()
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)]
        self._before = {number: signal.signal(number, self._handle) for number in numbers} if main else {}

    def __exit__(self, *_: object) -> None:
        if self.happened and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.happened = True
        # Python drops what is raised in a finaliser, and torch's take a good share of the time: try again after it.
        if hasattr(signal, "setitimer") and _in_finaliser(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            return
        raise KeyboardInterrupt


def _in_finaliser(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def build_parser(prog: str = "hies-export") -> argparse.ArgumentParser:
    """The parser of every command, called `prog` in what it prints."""
    common = _verbose_option()
    recipe = argparse.ArgumentParser(add_help=False)
    recipe.add_argument("recipe", metavar="RECIPE", help="a recipe, YAML")
    recipe.add_argument("-o", "--output", metavar="DIR", type=Path, help="folder to write (default: the recipe's)")
    recipe.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="override a field of the recipe, e.g. prune.budget.heads=0.5; may be repeated",
    )
    recipe.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    as_json = _json_option()

    parser = argparse.ArgumentParser(
        prog=prog,
        description="Remove the attention heads a Transformer can lose, and ship what is left: a slim checkpoint, an "
        "ONNX model and a measured report.",
        epilog=EXAMPLES.replace("hies-export", prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hies-export {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, parents: list[argparse.ArgumentParser], text: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(name, parents=[*parents, common], help=text, description=text)
        command.set_defaults(command=function)
        return command

    add("run", commands.run_command, [recipe, as_json], "do the whole line a recipe describes")
    quickstart = add("quickstart", commands.quickstart_command, [as_json], "a first run that needs no network")
    quickstart.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path("runs/quickstart"))
    quickstart.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    add("score", commands.score_command, [recipe], "score the heads and write scores.json and plan.json")
    prune = add("prune", commands.prune_command, [recipe], "score, select, cut and save; no export, no measuring")
    prune.add_argument("--plan", metavar="FILE", type=Path, help="cut by this plan instead of scoring")
    apply = add("apply", commands.apply_command, [as_json], "cut a checkpoint on disk by a plan, without loading it")
    apply.add_argument("plan", metavar="PLAN", type=Path, help="a plan.json")
    apply.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub id, with safetensors")
    apply.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder to write")
    apply.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    export = add("export", commands.export_command, [as_json], "export a checkpoint, slim or not, to an ONNX folder")
    _add_export_arguments(export, "-o", "--output", required=True)
    bench = add("bench", commands.bench_command, [as_json], "compare the latency of two checkpoints or ONNX folders")
    bench.epilog = (
        "The exit code is 0 for noisy rows too, since they were measured: read `noisy` in the rows of --json. What is "
        "printed as JSON, in a file, is shown again by hies-export report."
    )
    bench.add_argument("first", metavar="A", type=Path, help="what the ratios are relative to")
    bench.add_argument("second", metavar="B", type=Path, nargs="?", help="default: A again, which measures the noise")
    bench.add_argument("--runtime", dest="runtimes", action="append", default=[], help="may be repeated")
    bench.add_argument(
        "--shape",
        dest="shapes",
        action="append",
        default=[],
        help="BATCHxSEQUENCE, or BATCH for images; repeatable",
    )
    bench.add_argument(
        "--dtype",
        dest="dtypes",
        action="append",
        default=[],
        help="what checkpoints run in: float32 (the default), float16, bfloat16; repeatable",
    )
    bench.add_argument("--repeats", type=int, default=30, help="timed runs of each (default: 30)")
    bench.add_argument(
        "--min-seconds", metavar="S", type=float, default=0.0, help="go on until a shape was timed this long"
    )
    sweep = add(
        "sweep",
        commands.sweep_command,
        [recipe, as_json],
        "judge many ways to prune: tables and figures; goes on where it was when it is started again",
    )
    sweep.add_argument("--criteria", metavar="A,B,...", help="default: hies,his,ad,l2,random")
    sweep.add_argument("--alphas", metavar="A,B,...", help="numbers, auto (per sparsity), auto-area; default: auto")
    sweep.add_argument("--sparsities", metavar="S,T,...", help="shares of heads (default: 0.1,0.3,0.5,0.7)")
    sweep.add_argument("--seeds", metavar="M,N,...", help="of the calibration rows (default: 0,1,2)")
    sweep.add_argument("--calibration-sizes", metavar="M,N,...", help="default: the recipe's")
    sweep.add_argument("--compensations", metavar="A,B,...", help="none, bias, least_squares (default: none)")
    sweep.add_argument("--no-figures", action="store_true", help="do not draw; figures need the extra 'plots'")
    generate = add("generate", commands.generate_command, [as_json], "continue prompts, greedily, with an ONNX folder")
    generate.add_argument("folder", metavar="FOLDER", help="ONNX folder; or a checkpoint, which runs in torch")
    asked = generate.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", dest="prompts", action="append", help="may be repeated")
    asked.add_argument(
        "--questions", metavar="FILE", type=Path, help="MM-Vet's or VizWiz's JSON; --image is then the folder of images"
    )
    generate.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="where answers to --questions go, as MM-Vet's grader reads",
    )
    generate.add_argument(
        "--image", dest="images", metavar="FILE", type=Path, action="append", default=[], help="one, or one per prompt"
    )
    generate.add_argument("--max-new-tokens", metavar="N", type=int, default=20, help="at most (default: 20)")
    push = add(
        "push", commands.push_command, [as_json], "push a finished run to the Hub: checkpoint, ONNX, report, card"
    )
    push.add_argument("folder", metavar="RUN_DIR", type=Path, help="a run's folder")
    push.add_argument("repository", metavar="USER/REPO", help="made if there is none")
    push.add_argument("--private", action="store_true", help="make the repository private")
    push.add_argument("--revision", metavar="BRANCH", default="main", help="branch to commit to (default: main)")
    push.add_argument("--message", metavar="TEXT", help="commit message (default: the report's headline)")
    push.add_argument("--license", metavar="ID", help="of the model, where the dense model's card names none")
    push.add_argument("--base-model", metavar="ID", help="Hub id of the dense model, where it was read from a folder")
    push.add_argument("--overwrite", action="store_true", help="replace whatever the repository holds")
    upgrade = add(
        "upgrade",
        commands.upgrade_command,
        [as_json],
        "make a slim checkpoint of one whose heads transformers 4 pruned, which transformers 5 cannot load",
    )
    upgrade.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub id, with pruned_heads in its config")
    upgrade.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder to write")
    upgrade.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    inspect = add(
        "inspect",
        commands.inspect_command,
        [as_json],
        "show the attention heads of a checkpoint and whether they can be cut",
    )
    inspect.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub id; a recipe with --theory")
    inspect.add_argument(
        "--theory",
        action="store_true",
        help="say on a recipe's calibration rows what HIES's theory says: orthogonality, bound and increase of the "
        "loss, entropy deficits",
    )
    architectures = add(
        "architectures",
        commands.architectures_command,
        [as_json],
        "show which model types can be scored, cut, reloaded, trained and exported, and why not the others",
    )
    architectures.add_argument("model_types", metavar="MODEL_TYPE", nargs="*", help="as in config.json; default: all")
    ui = add("ui", commands.ui_command, [], "explore other plans of a finished run or sweep in the browser")
    ui.add_argument("folder", metavar="DIR", type=Path, help="a run's or a sweep's folder")
    ui.add_argument("--port", metavar="N", type=int, help="where to listen (default: a free one from 7860)")
    ui.add_argument("--no-browser", action="store_true", help="do not open the page, only serve it")
    report = add("report", commands.report_command, [as_json], "show a finished run, or what a bench found, again")
    report.add_argument(
        "folder", metavar="DIR", type=Path, help="a run's folder, or a file with what `bench --json` printed"
    )
    report.add_argument(
        "--figures", metavar="DIR", type=Path, help="draw head maps and latency as PNG and SVG; needs the extra 'plots'"
    )
    report.add_argument("--html", metavar="FILE", type=Path, help="write it as one self-contained page")
    return parser


def build_optimum_export_parser() -> argparse.ArgumentParser:
    """The parser of `optimum-cli export hies MODEL DIR`: the command `export` with the folder in its place."""
    parser = argparse.ArgumentParser(
        prog="optimum-cli export hies",
        parents=[_json_option(), _verbose_option()],
        description="export a checkpoint, slim or not, to an ONNX folder",
    )
    parser.set_defaults(command=commands.export_command)
    _add_export_arguments(parser, "output")
    return parser


def _add_export_arguments(parser: argparse.ArgumentParser, *output: str, **how: Any) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub id")
    parser.add_argument(*output, metavar="DIR", type=Path, help="folder to write", **how)
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    parser.add_argument("--provider", default="cpu", help="what to fuse for: cpu (the default), cuda or tensorrt")
    parser.add_argument("--dtype", default="float32", help="float32 or float16")


def _verbose_option() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("-v", "--verbose", action="store_true", help="let the libraries talk too")
    return parent


def _json_option() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--json", action="store_true", help="print the result as one line of JSON, last on stdout")
    return parent


class _Terminal:
    """Progress on stderr: one line per stage, a bar for every loop while it runs."""

    def __init__(self, console: Console):
        self.console = console

    def stage(self, name: str) -> None:
        self.console.print(f"[dim]·[/dim] {name}")

    def track(self, items: Sequence[T], name: str) -> Iterable[T]:
        from rich.progress import track

        quiet = not self.console.is_terminal
        return track(items, description=f"  {name}", console=self.console, transient=True, disable=quiet)


@contextlib.contextmanager
def _chatter(verbose: bool, console: Console, *, libraries: bool) -> Iterator[None]:
    """Show this package's own warnings as single lines; silence those of the libraries that are used unless asked."""

    def show(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if verbose or category.__module__.startswith("hies_export"):
            console.print(f"warning: {message}", markup=False, style="yellow", soft_wrap=True)

    handler = _ConsoleHandler(console)
    logger = logging.getLogger("hies_export")
    logger.addHandler(handler)
    with warnings.catch_warnings():
        warnings.showwarning = show
        if libraries and not verbose:
            import datasets
            from transformers.utils import logging as transformers_logging

            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
            datasets.disable_progress_bars()
        try:
            yield
        finally:
            logger.removeHandler(handler)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console):
        super().__init__(logging.WARNING)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(f"{record.levelname.lower()}: {record.getMessage()}", markup=False, style="yellow")
