"""The object that says what a task is: what its models read, what they predict, how they are scored and reported.

- `task.py`: the `Task`: which models it has, and what they read.
- `behaviour.py`: the `Behaviour`: what models predict, how units are scored by it, and how it is judged.
- `text_classification.py` and the other files named as the Hub names a task: a task each; `classes.py` and `tokens.py`
  are the behaviours that several have.
- `predictions.py`: what is kept of the predictions of language models.
- `registry.py`: all of them by their names.
- `models.py`: the task of a model, and the behaviour of any; `by_shape.py` is that of a model of no task.

A recipe is checked against the tasks before torch is imported, which takes seconds. So all but the last two import
torch and the readers only where they run.
"""

from .behaviour import Behaviour, Predicted
from .registry import TASKS, find_task, register_task
from .task import COLUMNS, Task, column_sets

__all__ = [
    "COLUMNS",
    "TASKS",
    "Behaviour",
    "Predicted",
    "Task",
    "column_sets",
    "find_task",
    "register_task",
]
