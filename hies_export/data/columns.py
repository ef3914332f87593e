"""Read columns: labels as classes or numbers, and images upright, in as many channels of 8 bits as a model takes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import PIL.Image
import PIL.ImageOps

from ..errors import DataError, listed, quoted, refusing
from ..model.classes import ClassNames
from .batches import predicts
from .rows import row_name

logger = logging.getLogger(__name__)

STRINGS = ("string", "large_string")


def read_labels(rows: datasets.Dataset, *, column: str, config: Any) -> list[int] | list[float]:
    """Return one label per row: class numbers, matched by name if the data has names, or numbers for regression."""
    feature, values = rows.features[column], rows[column][:]
    for row, value in enumerate(values):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise DataError(
                f"every row must have a label, but {row_name(rows, row)} has none in {column!r}; "
                "remove such rows, or leave data.label out to run without labels"
            )
    if predicts(config) == "numbers":
        return _regression_labels(values, feature, column=column)
    return class_numbers(
        values, feature, column=column, classes=ClassNames(config), place=lambda row: row_name(rows, row)
    )


def class_numbers(
    values: Sequence[Any], feature: Any, *, column: str, classes: ClassNames, place: Callable[[int], str]
) -> list[int]:
    """Return the number of the class of each value, matched by name if the data has names.

    Args:
        values: Labels, none of them missing; in messages, `place` names the row of each by its index.
        feature: What the values are in the data set.
        column: Their column, for messages.
        classes: Those of the model.
    """
    dtype = getattr(feature, "dtype", "")
    if dtype in STRINGS:
        return _numbers_of_names(values, column=column, classes=classes)
    if not isinstance(dtype, str) or not dtype.startswith(("int", "uint", "bool")):
        # pandas and pyarrow make floats of whole numbers with a gap, which may be in a row that is not read.
        whole = all(isinstance(value, float) and value.is_integer() for value in values)
        hint = (
            "; write whole numbers, and leave no label empty: a gap turns the whole column into float64"
            if whole
            else ""
        )
        if isinstance(feature, (list, datasets.List, datasets.LargeList)):
            hint = "; if it is a multi-label classifier, set problem_type in its config to multi_label_classification"
        raise DataError(
            f"the labels of a classifier must be class numbers or class names, but {column!r} holds "
            f"{kind_of(feature)} such as {quoted(values[0])}{hint}"
        )
    if -1 in values:
        raise DataError(_hidden(f"for {column!r} in {place(values.index(-1))}"))
    names = _names_of_values(values, feature, classes)
    numbers = {value: classes.find(name) for value, name in names.items()}
    if any(found and value not in found for value, found in numbers.items()):
        if classes.are_numbers and not isinstance(feature, datasets.ClassLabel):
            logger.warning(
                "the labels in %r are whole numbers, and so are the model's class names (%s): they are matched by name",
                column,
                classes,
            )
        return _numbers_of_names([names[value] for value in values], column=column, classes=classes)
    if isinstance(feature, datasets.ClassLabel) and not all(map(numbers.get, values)):
        _check_numbering(feature.names, column=column, classes=classes)
    if not all(numbers.values()) and not classes.are_default:
        logger.warning(
            "the data's classes (%s) are not named as the model's (%s): they are matched by number",
            listed(names.values()),
            classes,
        )
    for index, value in enumerate(values):
        if not 0 <= value < len(classes.names):
            raise DataError(
                f"labels must be in [0, {len(classes.names)}), the model's classes, "
                f"but {place(index)} has {value} in {column!r}; number the classes as the model's id2label does"
            )
    return [int(value) for value in values]


def _check_numbering(names: Sequence[str], *, column: str, classes: ClassNames) -> None:
    """Refuse classes of other names than the model's, unless they are as many and their order can be the model's."""
    given, own = (
        f"the {len(names)} classes of {column!r} ({listed(names)})",
        f"the model's {len(classes.names)} ({classes})",
    )
    remedy = (
        "name them so, set id2label in the model's config to their names, or leave data.label out to run without labels"
    )
    if len(names) != len(classes.names):
        raise DataError(f"{given} must have names of {own}, or be as many, to be matched by number; {remedy}")
    if all(map(str.isdecimal, names)) and sorted(names, key=int) != [*names]:
        raise DataError(
            f"{given} must have names of {own}, or be in the order of their numbers: as text, {names[2]} comes before "
            f"{names[3]}; {remedy}"
        )


def _names_of_values(values: Sequence[int], feature: Any, classes: ClassNames) -> dict[int, str]:
    """Return the name of each class of the data by its value; none if the values are plain class numbers."""
    if isinstance(feature, datasets.ClassLabel):
        return dict(enumerate(feature.names))
    if feature.dtype == "bool":
        return {False: "False", True: "True"}
    return {value: str(value) for value in values} if classes.are_numbers else {}


def _regression_labels(values: list[Any], feature: Any, *, column: str) -> list[float]:
    if isinstance(feature, datasets.ClassLabel) or not all(map(is_number, values)):
        raise DataError(
            f"the labels of a regression must be numbers, but {column!r} holds {kind_of(feature)} such as "
            f"{quoted(values[0])}"
        )
    if all(value == -1 for value in values):
        raise DataError(_hidden(f"in every row of {column!r}"))
    return [float(value) for value in values]


def read_numbers(rows: datasets.Dataset, *, column: str, what: str) -> list[float]:
    """Return the number of each row that is `what`, in words, such as the similarity of two texts."""
    feature, values = rows.features[column], rows[column][:]
    for row, value in enumerate(values):
        if isinstance(feature, datasets.ClassLabel) or not is_number(value):
            given = (
                f"the class {quoted(feature.names[value])}"
                if isinstance(feature, datasets.ClassLabel)
                else quoted(value)
            )
            raise DataError(
                f"{what} must be a number, but {row_name(rows, row)} has {given} in {column!r}; write numbers, or "
                "leave data.label out"
            )
    return [float(value) for value in values]


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and not True or False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _hidden(where: str) -> str:
    return (
        f"every row must have a label, got -1 {where}: -1 stands for a hidden label, as in GLUE's test "
        f"splits; use a split with labels, such as validation"
    )


def _numbers_of_names(names: Sequence[str], *, column: str, classes: ClassNames) -> list[int]:
    numbers = {name: classes.find(name) for name in names}
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
    return [numbers[name][0] for name in names]


def kind_of(feature: Any) -> str:
    """Name what a column holds, for an error message."""
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


# Channels of a model -> Pillow's mode, where that is not RGB.
MODES = {1: "L", 4: "RGBA"}


def holds_images(feature: Any) -> bool:
    """Tell whether a column may hold images: decoded, encoded, or a path."""
    if isinstance(feature, dict):
        return {"bytes", "path"} <= set(feature)
    return isinstance(feature, datasets.Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def as_images(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """Return the rows with an image column that decodes when it is read."""
    return rows if rows.features[column] == datasets.Image() else rows.cast_column(column, datasets.Image())


def image_of_row(rows: datasets.Dataset, column: str, row: int, *, channels: int = 3) -> PIL.Image.Image:
    """Decode the image of one row, upright: grey for one channel, with transparency for four, else as RGB."""
    refusal = f"every {column!r} must be an image, but {row_name(rows, row)} is not"
    return _converted(lambda: rows[row][column], refusal, MODES.get(channels, "RGB"))


def image_of_file(file: str | Path) -> PIL.Image.Image:
    """Decode an image file, upright and as RGB."""
    refusal = f"an image must be a file that Pillow decodes, and {file} is not"
    return _converted(lambda: PIL.Image.open(file), refusal, "RGB")


def _converted(read: Callable[[], PIL.Image.Image], refusal: str, mode: str) -> PIL.Image.Image:
    """Return an image as `transformers.image_utils.load_image` does: turned as its EXIF data say, and converted.

    Only palettes go through RGBA, to the same colours, as Pillow warns of those with transparency otherwise.
    """
    with refusing(refusal, kind=DataError), read() as image:
        turned = PIL.ImageOps.exif_transpose(image)
        if turned.mode[0] in "IF":
            _warn_of_bits(turned.mode)
        return (turned.convert("RGBA") if turned.mode in ("P", "PA") else turned).convert(mode)


@cache
def _warn_of_bits(mode: str) -> None:
    logger.warning("images of mode %s have more than 8 bits: values above 255 are cut off, as in pipelines", mode)
