"""The committed table of model types is what the contract earns: every "yes" and every refusal is found again.

By default of the types in tests/support/representatives.py, with any release of transformers; `-m architectures` takes
the others, without the export, and `-m exports` exports all that can be. These markers are for the release that the
table was made with.
"""

import dataclasses
import json
import re
import runpy
import warnings
from collections.abc import Container, Iterable, Iterator

import pytest
import torch
import transformers
from support.architectures import model_types
from support.contract import MORE_STEPS, NEURON_STEPS, STEPS, Broken, Subject, score
from support.representatives import CUT, DECODERS, NEURONS, NEURONS_REFUSED, QUANTISED, REFUSED
from support.table_of_types import NEURON_STEPS as NEURONS_DESCRIBED
from support.table_of_types import STEPS as DESCRIBED
from support.table_of_types import TABLE, counts, holds, neurons_of, read_table

from hies_export.forms.onnx import export as onnx_export
from hies_export.kinds import MLP
from hies_export.model import kernels

ENTRIES = json.loads(TABLE.read_text(encoding="utf-8"))["types"]


def types(holding: Iterable[str], representative: Container[str], marker: pytest.MarkDecorator) -> list[object]:
    """Model types as parameters, all but the representative ones under a marker and slow."""
    return [pytest.param(name, marks=() if name in representative else (marker, pytest.mark.slow)) for name in holding]


def of_kind(kind: str) -> list[str]:
    return [name for name, entry in ENTRIES.items() if entry["kind"] == kind]


@pytest.fixture(autouse=True)
def _quiet_and_single_threaded() -> Iterator[None]:
    # What transformers warns of concerns dimensions as small as these; results do not depend on threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model_type", types(of_kind("tried"), CUT, pytest.mark.architectures))
def test_what_the_table_says_holds(model_type: str) -> None:
    entry, subject = ENTRIES[model_type], Subject.of(model_type)
    for name, step in STEPS.items():
        if name != "onnx" and holds(entry, name):
            step(subject)
    if holds(entry, "cut"):
        assert subject.config_alone() == entry["config_alone"]


@pytest.mark.parametrize(
    "model_type", types((name for name, entry in ENTRIES.items() if holds(entry, "onnx")), (), pytest.mark.exports)
)
def test_what_the_table_says_is_exported(model_type: str) -> None:
    STEPS["onnx"](Subject.of(model_type))


@pytest.mark.parametrize("name", types(DECODERS, (), pytest.mark.exports))
def test_a_decoder_that_does_not_generate_is_cut_and_exported(name: str) -> None:
    subject = Subject.of(name)
    for step in ("cut", "reload", "onnx"):
        STEPS[step](subject)


@pytest.mark.parametrize("model_type", types(QUANTISED, (), pytest.mark.exports))
def test_a_cut_in_8_bits_gives_nearly_the_same(model_type: str) -> None:
    MORE_STEPS["int8"](Subject.of(model_type))


@pytest.mark.parametrize("model_type", types(of_kind("refused"), REFUSED, pytest.mark.architectures))
def test_what_the_table_says_is_refused_for_that_reason(model_type: str) -> None:
    assert words(Subject.of(model_type).refusal()) == words(ENTRIES[model_type]["refused"])


def with_neurons(what: str) -> list[str]:
    """Model types whose neurons have `steps`, or are `refused`."""
    return [name for name, entry in ENTRIES.items() if what in entry.get("neurons", {})]


@pytest.mark.parametrize("model_type", types(with_neurons("steps"), NEURONS, pytest.mark.architectures))
def test_what_the_table_says_of_neurons_holds(model_type: str) -> None:
    entry, subject = ENTRIES[model_type], Subject.of(model_type, MLP)
    # Half a minute: heads and neurons at once are cut in four other types.
    left_out = {"onnx", "together"} if model_type == "mobilevit" else {"onnx"}
    for name, step in NEURON_STEPS.items():
        if name not in left_out and holds(neurons_of(entry), name):
            step(subject)
    if holds(neurons_of(entry), "cut"):
        assert subject.config_alone() == entry["neurons"]["config_alone"]
        assert sum(module.units for module in subject.modules) == entry["neurons"]["units"]


@pytest.mark.parametrize(
    "model_type",
    types(
        (name for name in with_neurons("steps") if holds(neurons_of(ENTRIES[name]), "onnx")), (), pytest.mark.exports
    ),
)
def test_what_the_table_says_of_neurons_is_exported(model_type: str) -> None:
    NEURON_STEPS["onnx"](Subject.of(model_type, MLP))


@pytest.mark.parametrize("model_type", types(with_neurons("refused"), NEURONS_REFUSED, pytest.mark.architectures))
def test_neurons_are_refused_for_the_reason_in_the_table(model_type: str) -> None:
    assert Subject.of(model_type, MLP).refusal() == ENTRIES[model_type]["neurons"]["refused"]


def test_the_representatives_are_in_the_table() -> None:
    assert CUT.keys() <= set(of_kind("tried"))
    assert REFUSED.keys() <= set(of_kind("refused"))
    assert all(holds(ENTRIES[name.partition("/")[0]], "onnx") for name in QUANTISED)
    assert all(holds(neurons_of(ENTRIES[name]), "cut") for name in NEURONS)
    assert all("refused" in ENTRIES[name]["neurons"] for name in NEURONS_REFUSED)
    reasons = {name: words(ENTRIES[name]["refused"]) for name in of_kind("refused")}
    assert set(reasons.values()) == {reasons[name] for name in REFUSED}
    assert len({reasons[name] for name in REFUSED}) == len(REFUSED)


def words(reason: str | None) -> str:
    """Return a reason without the names of types, classes, modules and sizes."""
    outside = re.sub(r"\([^)]*\)?", "", reason or "")
    return " ".join(word for word in outside.split() if word.isalpha() and word.islower() and word not in ENTRIES)


def test_the_table_is_whole() -> None:
    table = read_table()
    if transformers.__version__ == table["versions"]["transformers"]:
        assert list(table["types"]) == model_types()
    assert set(DESCRIBED) == set(STEPS)
    assert set(NEURONS_DESCRIBED) == set(NEURON_STEPS)
    number = counts(table)
    assert number["cut"] >= 100
    assert number["onnx"] >= 60
    assert all(holds(table["types"][name], "onnx") for name in onnx_export.EXPORTED)
    assert all(number[f"neurons {step}"] >= 200 for step in ("cut", "reload", "train"))
    # Most are not run yet: scripts/architectures --units neurons --steps onnx
    assert number["neurons onnx"] >= 100
    root = TABLE.parents[2]
    script = runpy.run_path(str(root / "scripts" / "architectures"))
    assert (root / "docs" / "architectures.md").read_text(encoding="utf-8") == script["page"](table)  # else run it


def test_a_broken_score_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject.of("gemma2")
    score(subject)
    softmax = kernels._softmax
    monkeypatch.setattr(
        kernels, "_softmax", lambda call, *rest: softmax(dataclasses.replace(call, softcap=None), *rest)
    )
    with pytest.raises(Broken, match="HIS"):
        score(subject)
