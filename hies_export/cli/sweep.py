"""Compare many ways to prune, in tables and on one page; one that was stopped goes on."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .arguments import Options, a_list, add_recipe, read_recipe

if TYPE_CHECKING:
    from ..lab.sweep.grid import SweepGrid


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# Options of the grid: flag, kind of each value, metavar and help.
GRID: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("criteria", str, "A,B,...", "criteria or baselines; a wrong name lists all (default: hies,his,ad,l2,random)"),
    ("alphas", _number_or_word, "A,B,...", "numbers, auto (one for each sparsity) or auto-area (default: auto)"),
    ("sparsities", float, "S,T,...", "shares of heads to remove (default: 0.1,0.3,0.5,0.7)"),
    ("flops", float, "F,G,...", "instead of --sparsities: shares of the dense FLOPs to leave, e.g. 0.8,0.6"),
    ("modules", str, "A,B,...", "attention, mlp, both (default: the recipe's)"),
    ("seeds", int, "M,N,...", "seeds that draw the calibration rows (default: 0,1,2)"),
    ("calibration-sizes", int, "M,N,...", "numbers of calibration rows (default: the recipe's)"),
    ("compensations", str, "A,B,...", "none, bias, scalars, least_squares, weighted, sequential (default: none)"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe and the grid."""
    add = parser.add_argument
    add_recipe(parser)
    for flag, kind, metavar, text in GRID:
        add(f"--{flag}", type=a_list(kind), metavar=metavar, help=text)
    add(
        "--latency",
        metavar="RUNTIME",
        nargs="?",
        const="onnxruntime-cpu",
        help="time every slim model against the dense one, at 8 x 128, on onnxruntime-cpu or another runtime of bench; "
        "give RECIPE first",
    )


def run(options: Options) -> dict[str, Any]:
    """Judge every cell of the grid, print the tables, and return rows, seconds and the number of models judged."""
    recipe = read_recipe(options)
    from ..lab.sweep.stopwatch import LatencyRequest  # after the refusals, because it takes seconds
    from ..lab.sweep.sweep import sweep

    grid = _read_grid(options, calibration_size=recipe.calibration.samples)
    latency = LatencyRequest(options.latency) if options.latency else None
    how: dict[str, Any] = {"latency": latency, "overwrite": options.overwrite, "progress": options.progress}
    result = sweep(recipe, grid, recipe.output, **how)
    print_tables(result.rows, options)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    options.console.print(f"\n{result.evaluations} models judged; {spent}", soft_wrap=True)
    options.console.print(f"written to {recipe.output}: sweep.html, sweep.json, sweep.csv, tables.md")
    return {"rows": result.rows, "seconds": result.seconds, "evaluations": result.evaluations}


def print_tables(rows: Sequence[Mapping[str, Any]], options: Options) -> None:
    """Print the tables of a sweep's rows, and how baselines differ from the originals."""
    from ..lab.sweep.results import sweep_tables, terminal_table

    for table in sweep_tables(rows):
        options.console.print(f"\n{table.title}")
        options.console.print(terminal_table(table))
    for name, how in table.differences.items():
        options.console.print(f"{name} differs from the original: {how}", soft_wrap=True)


def _read_grid(options: Options, *, calibration_size: int) -> SweepGrid:
    from ..lab.sweep.grid import SweepGrid

    given = {name: getattr(options, name) for name in (flag.replace("-", "_") for flag, *_ in GRID)}
    given["calibration_sizes"] = given["calibration_sizes"] or (calibration_size,)
    return SweepGrid(**{name: values for name, values in given.items() if values is not None})
