"""A classifier with a decoder, which reads the last end-of-text token, through every command."""

import json
from pathlib import Path

import pytest
import torch
from support.models import save_project, shake
from support.runs import hies
from support.tolerance import assert_near
from transformers import BartConfig, BartForSequenceClassification

import hies_export
from hies_export import PruningRecipe, RequestError
from hies_export.pipeline.load_job import load_job

SIZES = {"layers": 1, "attention_heads": 4, "ffn_dim": 32}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a BART that classifies, its tokenizer, rows and a recipe."""
    save_project(
        tmp_path,
        train=8,
        validation=8,
        calibration={"samples": 4, "batch_size": 2},
        prune={"alpha": 0.5, "budget": {"heads": 0.4}},
        measure={"shapes": [[8, 8]], "repeats": 2, "runtimes": ["torch"]},
    )
    layers = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIZES.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    config = BartConfig(vocab_size=15, d_model=24, max_position_embeddings=64, **layers, **tokens)
    shake(BartForSequenceClassification(config)).save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.mark.usefixtures("untraced")
def test_every_command_takes_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = project / "model"
    assert hies("inspect", model, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [sum(m["heads"] for m in found["attention"]), sum(m["neurons"] for m in found["mlp"])] == [12, 64]
    assert hies("run", project / "recipe.yaml") == 0
    assert hies("apply", project / "out" / "plan.json", model, "-o", project / "applied") == 0
    ids = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 8, 5, 3]])
    folders = ("out/slim", "applied", "model")
    with torch.no_grad():
        one, other, dense = (hies_export.load(project / folder)(input_ids=ids).logits for folder in folders)
    assert_near(one, other)
    assert not torch.allclose(one, dense, atol=1e-3)


@pytest.mark.parametrize("eos", [None, 14])
def test_rows_that_the_model_cannot_read_are_refused_before_anything_is_scored(project: Path, eos: int | None) -> None:
    config = project / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": eos}))
    with pytest.raises(RequestError, match="must run on the calibration rows, but BartForSequenceClass.* raises"):
        load_job(PruningRecipe.from_yaml(project / "recipe.yaml"))


def test_a_model_that_does_not_run_on_random_inputs_is_refused_before_anything_is_scored(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As it was: no end-of-text token among the random ones.
    monkeypatch.setattr("hies_export.model.tokens.end_of_text", lambda model: None)
    with pytest.raises(RequestError, match="must run on 8 x 8 random inputs to be measured, but BartFor.* <eos> token"):
        load_job(PruningRecipe.from_yaml(project / "recipe.yaml"))
