"""Refuse paths that no file system takes, before anything is done."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import TypeVar

from .errors import quoted

# Linux and macOS take names of 255 bytes; results are written under a name of 10 more before they get their own.
LONGEST_NAME = 240
LONGEST_PATH = 3000

AnyPath = TypeVar("AnyPath", str, Path)


def check_path(path: AnyPath) -> AnyPath:
    """Return a path, or a Hub id, that can be looked up, written to and printed; whether it exists is not looked at.

    Raises:
        ValueError: It has control characters, characters that UTF-8 cannot hold, or too many of them.
    """
    text = str(path)
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError(f"a path must be text without control characters, got {quoted(text)}")
    longest = max(len(name.encode()) for name in text.split("/"))
    if longest > LONGEST_NAME or len(text.encode()) > LONGEST_PATH:
        raise ValueError(
            f"a path must have at most {LONGEST_PATH} bytes, and {LONGEST_NAME} between two slashes, got {quoted(text)}"
        )
    return path
