"""The class that says what a task is: how rows are read for it, how units are scored by it, and what is predicted.

- `task.py`: `Task`, bound to a model's configuration, with the defaults of a row of logits per sample, and the
  `Predictions` that it compares.
- `classification.py` and the other files named as the Hub names a task: a class each. `labels.py`, `prompts.py` and
  `conversations.py` read what several of them need.
- `registry.py`: all of them by their names, and the task of a model.
- `given.py`: the batches of what a user holds in memory.

A recipe is checked against the tasks before torch is imported, which takes seconds. So all but `given.py` import torch,
and what reads rows, by `late.py`.
"""

# ruff: noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registry import BUILT_IN, TASKS, register_task, task_of
from .task import COLUMNS, Loss, Predictions, Task, Use, batched

if TYPE_CHECKING:
    from .classification import ImageClassification, TextClassification
    from .feature_extraction import FeatureExtraction
    from .fill_mask import FillMask
    from .image_text_to_text import ImageTextToText
    from .question_answering import QuestionAnswering
    from .text_generation import TextGeneration
    from .token_classification import TokenClassification


def __getattr__(name: str) -> Any:
    """Import the class of a built-in task when it is first asked for; that of "fill-mask" is `FillMask`."""
    for task_name, (file, _) in BUILT_IN.items():
        if name == task_name.title().replace("-", ""):
            return getattr(import_module(f".{file}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
