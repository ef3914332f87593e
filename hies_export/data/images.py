"""Images out of rows, as RGB."""

from __future__ import annotations

from typing import Any

import datasets
import PIL.Image

from ..errors import DataError


def holds_images(feature: Any) -> bool:
    """Tell whether a column may hold images: decoded, encoded, or a path."""
    if isinstance(feature, dict):
        return {"bytes", "path"} <= set(feature)
    return isinstance(feature, datasets.Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def as_images(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """Rows whose image column decodes when it is read."""
    return rows if rows.features[column] == datasets.Image() else rows.cast_column(column, datasets.Image())


def rgb_image(rows: datasets.Dataset, column: str, row: int) -> PIL.Image.Image:
    """Decode the image of one row.

    Raises:
        DataError: it does not decode.
    """
    try:
        image = rows[row][column]
        if image.mode in ("P", "PA"):  # straight to RGB, Pillow warns about a palette with transparency
            image = image.convert("RGBA")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"every {column!r} must be an image, but row {row} (from 0) is not: {error}") from error
