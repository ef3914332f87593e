"""Make tiny models that find answers in texts, and questions for them."""

import json
import random
import re
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedModel, PreTrainedTokenizerFast

from support.models import SIX_HEADS, shake, word_tokenizer, write_recipe

LETTERS = [*"bcdefghijklmnopqrstuvwxyz", "the", ".", ","]


def reading_model(**options: object) -> PreTrainedModel:
    """Return a tiny BERT that finds answers, in texts of up to 64 tokens."""
    config = {**SIX_HEADS, "num_labels": 2, "vocab_size": 40, "max_position_embeddings": 64, **options}
    return shake(BertForQuestionAnswering(BertConfig(**config)))


def letter_tokenizer(**options: object) -> PreTrainedTokenizerFast:
    """Return a tokenizer for `reading_model`, which gives segment ids."""
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return word_tokenizer(LETTERS, **{"model_max_length": 64, "model_input_names": inputs, **options})


def questions(count: int, *, words: tuple[int, int] = (5, 20), seed: int = 0) -> Dataset:
    """Return rows of SQuAD's columns, whose contexts have some number of words, with one or two answers each."""
    draws = random.Random(seed)
    rows = []
    for _ in range(count):
        text = [draws.choice(LETTERS) for _ in range(draws.randint(*words))]
        context = "".join(word + " " * draws.randint(1, 2) for word in text)
        places = [match.start() for match in re.finditer(r"\S+", context)]
        answers: dict[str, list[Any]] = {"text": [], "answer_start": []}
        for _ in range(draws.randint(1, 2)):
            first = draws.randrange(len(places))
            end = places[min(first + draws.randint(1, 3), len(places)) :][:1] or [len(context)]
            answers["answer_start"].append(places[first])
            answers["text"].append(context[places[first] : end[0]].rstrip())
        asked = " ".join(draws.choice(LETTERS) for _ in range(draws.randint(1, 4)))
        rows.append({"context": context, "question": asked, "answers": answers})
    return Dataset.from_list(rows)


def save_questions(folder: Path, *, train: int, validation: int, **sections: object) -> Path:
    """Write a project with `reading_model` and rows of questions; return its recipe.yaml."""
    torch.manual_seed(0)
    reading_model().save_pretrained(folder / "model")
    letter_tokenizer().save_pretrained(folder / "model")
    for seed, (name, count) in enumerate((("train", train), ("validation", validation))):
        rows = questions(count, seed=seed)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "files": {"train": "train.jsonl", "validation": "validation.jsonl"},
        "text": ["question", "context"],
        "label": "answers",
    }
    return write_recipe(folder, "question-answering", **{"data": data, **sections})
