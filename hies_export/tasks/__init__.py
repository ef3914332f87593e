"""The object that says what a task is: what its models read, what they predict, how they are scored and reported.

- `task.py`: the `Task`, and of it the `Behaviour` that models of no task have, too.
- `text_classification.py`, `image_classification.py`, `text_generation.py`, `image_text_to_text.py` and
  `feature_extraction.py`: a task each; `classes.py` and `tokens.py` are what some have in common.
- `registry.py`: all of them by their names.
- `models.py`: the task of a model, and the behaviour of any; `by_shape.py` is that of a model of no task.

A recipe is checked against the tasks before torch is imported, which takes seconds. So all but the last two import
torch and the readers only where they run.
"""

from .registry import TASKS, TaskName, find_task, output_names
from .task import COLUMNS, Behaviour, Prediction, Task

__all__ = ["COLUMNS", "TASKS", "Behaviour", "Prediction", "Task", "TaskName", "find_task", "output_names"]
