"""Read labels: how a model's config names its classes, and how the labels of a data set become classes and label sets.

`id2label` decides on the names, as in the pipelines of transformers.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DataError, RequestError, listed, quoted
from ..late import Tensor, datasets, torch
from .late import data

logger = logging.getLogger(__name__)

# Numbers that stand for no label: of data sets, and of transformers' losses.
_NO_LABEL = (-1, -100)
# Columns of labels, as transformers' collators know them.
LABELS = ("labels", "label", "label_ids")
# Those of numbers, such as how alike two texts are.
_SCORES = (*LABELS, "score", "similarity_score")
# How names of classes say which word of an entity they are for, and its type: B-PER. The letters are those of IOB (B
# for the first word, I for others), IOBES and BILOU (E or L for the last, S or U for an only one), BMES and BMEWO (M
# for others, W for an only one).
_PLACED = re.compile(r"(?P<place>[BIMELSUW])-(?P<type>.+)", re.IGNORECASE)


def places_in_entities(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return, for the name of each class of words, the letter of its place in an entity and the type of the entity.

    The letter is one of `BIMELSUW`, and S for a name without one, whose words are entities by themselves. For `O`, both
    are empty.
    """
    found = [_PLACED.fullmatch(name) for name in names]
    # Without words that begin or go on, a letter is a part of a name.
    if not {match["place"].upper() for match in found if match} & set("BIM"):
        found = [None] * len(names)
    return [
        ("", "") if name.upper() == "O" else (match["place"].upper(), match["type"]) if match else ("S", name)
        for name, match in zip(names, found, strict=True)
    ]


class ClassNames:
    """The names of a classifier's classes, by number, and the numbers of a name.

    Raises:
        RequestError: `id2label` does not name every class, numbered from 0.
    """

    def __init__(self, config: Any) -> None:
        named = {int(number): name for number, name in config.id2label.items()}
        if not named or sorted(named) != list(range(len(config.id2label))):
            raise RequestError(
                f"id2label must name every class, numbered from 0 without a gap, but it has {quoted(config.id2label)}; "
                "name the classes in the model's config as it was trained"
            )
        self.names = [str(named[number]) for number in range(len(named))]

    def __str__(self) -> str:
        return listed(self.names)

    @property
    def are_numbers(self) -> bool:
        """Whether all names are whole numbers, such as those of ratings."""
        return all(name.isdecimal() for name in self.names)

    def find(self, name: str) -> list[int]:
        """Return the numbers of all classes of this name or, if there are none, of those that differ in case alone."""
        exact = [number for number, own in enumerate(self.names) if own == name]
        return exact or [number for number, own in enumerate(self.names) if own.casefold() == name.casefold()]


def read_labels(rows: datasets.Dataset, *, column: str, config: Any, numbers: bool = False) -> list[int] | list[float]:
    """Return one label per row: class numbers, matched by name if the data has names, or numbers for a regression."""
    must, remedy = "every row must have a label", "remove such rows, or leave data.label out to run without labels"
    data.check_each(rows, column, lambda value: value is not None and value == value, must, remedy)  # NaN != NaN
    if numbers:
        found = data.read_numbers(rows, column=column, what="the label of a regression")
        if all(value == -1 for value in found):
            raise DataError(_no_label_message(f"in every row of {column!r}"))
        return found
    lists = [[value] for value in rows[column][:]]
    classes = ClassNames(config)
    return [n for (n,) in class_numbers(rows, lists, rows.features[column], column=column, classes=classes)]


def class_numbers(
    rows: datasets.Dataset, lists: Sequence[Sequence[Any]], feature: Any, *, column: str, classes: ClassNames
) -> list[list[int]]:
    """Return the numbers of the model's `classes` in the list of each row, matched by name if the data has names.

    `lists` are the labels of the `rows` in a column, none of them missing, each described by `feature`.
    """
    given, dtype = list(itertools.chain(*lists)), getattr(feature, "dtype", "")
    if given and dtype not in data.STRINGS and not dtype.startswith(("int", "uint", "bool")):
        raise DataError(
            f"the labels of a classifier must be class numbers or class names, but {column!r} holds "
            f"{data.kind_of(feature)} such as {quoted(given[0])}; a gap makes floats of numbers"
        )
    values = list(dict.fromkeys(given))
    named = not values or dtype in data.STRINGS

    def row_of(value: int) -> str:
        return data.row_name(rows, next(row for row, of_row in enumerate(lists) if value in of_row))

    for number in _NO_LABEL:
        if number in values:
            raise DataError(_no_label_message(f"for {column!r} in {row_of(number)}", number))
    names = {value: value for value in values} if named else _names_of_values(values, feature, classes)
    found = {value: classes.find(name) for value, name in names.items()}
    if named or any(numbers and value not in numbers for value, numbers in found.items()):
        number_of = _numbers_of_names({value: names[value] for value in values}, column, classes)
        return [[number_of[value] for value in of_row] for of_row in lists]
    if isinstance(feature, datasets.ClassLabel) and not all(map(found.get, values)):
        _check_numbering(feature.names, column=column, classes=classes)
    unnamed = all(name.casefold().startswith("label_") for name in classes.names)  # LABEL_0 and so on, by transformers
    if not all(found.values()) and not unnamed:
        logger.warning(
            "the data's classes (%s) are not named as the model's (%s): they are matched by number",
            listed(names.values()),
            classes,
        )
    if wrong := [value for value in values if not 0 <= value < len(classes.names)]:
        raise DataError(
            f"labels must be in [0, {len(classes.names)}), the model's classes, but {row_of(wrong[0])} has {wrong[0]} "
            f"in {column!r}; number the classes as the model's id2label does"
        )
    return [[int(value) for value in of_row] for of_row in lists]


