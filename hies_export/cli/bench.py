"""Compare the latency of two checkpoints, ONNX folders or GGUF files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ..errors import RequestError, quoted
from ..progress import Progress
from .arguments import a_number, a_path, add_json
from .choices import RUNTIMES

EPILOG = (
    "Noisy rows were measured too, so the exit code is 0: read `noisy` in the rows of --json. Save that JSON in a "
    "file, and hies-export report shows it again."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the two models and how to time them."""
    parser.epilog = EPILOG
    parser.add_argument("first", metavar="A", type=a_path, help="the model that ratios are relative to")
    parser.add_argument(
        "second", metavar="B", type=a_path, nargs="?", help="default: A again, which measures the noise"
    )
    repeated: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--runtime", dest="runtimes", metavar="RUNTIME", help=f"of {', '.join(RUNTIMES)}; repeatable", **repeated
    )
    parser.add_argument(
        "--shape", dest="shapes", metavar="SHAPE", help="BATCHxSEQUENCE, or BATCH for images; repeatable", **repeated
    )
    parser.add_argument(
        "--dtype",
        dest="dtypes",
        metavar="DTYPE",
        help="what checkpoints run in: float32 (the default), float16, bfloat16, or q8_0 on llamacpp; repeatable",
        **repeated,
    )
    parser.add_argument(
        "--repeats", metavar="N", type=a_number(int, 1), default=30, help="timed runs of each (default: 30)"
    )
    parser.add_argument(
        "--min-seconds",
        metavar="S",
        type=a_number(float, 0),
        default=0.0,
        help="go on until a shape was timed this long",
    )
    add_json(parser)


def run(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    """Time both, print the comparison, and return what `hies-export report` shows again."""
    from ..measure.environment import environment
    from ..pipeline.bench import bench
    from ..report.bench import Bench, print_bench

    second = options.second or options.first
    rows = bench(
        options.first,
        second,
        runtimes=options.runtimes,
        shapes=[_parse_shape(text) for text in options.shapes],
        dtypes=options.dtypes,
        repeats=options.repeats,
        min_seconds=options.min_seconds,
        progress=progress,
    )
    result = {
        "a": str(options.first),
        "b": str(second),
        "latency": [asdict(row) for row in rows],
        "environment": environment(),
    }
    print_bench(Bench.from_values(result), console)
    return result


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
        if len(shape) not in (1, 2) or min(shape) < 1:
            raise ValueError
        return shape
    except ValueError:
        raise RequestError(f"--shape must be BATCHxSEQUENCE, or BATCH for images, got {quoted(text)}") from None
