"""Make tiny models that tag words, their tokenizer, and sentences with entities."""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from support.models import SIX_HEADS, shake, write_recipe

TAGS = ["O", "B-place", "I-place", "B-name", "I-name"]
LETTERS = "abcdefgh"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", *LETTERS, *(f"##{letter}" for letter in LETTERS), "ab", "##cd"]


def tagger(**options: Any) -> BertForTokenClassification:
    """Return a BERT that gives the words of `sentences` five classes."""
    names = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: number for number, tag in enumerate(TAGS)}}
    config = SIX_HEADS | {"vocab_size": 100, "max_position_embeddings": 64, "num_hidden_layers": 2} | names
    del config["num_labels"]
    return shake(BertForTokenClassification(BertConfig(**(config | options))))


def tag_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer that cuts words into the longest of `PIECES`."""
    numbers = {piece: number for number, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **({"model_max_length": 64} | special | options))


def pieces_of(word: str) -> list[int]:
    """Return the numbers of a word's pieces, by hand: the longest that fits, from the left."""
    found, start = [], 0
    while start < len(word):
        ends = range(len(word), start, -1)
        piece = next(p for p in (("##" if start else "") + word[start:end] for end in ends) if p in PIECES)
        found.append(PIECES.index(piece))
        start += len(piece.removeprefix("##"))
    return found


def sentences(count: int, *, seed: int = 0) -> list[dict[str, list[str]]]:
    """Return rows of words and their tags; entities have up to three words."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        words = ["".join(draw.choices(LETTERS, k=draw.randint(1, 4))) for _ in range(draw.randint(2, 9))]
        tags: list[str] = []
        while len(tags) < len(words):
            kind, length = draw.choice(["place", "name"]), draw.randint(1, 3)
            tags += [f"B-{kind}", *[f"I-{kind}"] * (length - 1)] if draw.random() < 0.4 else ["O"] * length
        rows.append({"tokens": words, "ner_tags": tags[: len(words)]})
    return rows


def words_of(text: str) -> list[tuple[int, int]]:
    """Return where the words of a text are: letters side by side, and every full stop."""
    return [match.span() for match in re.finditer(r"\w+|\.", text)]


def save_tagger(
    folder: Path, *, train: int = 120, validation: int = 60, model: Mapping[str, Any] | None = None, **sections: Any
) -> Path:
    """Write a folder with `tagger`, its tokenizer, rows and a recipe with these sections; return the recipe."""
    tagger(**(model or {})).save_pretrained(folder / "model")
    tag_tokenizer().save_pretrained(folder / "model")
    for seed, (split, count) in enumerate((("train", train), ("validation", validation))):
        rows = "".join(f"{json.dumps(row)}\n" for row in sentences(count, seed=seed))
        (folder / f"{split}.jsonl").write_text(rows)
    files = {"train": "train.jsonl", "validation": "validation.jsonl"}
    usual = {
        "data": {"files": files, "text": "tokens", "label": "ner_tags"},
        "calibration": {"samples": 40, "batch_size": 8},
        "measure": {"shapes": [[2, 16]], "repeats": 2, "runtimes": ["torch"]},
    }
    return write_recipe(folder, "token-classification", **(usual | sections))
