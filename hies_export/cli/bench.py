"""Compare the latency of two checkpoints, of their exports, or of a run's dense and slim model."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.folders import Contents, contents, refuse_other
from ..entry_points import RUNTIMES
from ..errors import quoted
from .arguments import REPEATED, Options, a_number, checkpoint_in

EXPORTS = (Contents.ONNX, Contents.OPENVINO, Contents.GGUF)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the two models and how to time them."""
    add = parser.add_argument
    parser.epilog = (
        "The exit code is 0 even if rows are noisy; the rows of --json say which are. Save that JSON in a file to see "
        "it again with hies-export report."
    )
    add("first", metavar="A", help="the model that times are relative to, or a run")
    add(
        "second",
        metavar="B",
        nargs="?",
        help="the model to compare with A (default: if A is a run, its slim model with its dense one; else A itself, "
        "which measures the noise)",
    )
    runtime = "such as torch or onnxruntime-cpu; a wrong one lists them all; may be repeated"
    add("--runtime", dest="runtimes", metavar="RUNTIME", help=runtime, **REPEATED)
    shape = {"dest": "shapes", "metavar": "SHAPE", "type": a_shape, **REPEATED}
    add("--shape", help="BATCHxSEQUENCE, or BATCH for images; may be repeated", **shape)
    dtypes = "float32 (the default), float16, bfloat16; on llamacpp q8_0, q4_0; repeatable"
    add("--dtype", dest="dtypes", metavar="DTYPE", help=f"what checkpoints run in: {dtypes}", **REPEATED)
    add("--repeats", metavar="N", type=a_number(int, 1), default=30, help="timed runs of each model (default: 30)")


def a_shape(text: str) -> tuple[int, ...]:
    """Return a shape such as "8x128" or "8", as a `type` of argparse."""
    with suppress(ValueError):
        shape = tuple(int(part) for part in text.lower().split("x"))
        if len(shape) <= 2 and min(shape) >= 1:
            return shape
    raise ArgumentTypeError(f"must be BATCHxSEQUENCE, or BATCH for images, got {quoted(text)}")


def run(options: Options) -> dict[str, Any]:
    """Time the two models, print the comparison, and return it as `hies-export report` reads it."""
    for path in filter(None, (options.first, options.second)):
        refuse_other(path, Contents.RUN, *EXPORTS, must="a model to time must be a checkpoint, an export or a run")
    for name in options.runtimes:
        RUNTIMES.check(name, what="a runtime")
    from ..forms.machine import machine_facts  # after the refusals, because it takes seconds
    from ..pipeline.bench import bench
    from ..report.comparison import Bench, print_bench

    first, second = _models(options)
    latency = bench(
        first,
        second,
        runtimes=options.runtimes,
        shapes=options.shapes,
        dtypes=options.dtypes,
        repeats=options.repeats,
        progress=options.progress,
    )
    result = {"a": first, "b": second, "latency": [asdict(row) for row in latency], "environment": machine_facts()}
    print_bench(Bench.from_values(result), options.console)
    return result


def _models(options: Options) -> tuple[str, str]:
    """Return the models A and B to compare: dense and slim of a single run, or else those that were given."""
    first, second = options.first, options.second
    if second is None and contents(first) is Contents.RUN:
        from ..report.provenance import dense_model

        slim = checkpoint_in(first, progress=options.progress)
        dense = dense_model(Path(first))
        if dense is None:
            message = "its dense model is gone: its slim model is timed against itself, which measures the noise"
            options.progress.stage(message)
        else:
            options.progress.stage(f"A is its dense model, {dense}; B is {slim}")
        return dense or slim, slim
    first, second = (checkpoint_in(path, *EXPORTS, progress=options.progress) for path in (first, second or first))
    return first, second
