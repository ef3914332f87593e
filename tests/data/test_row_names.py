"""An error names the row of the file, however rows were drawn: against plain lists of numbers."""

import random
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from support.generative import png
from support.models import generative_tokenizer, llava_processor
from support.reading import reading
from transformers import BertConfig, LlamaConfig, LlavaConfig, ViTConfig

from hies_export.data.rows import number_rows, own_columns, row_name
from hies_export.errors import DataError
from hies_export.recipe.sections import Columns
from hies_export.tasks.prompts import right_choice

ROWS = 40


def random_order(count: int, chance: random.Random) -> list[int]:
    """Return which of so many rows to take: a stride, a sample, or each row twice."""
    numbers = list(range(count))
    ways = [numbers[:: chance.choice([-1, 1, 3])], chance.sample(numbers, chance.randint(1, count)), 2 * numbers]
    return chance.choice(ways)


@pytest.mark.parametrize("seed", range(6))
def test_names_follow_every_selection(seed: int) -> None:
    chance = random.Random(seed)
    columns = {"q": ["a"] * ROWS, "a": [["x", "y"]] * ROWS, "label": [1] * ROWS}
    plain = datasets.Dataset.from_dict(columns)
    rows, numbers = number_rows(plain, source="some file.jsonl"), list(range(ROWS))
    assert own_columns(rows) == plain.column_names
    for _ in range(3):
        order = random_order(len(rows), chance)
        rows, numbers = rows.select(order), [numbers[i] for i in order]
    rows = right_choice(rows, answer="a", label="label")
    assert [row_name(rows, i) for i in range(len(rows))] == [f"row {n} of some file.jsonl (from 0)" for n in numbers]


def test_rows_without_numbers_are_counted_as_they_are() -> None:
    rows = datasets.Dataset.from_dict({"a": [5, 6, 7]}).select([2, 0])
    assert row_name(rows, 1) == "row 1 (from 0)"
    assert own_columns(rows) == ["a"]


IMAGE, NO_IMAGE = ({"bytes": content, "path": None} for content in (png(), b"no image"))


CLASSIFY: dict[str, Any] = {"config": BertConfig(num_labels=2), "processor": generative_tokenizer()}
GENERATE: dict[str, Any] = {
    "config": LlamaConfig(vocab_size=32, pad_token_id=0, max_position_embeddings=64),
    "processor": generative_tokenizer(),
}
LLAVA = {
    "config": LlavaConfig(text_config=GENERATE["config"], image_token_index=4, pad_token_id=0),
    "processor": llava_processor(),
}
VIT = {"config": ViTConfig(), "processor": lambda images, **_: {}}
TEXT, PICTURE = Columns(text=("text",), label="label"), Columns(image="image")
ASKED = Columns(prompt="Q {question} A", answer="answer")
CHOSEN = Columns(prompt="Q {question} A", answer="answer", label="label")
SHOWN = Columns(image="image", prompt="{question} A", answer="answer")

# Task -> columns, options of the reader, and a good row.
GOOD: dict[str, tuple[str, Columns, dict[str, Any], dict[str, Any]]] = {
    "text": ("text-classification", TEXT, CLASSIFY, {"text": "a", "label": 0}),
    "image": ("image-classification", PICTURE, VIT, {"image": IMAGE}),
    "answer": ("text-generation", ASKED, GENERATE, {"question": "a", "answer": "b"}),
    "choice": ("text-generation", CHOSEN, GENERATE, {"question": "a", "answer": ["b", "c"], "label": 1}),
    "shown": ("image-text-to-text", SHOWN, LLAVA, {"image": IMAGE, "question": "a", "answer": "yes"}),
}
# What is wrong -> what is read, the changes that make a row a bad one, further options of the reader, and what is said.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no text": ("text", {"text": None}, {}, "must have a 'text'"),
    "no label": ("text", {"label": None}, {}, "must have a label"),
    "label too large": ("text", {"label": 2}, {}, r"in \[0, 2\).* has 2 in 'label'"),
    "hidden label": ("text", {"label": -1}, {}, "got -1 for 'label' .* hidden label, as in GLUE's test splits"),
    "no image": ("image", {"image": None}, {}, "must have a 'image'"),
    "broken image": ("image", {"image": NO_IMAGE}, {}, "every 'image' must be an image"),
    "no answer": ("answer", {"answer": None}, {}, "must have a 'answer'"),
    "no such choice": ("choice", {"label": 2}, {}, "number of one of the 2 choices, from 0, .* write 0 for the first"),
    "hidden choice": ("choice", {"label": -1}, {}, "has -1; use a split with labels"),
    "long answer": ("answer", {"answer": "a b c d e f g"}, {"max_length": 6}, "answers are never cut"),
    "image to ask about": ("shown", {"image": NO_IMAGE}, {}, "every 'image' must be an image"),
    "long question": ("shown", {"question": "a b c d e f g"}, {"max_length": 24}, r"fit into max_length \(24 tokens\)"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_row_of_the_file_is_named(case: str, tmp_path: Path) -> None:
    """A bad row behind a slice and a shuffle, at the place that a list of numbers says."""
    what, changes, options, said = CASES[case]
    task, columns, given, good = GOOD[what]
    first, last, seed, samples = 5, 35, 3, 8
    numbers = np.arange(first, last)[np.random.default_rng(seed).permutation(last - first)][:samples]
    bad = int(numbers[-2])
    rows = datasets.Dataset.from_list([good | (changes if i == bad else {}) for i in range(ROWS)])
    rows.to_parquet(tmp_path / "train.parquet")
    reader = reading(task, columns=columns, **given | options)

    def read(**drawn: Any) -> None:
        found = reader.load(files={"train": tmp_path / "train.parquet"}, **drawn)
        reader.read(found, size=4)

    for drawn in ({"split": f"train[{first}:{last}]", "samples": samples, "shuffle_seed": seed}, {"split": "train"}):
        with pytest.raises(DataError, match=rf"\brow {bad} of train\.parquet \(from 0\)") as refused:
            read(**drawn)
        assert re.search(said, str(refused.value))
    read(split=f"train[{bad + 1}:]")


def test_columns_of_numbers_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "gold": 1}')
    with pytest.raises(DataError, match=r"the column 'label', but it has text, gold$"):
        reading("text-classification", columns=TEXT, **CLASSIFY).load("only", files={"only": tmp_path / "a.jsonl"})


def test_rows_of_the_hub_are_those_of_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b", None], "label": [0, 1, 0]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict(validation=rows))
    with pytest.raises(DataError, match=r"but row 2 of the split 'validation' \(from 0\) has none"):
        reading("text-classification", columns=TEXT, **CLASSIFY).load("validation[1:]", name="org/name")
