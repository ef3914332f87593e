"""Text that goes on from text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .task import Task, column_sets
from .tokens import Tokens

if TYPE_CHECKING:
    from ..data.reader import Reader


class TextGeneration(Task):
    """Language models: decoders of text alone."""

    name = "text-generation"
    auto_class = "AutoModelForCausalLM"
    columns = column_sets("text", "prompt answer", "prompt answer label")
    generative = True
    places_by_labels = True
    needs = "data.text (one column), or data.prompt and data.answer"

    def behaviour(self, config: Any) -> Tokens:
        """Return that of language models."""
        return Tokens()

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of plain text, or of prompts and answers."""
        from ..data.generation import TextGenerationReader

        return TextGenerationReader
