"""Choose the reader of a task."""

from __future__ import annotations

from typing import Any

from ..tasks import find_task
from .classification import ImageReader, TextReader
from .embedding import EmbeddingReader
from .generation import TextGenerationReader
from .image_text import ImageTextReader
from .reader import Reader

READERS: dict[str, type[Reader]] = {
    reader.task: reader for reader in (TextReader, ImageReader, TextGenerationReader, ImageTextReader, EmbeddingReader)
}


def reader_for(task: str, **fields: Any) -> Reader:
    """Return the `Reader` of a task, with the fields it is given."""
    return READERS[find_task(task).name](**fields)
