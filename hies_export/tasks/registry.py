"""The tasks that there are, by their names."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from ..errors import RequestError
from .feature_extraction import FeatureExtraction
from .fill_mask import FillMask
from .image_classification import ImageClassification
from .image_text_to_text import ImageTextToText
from .question_answering import QuestionAnswering
from .task import Task
from .text_classification import TextClassification
from .text_generation import TextGeneration
from .token_classification import TokenClassification

TASKS: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Add a task to those that recipes may name and that models are found by; return it."""
    TASKS[task.name] = task
    return task


for _task in (
    TextClassification(),
    TokenClassification(),
    QuestionAnswering(),
    FillMask(),
    FeatureExtraction(),
    ImageClassification(),
    TextGeneration(),
    ImageTextToText(),
):
    register_task(_task)


def _known(name: str) -> str:
    if name not in TASKS:
        raise ValueError(f"must be one of {', '.join(TASKS)}, got {name!r}")
    return name


# The name of a task, as a field of a recipe.
TaskName = Annotated[str, AfterValidator(_known)]


def find_task(name: str) -> Task:
    """Return the task of a name, or raise a `RequestError`."""
    if name not in TASKS:
        raise RequestError(f"the task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]
