"""The tasks that there are, by their names."""

from __future__ import annotations

from ..errors import RequestError
from .automatic_speech_recognition import AutomaticSpeechRecognition
from .feature_extraction import FeatureExtraction
from .fill_mask import FillMask
from .image_classification import ImageClassification
from .image_text_to_text import ImageTextToText
from .question_answering import QuestionAnswering
from .task import COLUMNS, Task
from .text2text_generation import Text2TextGeneration
from .text_classification import TextClassification
from .text_generation import TextGeneration
from .token_classification import TokenClassification

TASKS: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Register a task, so that recipes may name it and models are found by its class.

    One of the same name is replaced.

    Args:
        task: An object of a `tasks.Task`.

    Returns:
        The task itself.

    Raises:
        RequestError: It is no task, or it names columns that a recipe has no field for.

    Examples:
        >>> from hies_export.tasks.text_classification import TextClassification
        >>> class NextSentencePrediction(TextClassification):
        ...     name = "next-sentence-prediction"
        ...     auto_class = "AutoModelForNextSentencePrediction"
        >>> register_task(NextSentencePrediction()).name
        'next-sentence-prediction'
    """
    if not isinstance(task, Task):
        given = f"the class {task.__name__}; call it" if isinstance(task, type) else f"a {type(task).__name__}"
        raise RequestError(f"a task must be an object of a hies_export.tasks.Task, got {given}")
    if unknown := sorted({name for names in task.columns for name in names}.difference(COLUMNS)):
        raise RequestError(f"the columns of a task must be among {', '.join(COLUMNS)}, got {', '.join(unknown)}")
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
    Text2TextGeneration(),
    AutomaticSpeechRecognition(),
):
    register_task(_task)


def find_task(name: str) -> Task:
    """Return the task of a name, or raise a `RequestError`."""
    if name not in TASKS:
        raise RequestError(f"the task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]
