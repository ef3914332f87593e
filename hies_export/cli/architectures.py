"""Show which model types can be scored, cut, reloaded, trained and exported, and why others cannot."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from .arguments import Options


def add_arguments(parser: ArgumentParser) -> None:
    """Add the model types."""
    types = "`model_type` of a config.json (default: all)"
    parser.add_argument("model_types", metavar="MODEL_TYPE", nargs="*", help=types)


def run(options: Options) -> dict[str, Any]:
    """Show and return which steps each model type passed."""
    from rich.table import Column, Table

    from ..prunable.architectures import NEURON_STEPS, STEPS, counts, neurons_in_short, neurons_of, read_table, why_not

    table = read_table(options.model_types)
    # Not PlainTable: this command answers at once, without torch.
    whole = [Column(name, overflow="fold") for name in ("model type", "class")]
    lines = Table(*whole, *STEPS, "neurons", box=None, pad_edge=False, header_style="bold")
    for name, entry in table["types"].items():
        without = "not run" if entry["kind"] == "tried" else entry["kind"]
        results = [entry.get("steps", {}).get(step, without) for step in STEPS]
        lines.add_row(name, entry.get("class", ""), *map(_mark, results), neurons_in_short(entry))
    options.console.print(lines)
    for name in options.model_types:
        reason = why_not(table["types"][name]) or "everything holds"
        options.console.print(f"{name}: {reason}", soft_wrap=True)
        neurons = why_not(neurons_of(table["types"][name]), NEURON_STEPS) or "everything holds"
        options.console.print(f"{name}, neurons: {neurons}", soft_wrap=True)
    if not options.model_types:
        number = counts(table)
        held = ", ".join(f"{step} {number[step]}" for step in STEPS)
        options.console.print(
            f"{number['types']} model types, {number['tried']} tried: {held}. Why not: name the model type."
        )
    return table


def _mark(result: str) -> str:
    """Return one word for the result of a step."""
    if result in ("yes", "refused", "failed", "not tried", "not run"):
        return result
    return "n/a" if result.startswith("n/a") else "no"
