"""A classifier with a decoder, which reads the last end-of-text token, through every command."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from support.models import WORDS, shake, write_rows
from support.runs import hies
from support.tolerance import assert_near
from transformers import BartConfig, BartForSequenceClassification, PreTrainedTokenizerFast

import hies_export
from hies_export.errors import RequestError
from hies_export.pipeline.resolve import resolve
from hies_export.recipe import PruningRecipe


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a BART that classifies, its tokenizer, rows and a recipe."""
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    numbers = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    layers = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIZES.items()}
    config = BartConfig(vocab_size=len(numbers), d_model=24, max_position_embeddings=64, **layers)
    shake(BartForSequenceClassification(config)).save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path / "model")
    for split, count in (("train", 8), ("validation", 8)):
        write_rows(tmp_path / f"{split}.jsonl", count, lambda i: i % 3)
    recipe = {
        "model": "model",
        "task": "text-classification",
        "data": {
            "files": {"train": "train.jsonl", "validation": "validation.jsonl"},
            "text": "sentence",
            "label": "label",
        },
        "calibration": {"samples": 4, "batch_size": 2},
        "prune": {"alpha": 0.5, "budget": {"heads": 0.4}},
        "measure": {"shapes": [[8, 8]], "repeats": 2, "runtimes": ["torch"]},
        "output": "out",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 32}


@pytest.mark.usefixtures("untraced")
def test_every_command_takes_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = project / "model"
    assert hies("inspect", model, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [sum(m["heads"] for m in found["attention"]), sum(m["neurons"] for m in found["mlp"])] == [24, 128]
    assert hies("run", project / "recipe.yaml") == 0
    assert hies("apply", project / "out" / "plan.json", model, "-o", project / "applied") == 0
    assert hies("bench", model, project / "applied", "--runtime", "torch", "--shape", "2x8", "--repeats", "2") == 0
    ids = torch.tensor([[0, 5, 6, 7, 2], [0, 9, 8, 5, 2]])
    with torch.no_grad():
        one, other, dense = (
            hies_export.load(project / folder)(input_ids=ids).logits for folder in ("out/slim", "applied", "model")
        )
    assert_near(one, other)
    assert not torch.allclose(one, dense, atol=1e-3)


@pytest.mark.parametrize("eos", [None, 9])
def test_rows_that_the_model_cannot_read_are_refused_before_anything_is_scored(project: Path, eos: int | None) -> None:
    config = project / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": eos}))
    with pytest.raises(
        RequestError, match="must run on the calibration rows, but BartForSequenceClassification raises"
    ):
        resolve(PruningRecipe.from_yaml(project / "recipe.yaml"))


def test_a_model_that_does_not_run_on_random_inputs_is_refused_before_anything_is_scored(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As it was: no end-of-text token among the random ones.
    monkeypatch.setattr("hies_export.model.tokens.end_of_text", lambda model: None)
    with pytest.raises(RequestError, match="must run on 8 x 8 random inputs to be measured, but BartFor.* <eos> token"):
        resolve(PruningRecipe.from_yaml(project / "recipe.yaml"))
