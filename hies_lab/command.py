"""Compare many ways to prune, in tables and on one page; a sweep that was stopped goes on."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hies_export.cli.arguments import Options, add_recipe, read_recipe
from hies_export.errors import RecipeError, quoted
from hies_export.kinds import ATTENTION

if TYPE_CHECKING:
    from hies_export.pipeline.recipe import PruningRecipe

    from .sweep.grid import SweepGrid


def _a_list(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a `type` of argparse that reads values of a kind, separated by commas."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ArgumentTypeError(f"must be {what}, separated by commas, got {quoted(text)}") from None

    return read


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
    add_recipe(parser, "RECIPE|SWEEP", "a recipe, YAML; with --show, the folder of a finished sweep")
    for flag, kind, metavar, text in GRID:
        add(f"--{flag}", type=_a_list(kind), metavar=metavar, help=text)
    add(
        "--latency",
        metavar="RUNTIME",
        nargs="?",
        const="onnxruntime-cpu",
        help="time every slim model against the dense one, at 8 x 128, on onnxruntime-cpu or another runtime of bench; "
        "give RECIPE first",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="print a finished sweep, and write its sweep.html again")
    theory = "orthogonality, bound and increase of the loss, entropy deficits"
    checked = f"check the theory of the HIES paper on the recipe's calibration rows instead: {theory}"
    instead.add_argument("--theory", action="store_true", help=checked)


def run(options: Options) -> dict[str, Any]:
    """Sweep, show a sweep or check the theory, and return what is printed."""
    if options.show:
        return _show(options)
    recipe = read_recipe(options)
    return _check_theory(recipe, options) if options.theory else _sweep(recipe, options)


def _sweep(recipe: PruningRecipe, options: Options) -> dict[str, Any]:
    """Judge every cell of the grid, print the tables, and return rows, seconds and the number of models judged."""
    from .sweep.stopwatch import LatencyRequest  # after the refusals, because it takes seconds
    from .sweep.sweep import sweep

    grid = _read_grid(options, calibration_size=recipe.calibration.samples)
    latency = LatencyRequest(options.latency) if options.latency else None
    how: dict[str, Any] = {"latency": latency, "overwrite": options.overwrite, "progress": options.progress}
    result = sweep(recipe, grid, recipe.output, **how)
    _print_tables(result.rows, options)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    options.console.print(f"\n{result.evaluations} models judged; {spent}", soft_wrap=True)
    options.console.print(f"written to {recipe.output}: sweep.html, sweep.json, sweep.csv, tables.md")
    return {"rows": result.rows, "seconds": result.seconds, "evaluations": result.evaluations}


def _show(options: Options) -> dict[str, Any]:
    """Print a finished sweep, and write its page again."""
    from hies_export.checkpoint.folders import refuse_other_file
    from hies_export.report.html import is_page

    from .sweep.page import PAGE, lead_text, read_sweep, write_page

    rows, _ = read_sweep(options.recipe)
    refuse_other_file(options.recipe / PAGE, "a page of hies-export", is_page)
    options.console.print(lead_text(rows), soft_wrap=True)
    _print_tables(rows, options)
    options.progress.stage(f"written: {write_page(options.recipe)}")
    return {"rows": rows}


def _check_theory(recipe: PruningRecipe, options: Options) -> dict[str, Any]:
    """Print what the theory says of the recipe's model beside what is measured, and return both."""
    from hies_export.pipeline.load_recipe import load_recipe
    from hies_export.select.plan import dump_json

    from .theory import theory, theory_tables

    if ATTENTION not in recipe.options.modules:
        raise RecipeError([f"--theory is about heads, but prune.modules of {options.recipe} has no attention; add it"])
    pruning, _ = load_recipe(recipe, progress=options.progress)
    attention = [module for module in pruning.scored if module.kind == ATTENTION]
    options.progress.stage("theory")
    alpha = 0.9 if recipe.prune.alpha == "auto" else recipe.prune.alpha
    found = theory(pruning.model, pruning.rows.score, attention, alpha=alpha)
    for part in theory_tables(found):
        options.console.print(part, soft_wrap=isinstance(part, str))
    return {"model": recipe.model, **json.loads(dump_json(asdict(found)))}


def _print_tables(rows: Sequence[Mapping[str, Any]], options: Options) -> None:
    """Print the tables of a sweep's rows, and how baselines differ from the originals."""
    from .sweep.results import sweep_tables, terminal_table

    for table in sweep_tables(rows):
        options.console.print(f"\n{table.title}")
        options.console.print(terminal_table(table))
    for name, how in table.differences.items():
        options.console.print(f"{name} differs from the original: {how}", soft_wrap=True)


def _read_grid(options: Options, *, calibration_size: int) -> SweepGrid:
    from .sweep.grid import SweepGrid

    given = {name: getattr(options, name) for name in (flag.replace("-", "_") for flag, *_ in GRID)}
    given["calibration_sizes"] = given["calibration_sizes"] or (calibration_size,)
    return SweepGrid(**{name: values for name, values in given.items() if values is not None})
