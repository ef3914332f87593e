"""Read the table of model types: which of them pass the contract in tests/support/contract.py, and why others do not.

`scripts/architectures` runs the contract on a tiny random model of every type and writes the results to
architectures.json.
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
    "score": "HIS and entropy equal those computed from eager attention maps, one sample at a time",
    "cut": "an uneven and a uniform cut give the outputs of the dense model with the same heads masked, to 1e-4",
    "reload": "both cut models keep their outputs when saved and loaded in every supported way, twice",
    "train": "one gradient step lowers the loss of the slim model",
    "onnx": "ONNX Runtime gives the outputs that torch gives for the slim model",
}

NEURON_STEPS = {
    "cut": "the same for the neurons of feed-forward blocks",
    "reload": "the same for both cuts of neurons",
    "train": "the same for the model with fewer neurons",
    "onnx": "the same for the model with fewer neurons",
    "together": "heads and neurons cut at once pass the steps cut and reload",
}

NOT_RUN = "not run yet"

Table = Mapping[str, Any]


def read_table(model_types: Sequence[str] = ()) -> dict[str, Any]:
    """Return the table, or its entries for the given model types.

    Returns:
        A mapping with two keys. `versions` are those of the libraries that the contract was run with. `types` maps a
        model type to its entry, which has these keys:

        - `kind`: "tried", "refused", "failed" or "not tried".
        - `steps`: Of a tried type, "yes" or the reason of the failure for each step.
        - `refused`: Of any other type, the reason.
        - `class`, `inputs`, `heads`: The class and the inputs of the tiny model, and its numbers of query and of
          key/value heads over all layers.
        - `config_alone`: Whether stock transformers loads a uniform cut without code from this package.
        - `neurons`: What holds for the neurons of feed-forward blocks: `steps` and `config_alone` as above and `units`,
          their number over all blocks, or `refused`, the reason.

    Raises:
        RequestError: A model type is not in the table.
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
    """Return whether a model type passes a step."""
    return bool(entry.get("steps", {}).get(step) == "yes")


def neurons_hold(entry: Mapping[str, Any], step: str) -> bool:
    """Return whether a model type passes a step for neurons."""
    return holds(entry.get("neurons", {}), step)


def whole(entry: Mapping[str, Any]) -> bool:
    """Return whether a model type passes every step that applies to it."""
    steps = [entry.get("steps", {}).get(step, NOT_RUN) for step in STEPS]
    return holds(entry, "cut") and all(result == "yes" or result.startswith("n/a") for result in steps)


def why_not(entry: Mapping[str, Any]) -> str:
    """Return why a model type does not pass, in one line; an empty string where it passes every step."""
    if "steps" not in entry:
        return str(entry["refused"])
    results = {step: entry["steps"].get(step, NOT_RUN) for step in STEPS}
    return "; ".join(f"{step}: {result}" for step, result in results.items() if result != "yes")


def neurons_in_short(entry: Mapping[str, Any]) -> str:
    """Return what holds for the neurons of a model type, in a few words."""
    neurons = entry.get("neurons", {})
    if "steps" not in neurons:
        return "refused" if "refused" in neurons else NOT_RUN
    failing = [step for step in NEURON_STEPS if not _passes(neurons["steps"].get(step, NOT_RUN))]
    return f"not {', '.join(failing)}" if failing else "yes"


def why_not_neurons(entry: Mapping[str, Any]) -> str:
    """Return why the neurons of a model type do not pass every step; an empty string where they do."""
    neurons = entry.get("neurons", {"refused": NOT_RUN})
    if "steps" not in neurons:
        return str(neurons["refused"])
    results = {step: neurons["steps"].get(step, NOT_RUN) for step in NEURON_STEPS}
    return "; ".join(f"{step}: {result}" for step, result in results.items() if not _passes(result))


def _passes(result: str) -> bool:
    return result == "yes" or result.startswith("n/a")


def counts(table: Table) -> dict[str, int]:
    """Return how many model types there are, how many were tried, and how many pass each step.

    The steps for neurons are under "neurons cut" and so on.
    """
    types = table["types"].values()
    return {
        "types": len(types),
        "tried": sum("class" in entry for entry in types),
        **{step: sum(holds(entry, step) for entry in types) for step in STEPS},
        **{f"neurons {step}": sum(neurons_hold(entry, step) for entry in types) for step in NEURON_STEPS},
        "refused": sum(entry["kind"] == "refused" for entry in types),
    }