def _check_numbering(names: Sequence[str], *, column: str, classes: ClassNames) -> None:
    """Refuse classes of other names than the model's, unless they are as many and their order can be the model's."""
    given = f"the {len(names)} classes of {column!r} ({listed(names)})"
    own = f"the model's {len(classes.names)} ({classes})"
    remedy = (
        "name them so, set id2label in the model's config to their names, or leave data.label out to run without labels"
    )
    if len(names) != len(classes.names):
        raise DataError(f"{given} must have names of {own}, or be as many, to be matched by number; {remedy}")
    numbered = itertools.pairwise(names) if all(map(str.isdecimal, names)) else ()
    if wrong := next(((one, other) for one, other in numbered if int(one) > int(other)), None):
        raise DataError(
            f"{given} must have names of {own}, or be in the order of their numbers: as text, {wrong[0]} comes before "
            f"{wrong[1]}; {remedy}"
        )


def _names_of_values(values: Sequence[int], feature: Any, classes: ClassNames) -> dict[int, str]:
    """Return the name of each class of the data by its value; empty if the values are plain class numbers."""
    if isinstance(feature, datasets.ClassLabel):
        return dict(enumerate(feature.names))
    if feature.dtype == "bool":
        return {False: "False", True: "True"}
    return {value: str(value) for value in values} if classes.are_numbers else {}


def _no_label_message(where: str, given: int = -1) -> str:
    """Return the message that refuses rows with a label, `given`, that stands for none; `where` says which rows."""
    return (
        f"every row must have a label, got {given} {where}, which stands for a hidden label, as in GLUE's test splits, "
        "or for one that annotators did not agree on, as in SNLI; leave such rows out, or use a split with labels"
    )


def _numbers_of_names(names: Mapping[Any, str], column: str, classes: ClassNames) -> dict[Any, int]:
    """Return the class number of each value, given its name; a DataError refuses names of no or several classes."""
    numbers = {name: classes.find(name) for name in names.values()}
    if unknown := [quoted(name) for name, found in numbers.items() if not found]:
        given = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        remedy = "" if classes.are_numbers else f", give class numbers in [0, {len(classes.names)})"
        raise DataError(
            f"the class names in {column!r} must be among the model's ({classes}), got {given}; rename them{remedy}, "
            "or leave data.label out to run without labels"
        )
    for name, found in numbers.items():
        if len(found) > 1:
            raise DataError(
                f"the class names in {column!r} must be those of one class each, but {quoted(name)} is the name of "
                f"classes {listed(found)} in the model's id2label; give class numbers in [0, {len(classes.names)})"
            )
    return {value: numbers[name][0] for value, name in names.items()}


def read_label_sets(rows: datasets.Dataset, *, column: str, config: Any) -> Tensor:
    """Return the label set of each row, (rows, labels) float32: 1 for a label that applies, 0 for any other.

    A row has a list: of the numbers or names of its labels, or of 0 or 1 for each label of the model. Lists of integers
    are read as the latter if all rows can be. A row may also have the number or name of its only label or, if the model
    has a single label, 0 or 1.

    Raises:
        DataError: A row has no list, or a label that the model does not know.
    """
    feature, values, count = rows.features[column], rows[column][:], config.num_labels
    has_lists, inner = data.is_list(feature), data.item_feature(feature)
    if not isinstance(inner, (datasets.Value, datasets.ClassLabel)):
        raise DataError(
            f"{column!r} must hold lists of labels, but it holds {data.kind_of(feature)} of {data.kind_of(inner)}"
        )
    must, remedy = "every row must have a list of labels, empty if none applies", "complete it, or leave data.label out"
    data.check_each(rows, column, lambda value: value is not None and not (has_lists and None in value), must, remedy)
    classes = ClassNames(config)
    sets = values if has_lists else [[value] for value in values]
    dtype = str(inner.dtype)
    named = dtype in data.STRINGS or (has_lists and isinstance(inner, datasets.ClassLabel))
    # The first row that does not have 0 or 1 for each label of the model.
    wrong = next((row for row, labels in enumerate(sets) if len(labels) != count or not set(labels) <= {0, 1}), None)
    if wrong is None and not named:
        return torch.tensor(sets, dtype=torch.float32)
    if wrong is not None and (dtype.startswith(("bool", "float")) or (count == 1 and not has_lists)):
        raise DataError(
            f"the labels in {column!r} must be 0 or 1 for each of the model's {count} labels, or lists of their "
            f"numbers or names, but {data.row_name(rows, wrong)} has {quoted(values[wrong])}"
        )
    members = class_numbers(rows, sets, inner, column=column, classes=classes)
    return torch.tensor([[float(number in of_row) for number in range(count)] for of_row in members])


def numbers_column(features: Mapping[str, Any]) -> str | None:
    """Return the usual column of scores that are numbers, or lists of numbers; None if there is none."""
    for name in _SCORES:
        feature = data.item_feature(features.get(name))
        number = str(getattr(feature, "dtype", "")).startswith(("int", "float"))
        if number and not isinstance(feature, datasets.ClassLabel):
            return name
    return None
