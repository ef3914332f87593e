"""Checkpoints whose files are well-formed, but whose fields are not: each is resolved as a run does, and predicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from sentence_transformers import CrossEncoder
from transformers import ViTImageProcessorPil

from hies_export import PruningRecipe
from hies_export.evaluate.predict import predict
from support.loading import load_pruning
from support.models import bert, causal_lm, generative_tokenizer, vit, word_tokenizer, write_rows
from support.reads import Read
from support.sentences import bert_encoder, dense, sentence_folder

# In a file of each kind, the fields of the tokenizers and models of transformers 4 are still found.
SPECIAL_TOKENS = {"pad_token": "[PAD]", "unk_token": {"content": "[UNK]", "lstrip": False, "normalized": False}}
SMALL = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 8}


def used_checkpoints(folder: Path) -> list[Read]:
    """Write a BERT, a ViT, a LLaMA and an embedding model with rows each; every file of JSON in them is a target."""
    texts, images, stories = folder / "texts", folder / "images", folder / "stories"
    bert(**SMALL, num_labels=2, max_position_embeddings=16).save_pretrained(texts)
    word_tokenizer(["good", "bad", "fine"]).save_pretrained(texts)
    (texts / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS))
    vit(**SMALL, num_labels=2).save_pretrained(images)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(images)
    causal_lm(num_hidden_layers=1, hidden_size=8).save_pretrained(stories)
    generative_tokenizer().save_pretrained(stories)

    rows = write_rows(folder / "rows.jsonl", 4)
    for row in range(4):
        place = folder / "pictures" / "ab"[row % 2] / f"{row}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("RGB", (16, 16), (60 * row, 0, 0)).save(place)
    lines = folder / "lines.txt"
    lines.write_text("a b c\nd e f g\nh i j k l\na c e\n")
    classified = {"task": "text-classification", "data": {"text": ["sentence"], "label": "label"}}
    pictured = {"task": "image-classification", "data": {"image": "image", "label": "label"}}
    written = {"task": "text-generation", "data": {"text": ["text"], "max_length": 8}}
    embedder = _embedder(folder / "embedder")
    embedded = {"task": "feature-extraction", "data": {"text": ["sentence"]}}
    return [
        *_reads("a BERT", texts, rows, **classified),
        *_reads("a ViT", images, folder / "pictures", **pictured),
        *_reads("a LLaMA", stories, lines, **written),
        *_reads("an embedding model", embedder, rows, **embedded),
        *_reads("a reranker", _reranker(folder / "reranker"), rows, **classified),
    ]


def _embedder(folder: Path) -> Path:
    """Write a SentenceTransformer with every module and field that is known."""
    layers = [dense(24, 8), ("LayerNorm", {"dimension": 8}, {"norm.weight": torch.ones(8), "norm.bias": torch.ones(8)})]
    called = {"max_length": 12, "add_special_tokens": True, "padding": True, "truncation": True}
    return sentence_folder(
        folder,
        [*layers, ("Dropout", {"dropout": 0.1}, {}), ("Normalize", {"module_input_name": "sentence_embedding"}, {})],
        pooling={"embedding_dimension": 24, "pooling_mode": "mean", "include_prompt": True},
        text={
            **{"max_seq_length": 16, "do_lower_case": True, "query_length": 9, "document_length": 9},
            **{"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"},
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "processing_kwargs": {"text": called, "common": {"max_length": 10}},
            "tokenizer_args": {"model_max_length": 14, "padding_side": "right", "truncation_side": "right"},
            **{"model_args": {"dtype": "float32"}, "config_args": {"num_hidden_layers": 1}, "unpad_inputs": False},
        },
        options={
            **{"model_type": "SentenceTransformer", "similarity_fn_name": "dot", "truncate_dim": 6},
            **{"prompts": {"query": "w1 ", "document": "", "x": "w2 "}, "default_prompt_name": "x"},
        },
        encoder=bert_encoder(**SMALL, num_attention_heads=6),
    )


def _reranker(folder: Path) -> Path:
    bert(**SMALL, num_labels=2, max_position_embeddings=16).save_pretrained(folder)
    word_tokenizer(["good", "bad", "fine"]).save_pretrained(folder)
    how = {"prompts": {"q": "good "}, "activation_fn": torch.nn.Identity(), "max_length": 12}
    CrossEncoder(str(folder), device="cpu", **how).save_pretrained(str(folder), create_model_card=False)
    return folder


def _reads(name: str, model: Path, rows: Path, *, task: str, data: dict[str, Any]) -> list[Read]:
    use = _use(model, rows, task=task, data=data)
    shares = {"config.json": 30}
    return [
        Read(f"{name}: {file.relative_to(model)}", "fields", file, use, shares.get(file.name, 15))
        for file in sorted(model.glob("**/*.json"))
    ]


def _use(model: Path, rows: Path, *, task: str, data: dict[str, Any]) -> Callable[[], object]:
    recipe = PruningRecipe(
        model=str(model),
        task=task,
        data=data | {"files": {"train": str(rows)}},
        calibration={"split": "train", "samples": 2, "batch_size": 2},
        evaluation={"split": "train", "samples": 2},
        prune={"budget": {"heads": 0.5}},
        measure={"runtimes": ["torch"], "shapes": [[1, 4]]},
        output=str(model.parent / "out"),
    )

    def use() -> None:
        resolved = load_pruning(recipe)
        predict(resolved.model, resolved.rows.evaluation)

    return use
