"""Columns of label sets, in every way that people write them, against sets worked out by hand."""

from typing import Any

import datasets
import pytest
from transformers import BertConfig

from hies_export.data.rows import number_rows
from hies_export.errors import DataError
from hies_export.tasks.labels import read_label_sets

NAMES = ["anger", "fear", "joy"]
OF_CLASSES = datasets.List(datasets.ClassLabel(names=["joy", "anger"]))


def config(*names: str) -> BertConfig:
    ids = dict(enumerate(names))
    numbers = {name: number for number, name in ids.items()}
    return BertConfig(problem_type="multi_label_classification", id2label=ids, label2id=numbers)


def read(values: list[Any], names: list[str], feature: Any = None) -> list[list[float]]:
    rows = datasets.Dataset.from_dict({"label": values}, None if feature is None else datasets.Features(label=feature))
    rows = number_rows(rows, source="train.jsonl")
    return read_label_sets(rows, column="label", config=config(*names)).tolist()


@pytest.mark.parametrize(
    ("values", "feature", "wanted"),
    [
        ([[0, 2], [], [1]], None, ["101", "000", "010"]),
        ([["Joy", "anger"], [], ["fear"]], None, ["101", "000", "010"]),
        ([[0, 1], [], [1]], OF_CLASSES, ["101", "000", "100"]),
        ([[], []], None, ["000", "000"]),
        ([[1, 0, 1], [0, 0, 0]], None, ["101", "000"]),
        ([[1.0, 0.0, 1.0]], None, ["101"]),
        ([[True, False, False]], None, ["100"]),
        ([2, 0], None, ["001", "100"]),
        (["joy", "fear"], None, ["001", "010"]),
        ([0, 1], datasets.ClassLabel(names=["joy", "anger"]), ["001", "100"]),
    ],
)
def test_a_row_has_the_numbers_names_or_flags_of_its_labels(values: list[Any], feature: Any, wanted: list[str]) -> None:
    assert ["".join(f"{value:g}" for value in row) for row in read(values, NAMES, feature)] == wanted


@pytest.mark.parametrize("values", [[0, 1], [False, True], [0.0, 1.0], [[0], [1]], [[0.0], [1.0]]])
def test_of_a_single_label_a_row_says_whether_it_applies(values: list[Any]) -> None:
    assert read(values, ["yes"]) == [[0.0], [1.0]]


def test_of_two_labels_a_list_of_both_numbers_is_no_pair_of_flags() -> None:
    assert read([[0, 1], [0], []], ["no", "yes"]) == [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert read([[0, 1]], ["anger", "joy"], OF_CLASSES) == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        ([[0], None], NAMES, r"empty if none applies, but row 1 of train\.jsonl \(from 0\) has None in 'label'"),
        ([[0, None]], NAMES, r"row 0 of train\.jsonl \(from 0\) has \[0, None\]"),
        ([[0], [1, 3]], NAMES, r"must be in \[0, 3\), .* but row 1 of train\.jsonl \(from 0\) has 3 in 'label'"),
        ([["joy"], ["grief"]], NAMES, "must be among the model's .*, got 'grief'"),
        ([[0.0, 0.5, 1.0]], NAMES, r"0 or 1 for each of the model's 3 labels, .* row 0 .* has \[0\.0, 0\.5, 1\.0\]"),
        ([[1.0, 0.0]], NAMES, r"0 or 1 for each of the model's 3 labels"),
        ([0, 2], ["yes"], r"0 or 1 for each of the model's 1 labels, .* row 1 of train\.jsonl \(from 0\) has 2"),
        (["yes", "no"], ["yes"], r"row 0 .* has 'yes'"),
        ([[[0]], [[1]]], NAMES, "must hold lists of labels, but it holds List of List"),
    ],
)
def test_other_columns_are_refused(values: list[Any], names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(values, names)