def markdown(table: Table, siblings: Mapping[str, Sequence[str]]) -> str:
    """Return the table as a Markdown page: how many types pass each step, then every type with its results.

    Args:
        table: From `TABLE`.
        siblings: Model type -> the types that its uniform cuts may be written as.
    """
    groups: dict[str, dict[str, Any]] = {"whole": {}, "partly": {}, "refused": {}, "failed": {}, "not tried": {}}
    for name, entry in table["types"].items():
        kind = entry["kind"]
        groups[kind if kind != "tried" else "whole" if whole(entry) else "partly"][name] = entry
    lines = [*_summary(table), *_siblings(siblings), *_whole(groups["whole"])]
    partly = [
        [name, entry["class"], ", ".join(step for step in STEPS if holds(entry, step)), why_not(entry)]
        for name, entry in groups["partly"].items()
    ]
    short = {name: neurons_in_short(entry) for name, entry in table["types"].items()}
    lines += _section("Some steps pass", ["model type", "class", "passes", "fails", "neurons"], partly, short)
    for kind, title in (
        ("refused", "Heads are refused"),
        ("failed", "Heads fail with another error"),
        ("not tried", "Not tried, because no tiny model could be built"),
    ):
        if groups[kind]:
            rows = [[name, why_not(entry)] for name, entry in groups[kind].items()]
            lines += _section(title, ["model type", "why", "neurons"], rows, short)
    tried = {name: why_not_neurons(entry) for name, entry in table["types"].items() if "class" in entry}
    rows = [[name, why] for name, why in tried.items() if why]
    lines += _section("Neurons are refused, or fail a step", ["model type", "why"], rows)
    return "\n".join(lines) + "\n"


def _summary(table: Table) -> list[str]:
    """Return the lines that say how many types pass each step."""
    number = counts(table)
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items())
    return [
        "# Model types",
        "",
        f"transformers has {number['types']} model types. For {number['tried']} of them a tiny random model was built "
        f"and tested step by step ({versions}):",
        "",
        "| step | model types that pass | what is tested |",
        "| --- | ---: | --- |",
        *(f"| {step} | {number[step]} | {meaning} |" for step, meaning in STEPS.items()),
        *(f"| neurons: {step} | {number[f'neurons {step}']} | {meaning} |" for step, meaning in NEURON_STEPS.items()),
        "",
        f"The heads of {number['refused']} are refused with a reason before anything is scored. Whatever the type, a "
        "cut model that differs from the masked one is never saved.",
        "",
        "`scripts/architectures` writes this page. `hies-export architectures` prints the same table. Each type is "
        "tested with a class for a task, such as `BertForSequenceClassification`, or with the base model if there is "
        "none. `config alone` means that stock transformers loads a uniform cut of heads without code from this "
        "package. The column `neurons` says which steps fail for neurons; the last table says why.",
    ]


def _siblings(siblings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines that say which types are written as others."""
    return [
        "",
        "## Written as another type",
        "",
        "The configs of these types take only numbers of heads that divide the width of the model. A uniform cut to "
        "another number is written as a type that computes the same of the same tensors, unless the model uses a field "
        "which that type lacks, such as a bias. Then, as for a type without such a sibling, the folder needs "
        "`modeling_hies.py`. `tests/slim/test_siblings.py` runs every pair on the same weights: their outputs are "
        "equal to the last bit. The language model of a LLaVA changes its type in the same way.",
        "",
        "| model type | written as |",
        "| --- | --- |",
        *(f"| {own} | {', '.join(others)} |" for own, others in siblings.items()),
    ]


def _whole(entries: Mapping[str, Any]) -> list[str]:
    """Return the lines of the types that pass every step."""
    lines = [
        "",
        f"## All steps pass ({len(entries)})",
        "",
        "`n/a` marks a step with nothing to compare.",
        "",
        "| model type | class | inputs | " + " | ".join(STEPS) + " | config alone | neurons |",
        "| --- | --- | --- |" + " --- |" * (len(STEPS) + 2),
    ]
    for name, entry in entries.items():
        results = [result.partition(":")[0] for result in (entry["steps"][step] for step in STEPS)]
        alone = "yes" if entry.get("config_alone") else "no"
        inputs = ", ".join(i for i in entry["inputs"] if not i.endswith("mask"))
        lines.append(
            f"| {name} | {entry['class']} | {inputs} | {' | '.join(results)} | {alone} | {neurons_in_short(entry)} |"
        )
    return lines


def _section(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], last: Mapping[str, str] | None = None
) -> list[str]:
    """Return the lines of a table with a title; `last` has the cells of its last column by the first one."""
    lines = ["", f"## {title} ({len(rows)})", "", f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = [*row[:-1], _cell(row[-1]), *([last[row[0]]] if last else [])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(text: str) -> str:
    # Otherwise these would end the column or start a link.
    return re.sub(r"([|\[\]])", r"\\\1", text)
