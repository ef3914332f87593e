"""Read the table of model types: which of them pass the contract of tests/support/contract.py, and why others do not.

`scripts/architectures` earns it by running the contract on a tiny random model of every type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RequestError, did_you_mean

TABLE = Path(__file__).parent / "architectures.json"

STEPS = {
    "score": "HIS and entropy equal those of eager attention, one sample at a time",
    "cut": "an uneven and a uniform cut equal the dense model with those heads masked, to 1e-4",
    "reload": "both come back from disk in every way, with the same output, also after a second save",
    "train": "a step against the gradient lowers the loss of the slim model",
    "onnx": "the exported slim model computes in ONNX Runtime what torch computes",
}

NOT_RUN = "not run yet"

Table = Mapping[str, Any]


def read_table(model_types: Sequence[str] = ()) -> dict[str, Any]:
    """The table, or the part of it that is about some model types.

    Returns:
        `versions` of the libraries it was earned with, and `types`: model type -> what it earned. `kind` is "tried"
        (then `steps` has "yes" or the reason for each), "refused" by name, "failed", or "not tried"; `refused` says
        why. `class`, `inputs`, `heads` ([query, key/value] of all layers) say what was tried; `config_alone` whether
        a uniform cut needs no code of ours.

    Raises:
        RequestError: transformers had no such model type.
    """
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    for name in model_types:
        if name not in table["types"]:
            raise RequestError(
                f"a model type must be one of transformers {table['versions']['transformers']}, got {name!r}"
                f"{did_you_mean(name, table['types'])}"
            )
    if model_types:
        table["types"] = {name: table["types"][name] for name in model_types}
    return table


def holds(entry: Mapping[str, Any], step: str) -> bool:
    """Whether a step of the contract holds for a type."""
    return bool(entry.get("steps", {}).get(step) == "yes")


def whole(entry: Mapping[str, Any]) -> bool:
    """Whether every step holds, or has nothing to compare."""
    steps = [entry.get("steps", {}).get(step, NOT_RUN) for step in STEPS]
    return holds(entry, "cut") and all(result == "yes" or result.startswith("n/a") for result in steps)


def why_not(entry: Mapping[str, Any]) -> str:
    """The reasons of a type, in one line; empty where everything holds."""
    if "steps" not in entry:
        return str(entry["refused"])
    results = {step: entry["steps"].get(step, NOT_RUN) for step in STEPS}
    return "; ".join(f"{step}: {result}" for step, result in results.items() if result != "yes")


def counts(table: Table) -> dict[str, int]:
    """How many types there are, were tried, and hold at each step."""
    types = table["types"].values()
    return {
        "types": len(types),
        "tried": sum("class" in entry for entry in types),
        **{step: sum(holds(entry, step) for entry in types) for step in STEPS},
        "refused": sum(entry["kind"] == "refused" for entry in types),
    }


def markdown(table: Table) -> str:
    """The table as a document: counts, what holds, what holds partly, what is refused and why."""
    number = counts(table)
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items())
    groups: dict[str, dict[str, Any]] = {"whole": {}, "partly": {}, "refused": {}, "failed": {}, "not tried": {}}
    for name, entry in table["types"].items():
        kind = entry["kind"]
        groups[kind if kind != "tried" else "whole" if whole(entry) else "partly"][name] = entry
    lines = [
        "# Model types",
        "",
        f"Of the {number['types']} model types of transformers that have a model, a tiny random one of "
        f"{number['tried']} was run through the contract ({versions}):",
        "",
        "| step | holds for | what it means |",
        "| --- | ---: | --- |",
        *(f"| {step} | {number[step]} | {meaning} |" for step, meaning in STEPS.items()),
        "",
        f"{number['refused']} are refused by name before anything is scored. A cut that would compute something else "
        "is never saved, whatever the type.",
        "",
        "Written by `scripts/architectures` from what it ran; `hies-export architectures` shows the same. A type comes "
        "in with the class people prune (a task class where there is one); `config alone` means that a uniform cut "
        "loads in stock transformers without any code of ours.",
        "",
        f"## Everything holds ({len(groups['whole'])})",
        "",
        "n/a: there is nothing to compare with.",
        "",
        "| model type | class | inputs | " + " | ".join(STEPS) + " | config alone |",
        "| --- | --- | --- |" + " --- |" * (len(STEPS) + 1),
    ]
    for name, entry in groups["whole"].items():
        results = [result.partition(":")[0] for result in (entry["steps"][step] for step in STEPS)]
        alone = "yes" if entry.get("config_alone") else "no"
        inputs = ", ".join(i for i in entry["inputs"] if not i.endswith("mask"))
        lines.append(f"| {name} | {entry['class']} | {inputs} | {' | '.join(results)} | {alone} |")
    lines += [
        "",
        f"## Partly ({len(groups['partly'])})",
        "",
        "| model type | class | holds | does not |",
        "| --- | --- | --- | --- |",
    ]
    for name, entry in groups["partly"].items():
        held = ", ".join(step for step in STEPS if holds(entry, step))
        lines.append(f"| {name} | {entry['class']} | {held} | {_cell(why_not(entry))} |")
    for kind, title in (
        ("refused", "Refused by name"),
        ("failed", "Fails"),
        ("not tried", "Not tried: no tiny model of it is made yet, or a library is missing"),
    ):
        if groups[kind]:
            lines += ["", f"## {title} ({len(groups[kind])})", "", "| model type | why |", "| --- | --- |"]
            lines += [f"| {name} | {_cell(why_not(entry))} |" for name, entry in groups[kind].items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    # Neither a column's end nor a link.
    return re.sub(r"([|\[\]])", r"\\\1", text)
