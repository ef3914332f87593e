"""Tiny random models and rows in the place of a recipe's, so that its table can be tried offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import transformers
from PIL import Image

from hies_export.cli.digits import MODEL, prepare_quickstart
from hies_export.evaluate.metrics import METRICS
from hies_export.pipeline.recipe import PruningRecipe

WORDS = ["<pad>", "<unk>", "<s>", "</s>", "<image>", "USER:", "ASSISTANT:", *"abcdefghij", "yes", "no"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}


def smoke_overrides(recipe: PruningRecipe, folder: Path) -> dict[str, Any]:
    """What to set in a recipe to run it on a tiny model of its task; made in `folder` once."""
    metric = recipe.evaluation.metrics[0] if recipe.evaluation.metrics else ""
    regression = metric in METRICS and METRICS[metric].of == "numbers"
    made = folder / (recipe.task + "-regression" * regression)
    if not made.exists():
        made.mkdir()
        MAKERS[recipe.task](made, 1 if regression else 2)
    data = json.loads((made / "data.json").read_text())
    return {
        "model": str(made / "model"),
        "dtype": "float32",
        "data": data,
        "calibration": {"samples": 8, "batch_size": 8},
        # What lm-eval would download is judged by perplexity here.
        "evaluation": {"samples": 24, "batch_size": 8, "metrics": recipe.evaluation.metrics},
        "measure": {"runtimes": ["torch"], "shapes": [[2]] if "image" in data else [[2, 16]]},
    }


def _sentences(count: int) -> list[str]:
    return [" ".join("abcdefghij"[(i * 7 + j * 3) % 10] for j in range(3 + i % 5)) for i in range(count)]


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    numbers = {word: number for number, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=["<image>"], model_max_length=64, **special
    )


def _write(folder: Path, rows: list[dict[str, Any]], **columns: Any) -> None:
    files = {}
    for split in ("train", "validation"):
        files[split] = str(folder / f"{split}.parquet")
        features = {"image": datasets.Image()} if "image" in rows[0] else {}
        table = datasets.Dataset.from_list(rows)
        for name, feature in features.items():
            table = table.cast_column(name, feature)
        table.to_parquet(files[split])
    (folder / "data.json").write_text(json.dumps({**columns, "files": files}))


def _text(folder: Path, labels: int) -> None:
    config = transformers.BertConfig(vocab_size=len(WORDS), num_labels=labels, max_position_embeddings=64, **SMALL)
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    _tokenizer().save_pretrained(folder / "model")
    rows = [
        {"sentence": text, "other": text[::-1], "label": (i % 5) / 2 if labels == 1 else i % 2}
        for i, text in enumerate(_sentences(300))
    ]
    _write(folder, rows, text=["sentence", "other"], label="label", max_length=64)


def _digits(folder: Path, labels: int) -> None:
    prepare_quickstart(folder, epochs=1)
    (folder / MODEL).rename(folder / "model")
    files = {split: str(folder / "digits" / f"{split}.parquet") for split in ("train", "validation")}
    (folder / "data.json").write_text(json.dumps({"image": "image", "label": "label", "files": files}))


def _decoder() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, pad_token_id=0, **SMALL)


def _language(folder: Path, labels: int) -> None:
    transformers.LlamaForCausalLM(_decoder()).save_pretrained(folder / "model")
    _tokenizer().save_pretrained(folder / "model")
    _write(folder, [{"text": text} for text in _sentences(2000)], text="text", max_length=16)


def _images_and_text(folder: Path, labels: int) -> None:
    vision = transformers.CLIPVisionConfig(image_size=16, patch_size=4, **SMALL)
    config = transformers.LlavaConfig(
        text_config=_decoder(), vision_config=vision, image_token_index=WORDS.index("<image>"), pad_token_id=0
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder / "model")
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    transformers.LlavaProcessor(
        images, _tokenizer(), patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder / "model")
    rows = [
        {"image": Image.effect_noise((16, 16), 10 + i % 50).convert("RGB"), "question": text, "answer": "yes"}
        for i, text in enumerate(_sentences(300))
    ]
    _write(folder, rows, image="image", prompt="USER: <image> {question} ASSISTANT:", answer="answer")


MAKERS = {
    "text-classification": _text,
    "image-classification": _digits,
    "text-generation": _language,
    "image-text-to-text": _images_and_text,
}
