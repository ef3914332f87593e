"""Text about an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .task import Task, column_sets
from .tokens import Tokens

if TYPE_CHECKING:
    from ..data.reader import Reader


class Answers(Tokens):
    """An answer for each prompt, token by token."""

    metrics = ("exact_match", "perplexity")


class ImageTextToText(Task):
    """Vision-language models: decoders of images and text."""

    name = "image-text-to-text"
    auto_class = "AutoModelForImageTextToText"
    columns = column_sets("image prompt answer", "image prompt answer label")
    generative = True
    places_by_labels = True
    needs = "data.image, data.prompt and data.answer"
    images = True
    encoder_decoders = False  # their labels stand where they are predicted

    def behaviour(self, config: Any) -> Answers:
        """Return that of language models whose rows all have answers."""
        return Answers()

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of images with prompts and answers."""
        from ..data.image_text import ImageTextReader

        return ImageTextReader
