"""Choose the reader of a task."""

from __future__ import annotations

from typing import Any

from ..tasks import find_task
from .classification import ImageReader, TextReader
from .generation import TextGenerationReader
from .image_text import ImageTextReader
from .reader import Columns, Reader

READERS: dict[str, type[Reader]] = {
    "text-classification": TextReader,
    "image-classification": ImageReader,
    "text-generation": TextGenerationReader,
    "image-text-to-text": ImageTextReader,
}


def reader_for(
    task: str,
    *,
    columns: Columns,
    config: Any,
    processor: Any = None,
    max_length: int | None = None,
    packing: bool = True,
) -> Reader:
    """Return what turns rows into batches for a task.

    Args:
        task: One of `TASKS`; regression is text-classification with one label.
        columns: As `Reader` has it, and so the others.
        config: The model's.
        processor: From `load_processor`.
        max_length: Tokens of a sample.
        packing: Whether plain text is packed into blocks.

    Raises:
        RequestError: The task is not one of these.
    """
    reader = READERS[find_task(task).name]
    return reader(columns, config, processor, max_length=max_length, packing=packing)
