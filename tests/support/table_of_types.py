"""Read the table of model types: which of them pass the contract in contract.py, and why others do not.

`scripts/architectures` runs the contract on a tiny random model of every type and writes the results to
architectures.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("architectures.json")

STEPS = {
    "score": "HIS and entropy equal those computed from eager attention maps, one sample at a time",
    "cut": "an uneven and a uniform cut give the outputs of the dense model with the same heads masked, to 1e-4",
    "reload": "both cut models keep their outputs when saved and loaded in every supported way, twice",
    "train": "one gradient step lowers the loss of the slim model",
    "onnx": "ONNX Runtime gives the outputs that torch gives for the slim model",
}

NEURON_STEPS = {
    "score": "HIS of neurons alone equals that computed one sample at a time",
    "cut": "the same for the neurons of feed-forward blocks",
    "reload": "the same for both cuts of neurons",
    "train": "the same for the model with fewer neurons",
    "onnx": "the same for the model with fewer neurons",
    "together": "heads and neurons cut at once pass the steps cut and reload",
}

Table = Mapping[str, Any]
Entry = Mapping[str, Any]


def read_table() -> dict[str, Any]:
    """Return the table: `versions` of libraries, and `types` by name.

    An entry has these keys:

    - `kind`: "tried", "refused", "failed" or "not tried".
    - `steps`: Of a tried type, "yes" or the reason of the failure for each step.
    - `refused`: Of any other type, the reason.
    - `class`, `inputs`, `heads`: The class and the inputs of the tiny model, and its numbers of query and of
      key/value heads over all layers.
    - `config_alone`: Whether stock transformers loads a uniform cut without code from this package.
    - `neurons`: The same for the neurons of feed-forward blocks, with `units`, their number over all blocks.
    """
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def neurons_of(entry: Entry) -> Entry:
    """Return the results for the neurons of a model type, which have their own entry."""
    return entry.get("neurons", {})


def holds(entry: Entry, step: str) -> bool:
    """Return whether a model type, or its neurons, passes a step."""
    return bool(entry.get("steps", {}).get(step) == "yes")


def counts(table: Table) -> dict[str, int]:
    """Return how many model types exist, were tried, and pass each step; steps for neurons are "neurons cut"..."""
    types = table["types"].values()
    return {
        "types": len(types),
        "tried": sum("class" in entry for entry in types),
        **{step: sum(holds(entry, step) for entry in types) for step in STEPS},
        **{f"neurons {step}": sum(holds(neurons_of(entry), step) for entry in types) for step in NEURON_STEPS},
        "refused": sum(entry["kind"] == "refused" for entry in types),
    }
