"""The tasks a recipe may name, and everything that depends on a task's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .errors import RequestError

TaskName = Literal[
    "text-classification", "image-classification", "text-generation", "image-text-to-text", "feature-extraction"
]
Prediction = Literal["classes", "numbers", "tokens", "embeddings"]
# The fields of a recipe's `data` that name columns.
COLUMNS = ("text", "image", "prompt", "answer", "query", "document", "label", "group")


@dataclass(frozen=True)
class Task:
    """What the models of a task read and predict, and the data columns this needs."""

    name: TaskName
    auto_class: str  # name of the Auto class of transformers that loads its models
    # The sets of `COLUMNS` that go together.
    columns: tuple[frozenset[str], ...]
    needs: str  # these columns, in words
    text: bool = True
    images: bool = False
    generative: bool = False  # whether its models predict text, token by token, rather than a class
    text_columns: int = 1  # how many columns `text` may name
    may_regress: bool = False  # whether a model with one label predicts a number rather than a class
    embeds: bool = False  # whether its models embed texts

    @property
    def in_parts(self) -> bool:
        """Whether its models are exported in parts, so that there is no single graph to time."""
        return self.text and self.images

    def refusal(self, data: Any) -> str | None:
        """Return why the columns named by the fields of `data` cannot be read; None if they can."""
        given = {name for name in COLUMNS if getattr(data, name)}
        if given in self.columns and len(data.text) <= self.text_columns:
            return None
        surplus = " or ".join(f"data.{name}" for name in sorted(given.difference(*self.columns)))
        return f"{self.name} needs {self.needs}" + (f" and no {surplus}" if surplus else "")

    def prediction(self, *, regression: bool = False) -> Prediction:
        """Return what a model predicts: "classes", "numbers" if it is a regression, "tokens" or "embeddings"."""
        if self.embeds:
            return "embeddings"
        if self.generative:
            return "tokens"
        return "numbers" if regression else "classes"


def _sets(*columns: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(names.split()) for names in columns)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="text-classification",
            auto_class="AutoModelForSequenceClassification",
            columns=_sets("text", "text label", "text group", "text group label"),
            needs="data.text (one or two columns)",
            text_columns=2,
            may_regress=True,
        ),
        Task(
            name="image-classification",
            auto_class="AutoModelForImageClassification",
            columns=_sets("image", "image label"),
            needs="data.image (a column of images)",
            text=False,
            images=True,
        ),
        Task(
            name="text-generation",
            auto_class="AutoModelForCausalLM",
            columns=_sets("text", "prompt answer", "prompt answer label"),
            needs="data.text (one column), or data.prompt and data.answer",
            generative=True,
        ),
        Task(
            name="image-text-to-text",
            auto_class="AutoModelForImageTextToText",
            columns=_sets("image prompt answer", "image prompt answer label"),
            needs="data.image, data.prompt and data.answer",
            images=True,
            generative=True,
        ),
        Task(
            name="feature-extraction",
            auto_class="AutoModel",
            columns=_sets("text", "text label", "query document", "query document label"),
            needs="data.text (one column, or two and the label of their similarity), or data.query and data.document",
            text_columns=2,
            embeds=True,
        ),
    )
}


def find_task(name: str) -> Task:
    """Return the task of a name, or raise a `RequestError`."""
    if name not in TASKS:
        raise RequestError(f"the task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]
