"""Open images, from files or from rows, upright and as RGB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import PIL.Image
import PIL.ImageOps

from ..errors import DataError, refusing
from .rows import row_name


def holds_images(feature: Any) -> bool:
    """Tell whether a column may hold images: decoded, encoded, or a path."""
    if isinstance(feature, dict):
        return {"bytes", "path"} <= set(feature)
    return isinstance(feature, datasets.Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def as_images(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """Return the rows with an image column that decodes when it is read."""
    return rows if rows.features[column] == datasets.Image() else rows.cast_column(column, datasets.Image())


def image_of_row(rows: datasets.Dataset, column: str, row: int) -> PIL.Image.Image:
    """Decode the image of one row, upright and as RGB."""
    return _as_rgb(lambda: rows[row][column], f"every {column!r} must be an image, but {row_name(rows, row)} is not")


def image_of_file(file: str | Path) -> PIL.Image.Image:
    """Decode an image file, upright and as RGB."""
    return _as_rgb(lambda: PIL.Image.open(file), f"an image must be a file that Pillow decodes, and {file} is not")


def _as_rgb(read: Callable[[], PIL.Image.Image], refusal: str) -> PIL.Image.Image:
    """Return an image as `transformers.image_utils.load_image` does: turned as its EXIF data say, in RGB.

    Only palettes go through RGBA, to the same colours, as Pillow warns of those with transparency otherwise.
    """
    with refusing(refusal, kind=DataError), read() as image:
        turned = PIL.ImageOps.exif_transpose(image)
        return (turned.convert("RGBA") if turned.mode in ("P", "PA") else turned).convert("RGB")
