"""The tasks that there are, by their names."""

from __future__ import annotations

from typing import Literal

from ..errors import RequestError
from .feature_extraction import FeatureExtraction
from .image_classification import ImageClassification
from .image_text_to_text import ImageTextToText
from .task import Task
from .text_classification import TextClassification
from .text_generation import TextGeneration

TaskName = Literal[
    "text-classification", "image-classification", "text-generation", "image-text-to-text", "feature-extraction"
]
TASKS: dict[str, Task] = {
    task.name: task
    for task in (TextClassification(), ImageClassification(), TextGeneration(), ImageTextToText(), FeatureExtraction())
}


def find_task(name: str) -> Task:
    """Return the task of a name, or raise a `RequestError`."""
    if name not in TASKS:
        raise RequestError(f"the task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]
