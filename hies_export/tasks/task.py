"""Define what a task is: which models it has, what they read, and how they behave."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ..data.reader import Reader
    from .behaviour import Behaviour

# The fields of a recipe's `data` that name columns.
COLUMNS = ("text", "image", "prompt", "answer", "query", "document", "label", "group")


def column_sets(*columns: str) -> tuple[frozenset[str], ...]:
    """Return sets of `COLUMNS`, each given as words."""
    return tuple(frozenset(names.split()) for names in columns)


class Task(ABC):
    """A task that a recipe may name.

    Attributes:
        name: The name in recipes and reports, the Hub's if it has one.
        auto_class: Name of the Auto class of transformers that loads its models.
        ort_class: Name of the class of optimum.onnxruntime that runs its export, if there is one.
        usage: Python that uses a `model` and its `tokenizer`, for the card; None for no example.
        columns: The sets of `COLUMNS` that go together; none if recipes cannot name the task.
        needs: These columns, in words.
        text_columns: How many columns `text` may name.
        columns_by_type: Whether the only columns of the right types may be read, if their names tell nothing.
        rows_together: Whether rows of a batch may belong together, so that data sets are divided before they are read.
        text: Whether its models read text.
        images: Whether they read images.
        generative: Whether they predict text, token by token, rather than a class.
        embeds: Whether they embed texts.
        cascades: Whether a cascade can answer for them: they predict classes.
        places_by_labels: Whether labels say where predictions are read, so that no row does without.
        of_item: How many texts are an item of a list that `prune` reads in place of a data set; 0 if it reads no lists.
        encoder_decoders: Whether encoder-decoders that the Auto class loads are models of the task.
        only_encoder_decoders: Whether no other model is.
        on_hub: Whether the Hub has pipelines of this name.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    ort_class: ClassVar[str | None] = None
    usage: ClassVar[str | None] = None
    columns: ClassVar[tuple[frozenset[str], ...]]
    needs: ClassVar[str]
    text_columns: ClassVar[int] = 1
    columns_by_type: ClassVar[bool] = True
    rows_together: ClassVar[bool] = False
    text: ClassVar[bool] = True
    images: ClassVar[bool] = False
    generative: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    cascades: ClassVar[bool] = False
    places_by_labels: ClassVar[bool] = False
    of_item: ClassVar[int] = 0
    encoder_decoders: ClassVar[bool] = True
    only_encoder_decoders: ClassVar[bool] = False
    on_hub: ClassVar[bool] = True

    @property
    def in_parts(self) -> bool:
        """Whether its models are exported in parts, so that there is no single graph to time."""
        return self.text and self.images

    @property
    def decodes_text(self) -> bool:
        """Whether its models are decoders of text alone, which llama.cpp runs and lm-eval judges."""
        return self.generative and not self.images

    @abstractmethod
    def behaviour(self, config: Any) -> Behaviour:
        """Return how a model of a configuration predicts.

        Raises:
            RequestError: The configuration contradicts itself, see `data.batches.predicts`.
        """

    def usual_columns(self, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns to read of a data set if their names leave no choice, by the fields of `data`; else None.

        `features` are those of the data set, by the names of its columns.
        """
        return None

    @property
    @abstractmethod
    def reader_class(self) -> type[Reader]:
        """The class that turns its rows into batches."""

    def reader(self, **fields: Any) -> Reader:
        """Return the reader of its rows, with the fields it is given.

        It reads with a copy of the processor: calling a tokenizer changes how it cuts and pads, which it would be saved
        with.
        """
        return self.reader_class(task=self, **{**fields, "processor": copy.deepcopy(fields.get("processor"))})

    def refusal(self, data: Any) -> str | None:
        """Return why the columns named by the fields of `data` cannot be read; None if they can."""
        given = {name for name in COLUMNS if getattr(data, name)}
        if given in self.columns:
            many = len(data.text) > self.text_columns
            return f"{self.name} needs {self.needs}, got {', '.join(data.text)}" if many else None
        surplus = " or ".join(f"data.{name}" for name in sorted(given.difference(*self.columns)))
        return f"{self.name} needs {self.needs}" + (f" and no {surplus}" if surplus else "")
