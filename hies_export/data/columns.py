"""Read columns: of numbers, and of images, upright and in as many channels as a model takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
from transformers.image_utils import load_image

from ..errors import DataError, quoted, refusing
from ..late import datasets
from .rows import column_values, row_name

# Types of text.
STRINGS = ("string", "large_string")


def check_each(rows: datasets.Dataset, column: str, fits: Callable[[Any], Any], must: str, remedy: str) -> None:
    """Refuse the first row whose value in a column does not fit; `must` begins the DataError, and `remedy` ends it."""
    for row, value in enumerate(column_values(rows, column)):
        if not fits(value):
            raise DataError(f"{must}, but {row_name(rows, row)} has {quoted(value)} in {column!r}; {remedy}")


def read_numbers(rows: datasets.Dataset, *, column: str, what: str) -> list[float]:
    """Return the numbers in a column, `what` they are for messages; a DataError refuses class numbers and gaps."""
    are_classes = isinstance(rows.features[column], datasets.ClassLabel)
    must = f"{what} must be a number{' and no class' if are_classes else ''}"
    check_each(rows, column, lambda v: is_number(v) and not are_classes, must, "write numbers, or leave data.label out")
    return [float(value) for value in rows[column][:]]


def has_text(value: Any) -> bool:
    """Return whether a value is a text that is not blank, or a list of such texts and not empty."""
    texts = [value] if isinstance(value, str) else value
    return bool(texts) and all((text or "").strip() for text in texts)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, which True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def kind_of(feature: Any) -> str:
    """Return the type of a column, such as "int64" or "List", for an error message."""
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


def holds_text(feature: Any) -> bool:
    """Return whether a column holds text."""
    return getattr(feature, "dtype", None) in STRINGS


def holds_images(feature: Any) -> bool:
    """Return whether a column may hold images: an Image feature, bytes with a path, or raw bytes."""
    if isinstance(feature, dict):
        return {"bytes", "path"} <= set(feature)
    return isinstance(feature, datasets.Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def as_images(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """Return the rows, with `column` as `datasets.Image`, which decodes an image when its row is read."""
    return rows if rows.features[column] == datasets.Image() else rows.cast_column(column, datasets.Image())


def image_of_row(rows: datasets.Dataset, column: str, row: int, *, channels: int = 3) -> PIL.Image.Image:
    """Decode the image of one row, upright: grey for one channel, else as RGB."""
    with refusing(f"every {column!r} must be an image, but {row_name(rows, row)} is not", kind=DataError):
        image = load_image(rows[row][column])
    return image.convert("L") if channels == 1 else image


def image_of_file(file: str | Path) -> PIL.Image.Image:
    """Decode an image file, upright and as RGB."""
    must = f"an image must be a file that Pillow decodes, and {file} is not"
    # Opened here, as `load_image` also takes addresses.
    with refusing(must, kind=DataError), PIL.Image.open(file) as image:
        return load_image(image)
