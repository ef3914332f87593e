"""The committed table of model types is what the contract earns: every "yes" is run again.

By default all steps but the export, which takes seconds, and the export of a few; `-m architectures` exports all.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from support.architectures import model_types
from support.contract import STEPS, Broken, Subject, cut, score, train
from torch import nn

from hies_export.cli.main import main
from hies_export.errors import CutMismatchError, RequestError, UnsupportedModelError
from hies_export.model import attention
from hies_export.prunable.architectures import STEPS as DESCRIBED
from hies_export.prunable.architectures import TABLE, counts, holds, markdown, read_table, whole

ENTRIES = json.loads(TABLE.read_text(encoding="utf-8"))["types"]

# One of each kind: encoder, decoder, encoder-decoder; text, images, audio, both; fused, grouped, soft-capped, hybrid.
REPRESENTATIVE = (
    "albert",
    "bart",
    "distilbert",
    "gemma2",
    "gpt2",
    "llama",
    "llava",
    "modernbert",
    "phi3",
    "vit",
    "wav2vec2",
)


@pytest.fixture(autouse=True)
def _quiet_and_single_threaded() -> Iterator[None]:
    # What transformers warns of concerns dimensions as small as these; results do not depend on threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model_type", [name for name, entry in ENTRIES.items() if entry["kind"] == "tried"])
def test_what_the_table_says_holds(model_type: str) -> None:
    entry, subject = ENTRIES[model_type], Subject.of(model_type)
    for name, step in STEPS.items():
        if name != "onnx" and holds(entry, name):
            step(subject)
    if holds(entry, "cut"):
        assert subject.config_alone() == entry["config_alone"]


@pytest.mark.parametrize(
    "model_type",
    [
        # Whoever leaves out what is slow leaves out the others too.
        pytest.param(name, marks=() if name in REPRESENTATIVE else (pytest.mark.architectures, pytest.mark.slow))
        for name, entry in ENTRIES.items()
        if holds(entry, "onnx")
    ],
)
def test_what_the_table_says_is_exported(model_type: str) -> None:
    STEPS["onnx"](Subject.of(model_type))


@pytest.mark.parametrize("model_type", [name for name, entry in ENTRIES.items() if entry["kind"] == "refused"])
def test_what_the_table_says_is_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError):
        assert Subject.of(model_type).sites


def test_the_table_is_whole() -> None:
    table = read_table()
    assert list(table["types"]) == model_types()
    assert set(DESCRIBED) == set(STEPS)
    assert all(whole(table["types"][name]) or name in ("bart",) for name in REPRESENTATIVE)
    number = counts(table)
    assert number["cut"] >= 100
    assert number["onnx"] >= 60
    document = (TABLE.parents[1] / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert document == markdown(table)  # else run scripts/architectures


def test_a_broken_cut_breaks_the_contract() -> None:
    subject = Subject.of("llama")
    slim = subject.slim[False]
    with torch.no_grad():
        slim.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    with pytest.raises(CutMismatchError, match="differs"):
        cut(subject)


def test_a_broken_score_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject.of("gemma2")
    score(subject)
    log_softmax = attention._log_softmax
    monkeypatch.setattr(
        attention, "_log_softmax", lambda call, *rest: log_softmax(dataclasses.replace(call, softcap=None), *rest)
    )
    with pytest.raises(Broken, match="HIS"):
        score(subject)


def test_a_layer_that_learns_nothing_breaks_the_contract() -> None:
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach()).detach()

    subject = Subject.of("bert")
    subject.slim[False].bert.encoder.layer[0].attention.output.dense.__class__ = Detached
    with pytest.raises(Broken, match="takes no gradient any more"):
        train(subject)


def test_architectures_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["architectures", "bert", "falcon", "--json"]) == 0
    out = capsys.readouterr().out
    assert "BertForSequenceClassification" in out
    assert "computes its own" in out
    assert json.loads(out.splitlines()[-1]) == read_table(["bert", "falcon"])
    assert main(["architectures"]) == 0
    assert str(counts(read_table())["cut"]) in capsys.readouterr().out
    assert main(["architectures", "brt"]) == 2
    assert "did you mean 'bert'?" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(RequestError, match="must be one of transformers .*, got 'brt'"):
        read_table(["brt"])


def test_architectures_command_imports_nothing_heavy() -> None:
    code = (
        "import sys; from hies_export.cli.main import main; main(['architectures', 'bert']); "
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
