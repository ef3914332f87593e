"""Rows that units are fitted on and rows that judge: the same rows in any files are told by what the model reads."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loading import load_pruning, recipe_of
from support.models import WORDS, bert, save_regressor, text_batch

from hies_export import PruningRecipe, RequestError, prune
from hies_export.data.batches import sample_contents

SHARED = "of the .* rows are among those that units are"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor, and files of 200 rows: all, a shuffled copy, other rows, and rows that all recur."""
    folder = save_regressor(tmp_path_factory.mktemp("shared"), prune={"budget": {"keep": 0.8}, "alpha": 0.5})
    draw = random.Random(0)

    def rows(count: int) -> list[dict[str, Any]]:
        texts = [" ".join(draw.choices(WORDS, k=12)) for _ in range(count)]
        return [{"sentence": text, "other": "good", "label": number / count} for number, text in enumerate(texts)]

    every, others = rows(200), rows(200)
    files = {"all": every, "shuffled": draw.sample(every, 200), "others": others}
    files |= {"half": every[:100] + others[:100], "few": every[:10] + others[:190], "recurring": 20 * every[:10]}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


def of_files(folder: Path, train: str, validation: str, **fields: Any) -> PruningRecipe:
    files = {"train": folder / f"{train}.jsonl", "validation": folder / f"{validation}.jsonl"}
    return recipe_of(folder, **{"calibration__samples": 100, "data__files": files, **fields})


@pytest.mark.parametrize("validation", ["all", "shuffled", "half"])
def test_a_promise_on_rows_that_are_fitted_is_refused(folder: Path, validation: str) -> None:
    with pytest.raises(RequestError, match=f"a promise must be judged on rows of its own, but .* {SHARED}"):
        load_pruning(of_files(folder, "all", validation))
    with pytest.raises(RequestError, match=SHARED):
        load_pruning(of_files(folder, "all", validation).to_deploy(keep=0.8))


def test_without_a_promise_it_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_pruning(of_files(folder, "all", "shuffled", prune__budget={"heads": 0.5}))
    assert "and new rows may keep less; give files that share no rows" in caplog.text


@pytest.mark.parametrize(("train", "validation"), [("all", "others"), ("all", "few"), ("recurring", "recurring")])
def test_other_rows_and_texts_that_recur_are_fine(
    folder: Path, train: str, validation: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_pruning(of_files(folder, train, validation))
    assert "are among those" not in caplog.text


def test_slices_of_one_file_are_apart_if_they_do_not_overlap(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    slices = {"calibration__split": "train[:50%]", "evaluation__split": "validation[50%:]"}
    load_pruning(of_files(folder, "all", "all", **slices, calibration__samples=40))
    assert not caplog.messages
    with pytest.raises(RequestError, match=SHARED):
        load_pruning(of_files(folder, "all", "all", **(slices | {"evaluation__split": "validation[20%:]"})))


def test_in_memory_as_well() -> None:
    batches = [text_batch(32, 30, padding=False) for _ in range(4)]
    asked = {"budget": {"keep": 0.5}, "criterion": "l2", "compensation": None}
    with pytest.raises(RequestError, match=r"128 of the 128 held-out rows are among"):
        prune(bert(), batches, held_out=batches, **asked)


def test_samples_are_compared_by_their_real_tokens() -> None:
    one, two = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[0, 0, 5, 6], [0, 7, 8, 1]])
    right, left = ({"input_ids": ids, "attention_mask": (ids > 0).long()} for ids in (one, two))
    (first,), (second,) = sample_contents([right])
    (same,), (other,) = sample_contents([left])
    assert (same == first, other == second) == (True, False)
    assert sample_contents([right | {"pair": torch.tensor([0, 0])}]) == [(first, second)]
    # Documents are those of every split.
    assert sample_contents([right | {"query": torch.tensor([0, -1])}]) == [(first,)]
    # The right choice of a question is what a model is fitted on.
    asked = {"question": torch.tensor([3, 3]), "choice": torch.tensor([0, 1]), "right": torch.tensor([1, 1])}
    assert sample_contents([right | asked]) == [(second,)]
    images = torch.arange(24.0).reshape(2, 3, 2, 2)
    one, two, three = sample_contents([{"pixel_values": images}, {"pixel_values": images[1:]}])
    assert (one == two, two == three) == (False, True)
