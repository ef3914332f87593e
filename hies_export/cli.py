"""The command line. Libraries log; only this module prints."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from rich.console import Console

from .errors import HiesError, RecipeError

if TYPE_CHECKING:
    from .recipe import PruningRecipe

# torch, transformers and the stages are imported by the commands that need them: --help answers at once.

T = TypeVar("T")

EXAMPLES = """\
examples:
  hies-export quickstart
  hies-export run recipes/bert-sst2.yaml
  hies-export run recipe.yaml --set prune.budget.heads=0.5 -o runs/half
  hies-export bench dense-folder slim-folder --runtime onnxruntime-cpu --shape 8x128
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done; 2 the request was wrong; 1 a step failed, nothing half-written left behind; 130 interrupted.
    """
    options = build_parser().parse_args(arguments)
    # Into a file or a pipe, tables are as wide as they need.
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    err = Console(stderr=True, highlight=False)
    # A terminated run cleans up like an interrupted one.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _chatter(options.verbose, err):
            options.command(options, out, _Terminal(err))
        return 0
    except HiesError as error:
        err.print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        err.print("interrupted; nothing half-written was left behind", style="red")
        return 130
    except OSError as error:
        if options.verbose:
            raise
        err.print(f"error: {error}; nothing half-written was left behind", markup=False, style="red", soft_wrap=True)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="store_true", help="let the libraries talk too")
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
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print the result as one line of JSON, last on stdout")

    parser = argparse.ArgumentParser(
        prog="hies-export",
        description="Remove the attention heads a Transformer can lose, and ship what is left: a slim checkpoint, an "
        "ONNX model and a measured report.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, parents: list[argparse.ArgumentParser], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[*parents, common], help=text, description=text)
        command.set_defaults(command=function)
        return command

    add("run", _run, [recipe, as_json], "do the whole line a recipe describes")
    quickstart = add("quickstart", _quickstart, [as_json], "a first run that needs no network and no files")
    quickstart.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path("runs/quickstart"))
    quickstart.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    add("score", _score, [recipe], "score the heads and write scores.json and plan.json")
    prune = add("prune", _prune, [recipe], "score, select, cut and save a slim checkpoint; no export, no measuring")
    prune.add_argument("--plan", metavar="FILE", type=Path, help="cut by this plan instead of scoring")
    export = add("export", _export, [as_json], "export a checkpoint, slim or not, to an ONNX folder")
    export.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub id")
    export.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder to write")
    export.add_argument("--provider", default="cpu", help="execution provider to fuse for (default: cpu)")
    export.add_argument("--dtype", default="float32", help="float32 or float16")
    bench = add("bench", _bench, [as_json], "compare the latency of two checkpoints or ONNX folders")
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
    bench.add_argument("--repeats", type=int, default=30, help="timed runs of each (default: 30)")
    inspect = add(
        "inspect", _inspect, [as_json], "show the attention heads of a checkpoint and whether they can be cut"
    )
    inspect.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub id")
    report = add("report", _report, [as_json], "show the report of a finished run again")
    report.add_argument("folder", metavar="DIR", type=Path, help="a run's folder")
    return parser


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


def _run(options: argparse.Namespace, out: Console, progress: _Terminal) -> None:
    from .pipeline import run
    from .report import print_report

    recipe = _recipe(options)
    report = run(recipe, overwrite=options.overwrite, progress=progress)
    print_report(report, out)
    out.print(
        f"\nwritten to {recipe.output}: slim/ (checkpoint), onnx/, report.md, report.json, plan.json",
        markup=False,
    )
    _print_json(options, report.summary())


def _quickstart(options: argparse.Namespace, out: Console, progress: _Terminal) -> None:
    from .folders import new_folder
    from .pipeline import run
    from .quickstart import prepare_quickstart
    from .recipe import PruningRecipe
    from .report import print_report

    with new_folder(options.output, overwrite=options.overwrite) as folder:
        recipe = PruningRecipe.from_yaml(prepare_quickstart(folder, progress=progress))
        report = run(recipe, progress=progress)
    print_report(report, out)
    where = options.output
    out.print(
        f"\nA ViT was trained on handwritten digits, and half of its heads were removed. In {where}:\n"
        f"  {where}/run/slim    the slim checkpoint: hies_export.load({str(where / 'run' / 'slim')!r})\n"
        f"  {where}/run/onnx    the same for ONNX Runtime\n"
        f"  {where}/run/report.md\n"
        "Try next:\n"
        f"  hies-export run {where}/recipe.yaml --set prune.budget.heads=0.25 -o {where}/quarter\n"
        f"  hies-export inspect {where}/run/slim\n"
        f"  hies-export bench {where}/model {where}/run/slim --runtime onnxruntime-cpu --shape 64\n"
        "and then a recipe for your own model: see recipes/bert-sst2.yaml",
        markup=False,
        soft_wrap=True,
    )
    _print_json(options, report.summary())


def _score(options: argparse.Namespace, out: Console, progress: _Terminal) -> None:
    from .folders import new_folder
    from .pipeline import choose, prepare, write_choice

    recipe = _recipe(options)
    with new_folder(recipe.output, overwrite=options.overwrite) as folder:
        statistics, scores, plan = choose(prepare(recipe, progress=progress), recipe, progress=progress)
        write_choice(folder, statistics, scores, plan)
    _print_plan(plan, out)
    out.print(f"\nwritten to {recipe.output}: scores.json, plan.json", markup=False)


def _prune(options: argparse.Namespace, out: Console, progress: _Terminal) -> None:
    from .cut import check_plan
    from .folders import refuse_existing
    from .pipeline import choose, prepare, prune
    from .values import PruningPlan

    recipe = _recipe(options)
    refuse_existing(recipe.output, overwrite=options.overwrite)
    given = None if options.plan is None else PruningPlan.from_file(options.plan)
    prepared = prepare(recipe, progress=progress)
    if given is not None:
        check_plan(given, prepared.sites)
    plan = given or choose(prepared, recipe, progress=progress)[2]
    _, cut_max_abs, reload_max_abs = prune(
        prepared, plan, recipe.output, overwrite=options.overwrite, progress=progress
    )
    _print_plan(plan, out)
    out.print(
        f"\nwritten to {recipe.output}; cut against masked {cut_max_abs:.2g}, reloaded against saved "
        f"{reload_max_abs:.2g}",
        markup=False,
    )


def _export(options: argparse.Namespace, out: Console, progress: _Terminal) -> None:
    import torch

    from .export import export_onnx
    from .folders import refuse_existing
    from .loading import load
    from .measure import synthetic_batch

    refuse_existing(options.output)
    progress.stage("load")
    model = load(options.model, dtype=torch.float32)
    progress.stage("export")
    exported = export_onnx(
        model,
        options.output,
        batch=synthetic_batch(model, batch=2, sequence=16),
        processor=_processor(options.model, model),
        provider=options.provider,
        dtype=options.dtype,
    )
    out.print(
        f"written to {options.output}: {exported.bytes / 1e6:.1f} MB, differs from torch by {exported.max_abs:.2g}"
    )
    _print_json(
        options,
        {
            "folder": str(options.output),
            "bytes": exported.bytes,
            "onnx_max_abs": exported.max_abs,
            "inputs": exported.inputs,
            "outputs": exported.outputs,
        },
    )


def _processor(path: str, model: Any) -> Any:
    from .data import load_processor
    from .errors import DataError

    task = "image-classification" if model.main_input_name == "pixel_values" else "text-classification"
    try:
        return load_processor(path, task=task)
    except DataError as error:
        logging.getLogger(__name__).warning("the folder gets no tokenizer or image processor: %s", error)
        return None


def _bench(options: argparse.Namespace, out: Console, progress: _Terminal) -> None:
    from .compare import bench
    from .measure import environment
    from .report import plain_table

    shapes = [_shape(text) for text in options.shapes]
    second = options.second or options.first
    rows = bench(
        options.first,
        second,
        runtimes=options.runtimes,
        shapes=shapes,
        repeats=options.repeats,
        track=progress.track,
    )
    lines = [
        (
            f"{row['runtime']} {row['batch']} x {row['sequence']}",
            f"{row['dense_ms']:.2f} ms",
            f"{row['slim_ms']:.2f} ms",
            f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]",
            f"{row['control_ratio']:.3f} [{row['control_low']:.3f}, {row['control_high']:.3f}]",
        )
        for row in rows
    ]
    out.print(f"A {options.first}\nB {second}\n", markup=False)
    out.print(plain_table(("median latency", "A", "B", "B / A [95 %]", "A / A [95 %]"), lines))
    _print_json(options, {"a": str(options.first), "b": str(second), "latency": rows, "environment": environment()})


def _inspect(options: argparse.Namespace, out: Console, progress: _Terminal) -> None:
    import torch

    from .cut import is_slim
    from .errors import UnsupportedModelError
    from .layout import find_attention
    from .loading import load
    from .measure import count_parameters, synthetic_batch
    from .report import plain_table

    model = load(options.model, dtype=torch.float32)
    result: dict[str, Any] = {
        "model": str(options.model),
        "class": type(model).__name__,
        "slim": is_slim(model),
        "parameters": count_parameters(model),
    }
    out.print(f"{result['class']}, {result['parameters'] / 1e6:.2f} M parameters" + ", slim" * result["slim"])
    try:
        sites = find_attention(model, synthetic_batch(model, batch=2, sequence=8))
    except UnsupportedModelError as error:
        _print_json(options, result | {"can_be_cut": False, "reason": str(error)})
        raise
    lines = [(s.name, str(s.heads), str(s.key_value_heads), str(s.query_dim)) for s in sites]
    out.print(plain_table(("attention module", "heads", "key/value", "head width"), lines))
    out.print(f"{sum(s.heads for s in sites)} heads; all of them can be scored and cut")
    modules = [{"name": s.name, "heads": s.heads, "key_value_heads": s.key_value_heads} for s in sites]
    _print_json(options, result | {"can_be_cut": True, "attention": modules})


def _report(options: argparse.Namespace, out: Console, progress: _Terminal) -> None:
    from .report import Report, print_report

    report = Report.from_file(options.folder)
    print_report(report, out)
    _print_json(options, report.summary())


def _recipe(options: argparse.Namespace) -> PruningRecipe:
    from .recipe import PruningRecipe

    overrides = {}
    for text in options.overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise RecipeError([f"--set takes KEY=VALUE, got {text!r}"])
        overrides[key] = yaml.safe_load(value)
    if options.output is not None:
        overrides["output"] = options.output
    return PruningRecipe.from_yaml(options.recipe, overrides)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
        if len(shape) not in (1, 2) or min(shape) < 1:
            raise ValueError
        return shape
    except ValueError:
        raise RecipeError([f"--shape must be BATCHxSEQUENCE, or BATCH for images, got {text!r}"]) from None


def _print_plan(plan: Any, out: Console) -> None:
    from .report import head_map, head_map_text

    out.print(head_map_text(head_map(plan)))


def _print_json(options: argparse.Namespace, value: dict[str, Any]) -> None:
    if options.json:
        sys.stdout.flush()
        print(json.dumps(value))


@contextlib.contextmanager
def _chatter(verbose: bool, console: Console) -> Iterator[None]:
    """Show this package's own warnings as single lines; silence the libraries' unless asked not to."""

    def show(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if verbose or category.__module__.startswith("hies_export"):
            console.print(f"warning: {message}", markup=False, style="yellow", soft_wrap=True)

    handler = _ConsoleHandler(console)
    logger = logging.getLogger("hies_export")
    logger.addHandler(handler)
    with warnings.catch_warnings():
        warnings.showwarning = show
        if not verbose:
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


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
