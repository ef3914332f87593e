"""Tasks made of a name, a configuration, columns and a processor, and predictions made of numbers."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hies_export.recipe.sections import Columns
from hies_export.tasks import TASKS, Predictions, Task, TextClassification

NOTHING = Columns()


def reading(task: str, *, columns: Columns = NOTHING, config: Any, processor: Any = None, **fields: Any) -> Task:
    """Return a task bound to a configuration that reads these columns; `fields` are further ones of `Columns`."""
    return TASKS[task](config).to_read(columns.model_copy(update=fields), processor)


def classifying(kind: str = "classes", **options: Any) -> TextClassification:
    """Return the task of a model that predicts classes, label sets or numbers."""
    count, problem = 1 if kind == "numbers" else 3, "multi_label_classification" if kind == "labels" else None
    return TextClassification(SimpleNamespace(num_labels=count, problem_type=problem), **options)


def given(logits: Tensor, kind: str | None = None) -> Predictions:
    """Return logits as predictions: of numbers if there is one for each row, else of classes."""
    return Predictions(kind or ("numbers" if logits.shape[-1] == 1 else "classes"), logits)


def share_same(dense: Predictions, other: Predictions) -> float:
    """Return the share of predictions that are the dense model's, of a classifier or a language model."""
    task = classifying(dense.kind) if dense.nll is None else TASKS["text-generation"](None)
    return task.same(dense, other).double().mean().item()
