"""Runs of models whose attention is code of their own: DeBERTa and MPNet."""

import json
from pathlib import Path
from typing import Any

import torch
from support.models import SIX_HEADS, shake, word_tokenizer, write_recipe, write_rows
from support.runs import hies, without_tracing
from support.sentences import WORDS, load_embedder, sentence_folder
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    MPNetConfig,
    MPNetModel,
)

TIMED = {"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 2}
# What the configs of DeBERTa v3 have.
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 8,
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "max_relative_positions": -1,
}


def save_deberta(folder: Path, **options: Any) -> None:
    config = DebertaV2Config(**(SIX_HEADS | {"vocab_size": 100, "max_position_embeddings": 64} | DEBERTA | options))
    shake(DebertaV2ForSequenceClassification(config)).save_pretrained(folder)
    word_tokenizer(["[MASK]", "good", "bad", "fine", "poor", "great"], model_max_length=64).save_pretrained(folder)


def test_a_deberta_loses_heads_and_neurons(tmp_path: Path) -> None:
    save_deberta(tmp_path / "model")
    for name, count in (("train", 60), ("validation", 30)):
        write_rows(tmp_path / f"{name}.jsonl", count)
    files = {"train": "train.jsonl", "validation": "validation.jsonl"}
    prune = {"criterion": "hies", "modules": ["attention", "mlp"], "budget": {"flops": 0.7}}
    recipe = write_recipe(
        tmp_path,
        "text-classification",
        data={"files": files, "text": "sentence", "label": "label"},
        calibration={"samples": 16, "batch_size": 8},
        prune=prune,
        measure=TIMED,
    )
    with without_tracing():
        assert hies("run", recipe) == 0
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    assert len(scores["entropy"]) == 3
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/slim", trust_remote_code=True)
    assert sum(p.numel() for p in stock.parameters()) < 60_000


def test_an_mpnet_that_lost_heads_embeds_as_the_masked_one(tmp_path: Path) -> None:
    config = MPNetConfig(**(SIX_HEADS | {"vocab_size": 100, "max_position_embeddings": 64}))
    dense = shake(MPNetModel(config)).eval()
    sentence_folder(tmp_path / "model", encoder=dense)
    for name in ("train", "validation"):
        rows = [{"text": " ".join(WORDS[(i * 7 + j) % 90] for j in range(3 + i % 5))} for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = write_recipe(
        tmp_path,
        "feature-extraction",
        data={"files": {"train": "train.jsonl", "validation": "validation.jsonl"}, "text": "text"},
        calibration={"samples": 16, "batch_size": 8},
        prune={"criterion": "hies", "budget": {"heads": 0.5}},
        measure=TIMED,
    )
    with without_tracing():
        assert hies("run", recipe) == 0
    plan = json.loads((tmp_path / "out/plan.json").read_text())["kept"]
    kept = {name: entry if isinstance(entry, list) else entry["units"] for name, entry in plan.items()}
    assert len({tuple(units) for units in kept.values()}) > 1  # the layers do not keep the same heads
    for name, units in kept.items():
        projection = dense.get_submodule(name.removeprefix("auto_model.")).o
        removed = [column for column in range(48) if column // 8 not in units]
        with torch.no_grad():
            projection.weight[:, removed] = 0
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out/slim")("w1 w2 w3 w7", return_tensors="pt")
    with torch.no_grad():
        expected = dense(**tokens).last_hidden_state.mean(1)
        stock = AutoModel.from_pretrained(tmp_path / "out/slim", trust_remote_code=True)
        assert torch.allclose(stock(**tokens).last_hidden_state.mean(1), expected, atol=1e-4)
        found = load_embedder(tmp_path / "out/slim")(**tokens).sentence_embedding
    assert torch.allclose(found, torch.nn.functional.normalize(expected, dim=-1), atol=1e-4)
