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
# Columns of numbers, such as how alike two texts are.
_SCORES = (*LABELS, "score", "similarity_score")
# How names of classes say which word of an entity they are for, and its type: B-PER. The letters are those of IOB (B
# for the first word, I for others), IOBES and BILOU (E or L for the last, S or U for an only one), BMES and BMEWO (M
# for others, W for an only one).
_ENTITY_CLASS = re.compile(r"(?P<place>[BIMELSUW])-(?P<type>.+)", re.IGNORECASE)


def places_in_entities(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return, for the name of each class of words, the letter of its place in an entity and the type of the entity.

    The letter is one of `BIMELSUW`, and S for a name without one, whose words are entities by themselves. For `O`, both
    are empty.
    """
    matches = [_ENTITY_CLASS.fullmatch(name) for name in names]
    # If no class is for a first or a further word, a letter such as in "L-shaped" is a part of the name.
    has_prefixes = any(match["place"].upper() in "BIM" for match in matches if match)
    places = []
    for name, match in zip(names, matches, strict=True):
        if name.upper() == "O":
            places.append(("", ""))
        elif match and has_prefixes:
            places.append((match["place"].upper(), match["type"]))
        else:
            places.append(("S", name))
    return places


class ClassNames:
    """The names of a classifier's classes by number; a RequestError refuses a config that does not name all from 0."""

    def __init__(self, config: Any) -> None:
        name_of = {int(number): name for number, name in config.id2label.items()}
        if not name_of or sorted(name_of) != list(range(len(config.id2label))):
            raise RequestError(
                f"id2label must name every class, numbered from 0 without a gap, but it has {quoted(config.id2label)}; "
                "name the classes in the model's config as it was trained"
            )
        self.names = [str(name_of[number]) for number in range(len(name_of))]

    def __str__(self) -> str:
        return listed(self.names)

    @property
    def are_numbers(self) -> bool:
        """Whether all names are whole numbers, such as those of ratings."""
        return all(name.isdecimal() for name in self.names)

    def find(self, name: str) -> list[int]:
        """Return the numbers of all classes of this name or, if there are none, of those that differ in case alone."""
        exact = [number for number, known in enumerate(self.names) if known == name]
        return exact or [number for number, known in enumerate(self.names) if known.casefold() == name.casefold()]


def read_labels(rows: datasets.Dataset, *, column: str, config: Any, numbers: bool = False) -> list[int] | list[float]:
    """Return one label per row: class numbers, matched by name if the data has names, or numbers for a regression."""
    must, remedy = "every row must have a label", "remove such rows, or leave data.label out to run without labels"
    data.check_each(rows, column, lambda value: value is not None and value == value, must, remedy)  # NaN != NaN
    if numbers:
        values = data.read_numbers(rows, column=column, what="the label of a regression")
        if all(value == -1 for value in values):
            raise DataError(_no_label_message(f"in every row of {column!r}"))
        return values
    lists = [[value] for value in rows[column][:]]
    numbered = class_numbers(rows, lists, rows.features[column], column=column, classes=ClassNames(config))
    return [of_row[0] for of_row in numbered]


def class_numbers(
    rows: datasets.Dataset, lists: Sequence[Sequence[Any]], feature: Any, *, column: str, classes: ClassNames
) -> list[list[int]]:
    """Return the labels of each row as the model's class numbers, matched by name if the data has names.

    `lists` are the labels of the `rows` in a column, none of them missing, each described by `feature`.
    """
    given, dtype = list(itertools.chain(*lists)), getattr(feature, "dtype", "")
    if given and dtype not in data.STRINGS and not dtype.startswith(("int", "uint", "bool")):
        raise DataError(
            f"the labels of a classifier must be class numbers or class names, but {column!r} holds "
            f"{data.kind_of(feature)} such as {quoted(given[0])}; a gap makes floats of numbers"
        )
    values = list(dict.fromkeys(given))
    are_names = not values or dtype in data.STRINGS

    def row_of(value: int) -> str:  # the name of the first row that has the label
        return data.row_name(rows, next(row for row, of_row in enumerate(lists) if value in of_row))

    for number in _NO_LABEL:
        if number in values:
            raise DataError(_no_label_message(f"for {column!r} in {row_of(number)}", number))
    names = {value: value for value in values} if are_names else _names_of_values(values, feature, classes)
    of_that_name = {value: classes.find(name) for value, name in names.items()}
    # Labels that are numbers are taken as such, unless the model gives one of their names another number.
    if are_names or any(numbers and value not in numbers for value, numbers in of_that_name.items()):
        number_of = _numbers_of_names({value: names[value] for value in values}, column, classes)
        return [[number_of[value] for value in of_row] for of_row in lists]
    if isinstance(feature, datasets.ClassLabel) and not all(of_that_name.get(value) for value in values):
        _check_numbering(feature.names, column=column, classes=classes)
    unnamed = all(name.casefold().startswith("label_") for name in classes.names)  # LABEL_0 and so on, by transformers
    if not all(of_that_name.values()) and not unnamed:
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
    """Refuse classes of other names than the model's, unless they are as many and may be in the model's order."""
    given = f"the {len(names)} classes of {column!r} ({listed(names)})"
    own = f"the model's {len(classes.names)} ({classes})"
    remedy = (
        "name them so, set id2label in the model's config to their names, or leave data.label out to run without labels"
    )
    if len(names) != len(classes.names):
        raise DataError(f"{given} must have names of {own}, or be as many, to be matched by number; {remedy}")
    if not all(map(str.isdecimal, names)):
        return
    for name, following in itertools.pairwise(names):
        if int(name) > int(following):  # sorted as text, such as 1, 10, 2
            raise DataError(
                f"{given} must have names of {own}, or be in the order of their numbers: as text, {name} comes before "
                f"{following}; {remedy}"
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
    numbers_of = {name: classes.find(name) for name in names.values()}
    if unknown := [quoted(name) for name, numbers in numbers_of.items() if not numbers]:
        given = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        remedy = "" if classes.are_numbers else f", give class numbers in [0, {len(classes.names)})"
        raise DataError(
            f"the class names in {column!r} must be among the model's ({classes}), got {given}; rename them{remedy}, "
            "or leave data.label out to run without labels"
        )
    for name, numbers in numbers_of.items():
        if len(numbers) > 1:
            raise DataError(
                f"the class names in {column!r} must be those of one class each, but {quoted(name)} is the name of "
                f"classes {listed(numbers)} in the model's id2label; give class numbers in [0, {len(classes.names)})"
            )
    return {value: numbers_of[name][0] for value, name in names.items()}


def read_label_sets(rows: datasets.Dataset, *, column: str, config: Any) -> Tensor:
    """Return the label set of each row, (rows, labels) float32: 1 for a label that applies, 0 for any other.

    A row has a list: of the numbers or names of its labels, or of 0 or 1 for each label of the model. Lists of integers
    are read as the latter if all rows can be. A row may also have the number or name of its only label or, if the model
    has a single label, 0 or 1. A DataError refuses rows without a list, and labels that the model does not know.
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
    lists = values if has_lists else [[value] for value in values]
    dtype = str(inner.dtype)
    are_names = dtype in data.STRINGS or (has_lists and isinstance(inner, datasets.ClassLabel))
    other_rows = [row for row, labels in enumerate(lists) if len(labels) != count or not set(labels) <= {0, 1}]
    if not other_rows and not are_names:  # all rows have 0 or 1 for each label of the model
        return torch.tensor(lists, dtype=torch.float32)
    if other_rows and (dtype.startswith(("bool", "float")) or (count == 1 and not has_lists)):
        wrong = other_rows[0]
        raise DataError(
            f"the labels in {column!r} must be 0 or 1 for each of the model's {count} labels, or lists of their "
            f"numbers or names, but {data.row_name(rows, wrong)} has {quoted(values[wrong])}"
        )
    numbers = class_numbers(rows, lists, inner, column=column, classes=classes)
    return torch.tensor([[float(number in of_row) for number in range(count)] for of_row in numbers])


def numbers_column(features: Mapping[str, Any]) -> str | None:
    """Return the first usual column of scores that holds numbers, or lists of numbers; None if there is none."""
    for name in _SCORES:
        feature = data.item_feature(features.get(name))
        is_number = str(getattr(feature, "dtype", "")).startswith(("int", "uint", "float"))
        if is_number and not isinstance(feature, datasets.ClassLabel):
            return name
    return None
