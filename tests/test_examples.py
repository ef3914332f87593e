"""The example scripts, as a newcomer starts them: no arguments, no network, in a folder of their own."""

import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.runs import made_once, run_script, without_tracing
from transformers import BertForSequenceClassification

ROOT = Path(__file__).resolve().parents[1]
# What each of them must have said: numbers that its words claim, of which `less` is below `more`.
SAID = {
    "bert_stage_by_stage": r"cut against masked: (0\.0e\+00|\d\.\de-0[5-9])\n(?s:.*)ONNX against torch: \d\.\de-0[4-9]",
    "recover_with_trainer": r"% of the heads (?P<less>0\.\d+)\n(?s:.*)epoch: (?P<more>[01]\.\d+), with 5 heads",
    "heal_with_lora": r"cut: perplexity (?P<more>\d+\.\d+)\n(?s:.*)healed: perplexity (?P<less>\d+\.\d+)",
    "llama_generate_from_onnx": r"cache: 256 -> 192 bytes per token\n(?s:.*)torch writes the same: True",
    "llava_both_towers": r"graphs: decoder_model_merged.onnx, embed_tokens.onnx, vision_encoder.onnx",
    "custom_criterion": r"his-per-weight  70% of the heads removed: accuracy \d\.\d+",
    "custom_task": r"brier +0\.0\d+ +0\.0\d+(?s:.*)export: logits",
}
SCRIPTS = sorted(path for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text())
# Most of their time goes into graphs; tests/onnx and tests/tasks/test_own_task.py do the same in smaller models.
EXPORTED = {"custom_task", "llama_generate_from_onnx", "llava_both_towers"}
UNTRACED = {"heal_with_lora", "recover_with_trainer"}  # they say nothing of ONNX


@pytest.fixture
def trained_once(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Train the classifier of three of them once, for all processes of the tests."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    tiny = importlib.import_module("tiny")
    monkeypatch.setitem(sys.modules, "tiny", sys.modules.pop("tiny"))  # the scripts' own import of it, only here
    trained = made_once(tmp_path_factory, "sentiment", tiny.sentiment)
    monkeypatch.setattr(
        tiny, "sentiment", lambda folder: shutil.copytree(trained, folder, dirs_exist_ok=True) / "model"
    )


def first_layer(sentiment: Callable[[Path], Path], folder: Path) -> Path:
    """Leave one layer of the trained classifier: each takes seconds in a graph."""
    model = sentiment(folder)
    BertForSequenceClassification.from_pretrained(model, num_hidden_layers=1).save_pretrained(model)
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("trained_once")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.exports if path.stem in EXPORTED else ()) for path in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_an_example_does_what_it_says(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if path.stem == "bert_stage_by_stage":
        tiny: Any = sys.modules["tiny"]
        monkeypatch.setattr(tiny, "sentiment", partial(first_layer, tiny.sentiment))
    with without_tracing() if path.stem in UNTRACED else nullcontext():
        run_script(path)
    out = capsys.readouterr().out
    said = re.search(SAID[path.stem], out)
    assert said, out
    assert not said.groupdict() or float(said["less"]) < float(said["more"]), out
    # Nothing of ours is left behind; ONNX Runtime and torch leave files of their own.
    assert [*here.iterdir(), *temporary.glob("tmp*")] == []


def test_all_examples_are_listed() -> None:
    assert {path.stem for path in SCRIPTS} == SAID.keys()
    pages = (ROOT / "README.md").read_text() + "".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
    assert [path.name for path in SCRIPTS if path.name not in pages] == []
