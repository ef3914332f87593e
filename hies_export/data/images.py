"""Open images, from files or from rows, in as many channels of 8 bits as a model takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import PIL.Image

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


def image_of_row(rows: datasets.Dataset, column: str, row: int, *, channels: int = 3) -> PIL.Image.Image:
    """Decode the image of one row: grey for one channel, with transparency for four, else as RGB."""
    refusal = f"every {column!r} must be an image, but {row_name(rows, row)} is not"
    return _converted(lambda: rows[row][column], refusal, {1: "L", 4: "RGBA"}.get(channels, "RGB"))


def image_of_file(file: str | Path) -> PIL.Image.Image:
    """Decode an image file, as RGB."""
    refusal = f"an image must be a file that Pillow decodes, and {file} is not"
    return _converted(lambda: PIL.Image.open(file), refusal, "RGB")


def _converted(read: Callable[[], PIL.Image.Image], refusal: str, mode: str) -> PIL.Image.Image:
    with refusing(refusal, kind=DataError), read() as image:
        if image.mode[0] in "IF":  # Pillow would cut values off at 255
            raise ValueError(f"it must have 8 bits per channel, got mode {image.mode}, which has more")
        # Pillow warns when a palette with transparency is converted straight to RGB.
        has_palette = image.mode in ("P", "PA")
        return (image.convert("RGBA") if has_palette else image).convert(mode)
