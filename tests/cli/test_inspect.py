"""`inspect` on models, plans and runs: both kinds of units, and why one of them cannot be cut."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
from support.models import bert
from support.neurons import neurons
from transformers import BertForSequenceClassification

from hies_export import Kept, PruningPlan, UnsupportedModelError
from hies_export.cli.main import main
from hies_export.units.find import FINDERS

PLAN = PruningPlan(
    kept={"layer.0.attention": Kept((0, 2, 3), 4), "layer.0": Kept(tuple(range(1000)), 1536, kind="mlp")},
    criterion="hies",
    alpha=0.5,
    seed=3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    bert().save_pretrained(path)
    return path


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command where some kinds are refused; return what it prints, and the result."""

    def run(path: Path, *refused: str, code: int = 0) -> tuple[str, dict[str, Any]]:
        monkeypatch.setitem(FINDERS, "mlp", lambda model, batch: neurons(model))
        for kind in refused:
            monkeypatch.setitem(FINDERS, kind, Mock(side_effect=UnsupportedModelError(f"no {kind} here [bold]")))
        assert main(["inspect", str(path), "--json"]) == code
        out, err = capsys.readouterr()
        if code != 0:
            return err, {}
        *lines, result = out.splitlines()
        return "\n".join(lines), json.loads(result)

    return run


SIZES = {"attention": "18 heads", "mlp": "192 neurons"}


def test_a_model_shows_heads_and_neurons(folder: Path, inspect: Any) -> None:
    text, result = inspect(folder)
    assert all(f"{size}; all of them can be scored and cut" in text for size in SIZES.values())
    assert "feed-forward block" in text
    assert not {"refused", "cut"} & set(result)
    name = "bert.encoder.layer.0.attention.self"
    assert result["attention"][0] == {"name": name, "heads": 6, "key_value_heads": 6, "head_width": 8}
    assert len(result["attention"]) == 3
    assert result["mlp"] == [{"name": f"bert.encoder.layer.{i}", "neurons": 64} for i in range(3)]


@pytest.mark.parametrize(("refused", "other"), [("mlp", "attention"), ("attention", "mlp")])
def test_one_kind_may_be_refused(refused: str, other: str, folder: Path, inspect: Any) -> None:
    text, result = inspect(folder, refused)
    assert SIZES[other] in text
    assert SIZES[refused] not in text
    assert f"{SIZES[refused].split()[1]} cannot be cut: no {refused} here [bold]" in text
    assert result["refused"] == {refused: f"no {refused} here [bold]"}
    assert refused not in result


def test_a_model_without_any_units_is_refused(folder: Path, inspect: Any) -> None:
    assert "error: no attention here [bold]" in inspect(folder, "attention", "mlp", code=2)[0]


def test_a_model_that_does_not_run_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = create_autospec(BertForSequenceClassification.forward, side_effect=IndexError("no row 7"))
    monkeypatch.setattr(BertForSequenceClassification, "forward", forward)
    assert main(["inspect", str(folder)]) == 2
    said = "error: a model must run on random inputs, but BertForSequenceClassification raises IndexError: no row 7"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan.json", "."])
def test_a_plan_and_a_run_show_both_kinds(name: str, tmp_path: Path, inspect: Any) -> None:
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    text, result = inspect(tmp_path / name)
    assert text.splitlines() == [
        "1 of 4 heads and 536 of 1,536 neurons removed by hies, alpha 0.5, seed 3",
        *("", "heads", "■ kept  · cut", "  0  ■ · ■ ■  3/4"),
        *("", "neurons", "■ kept  · cut", "  0  ■■■■■■■■■■■■■■■·········  1,000/1,536"),
    ]
    assert result["heads"] == {"total": 4, "removed": 1}
    assert result["neurons"] == {"total": 1536, "removed": 536}
    assert result["modules"]["layer.0"] == {"kind": "mlp", "kept": 1000}


def test_a_slim_checkpoint_says_what_was_cut(folder: Path, tmp_path: Path, inspect: Any) -> None:
    slim = shutil.copytree(folder, tmp_path / "slim")
    (slim / "hies_plan.json").write_text(PLAN.to_json())
    text, result = inspect(slim)
    assert "what was cut from the dense model:\n1 of 4 heads and 536 of 1,536 neurons removed" in text
    assert result["cut"]["neurons"] == {"total": 1536, "removed": 536}
