"""Text about an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .task import Prediction, Task, column_sets
from .tokens import Tokens

if TYPE_CHECKING:
    from ..data.reader import Reader


class ImageTextToText(Tokens, Task):
    """Vision-language models: decoders of images and text."""

    name = "image-text-to-text"
    auto_class = "AutoModelForImageTextToText"
    columns = column_sets("image prompt answer", "image prompt answer label")
    needs = "data.image, data.prompt and data.answer"
    images = True

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of images with prompts and answers."""
        from ..data.image_text import ImageTextReader

        return ImageTextReader

    def usual_metrics(
        self, *, predicts: Prediction = "classes", answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return the metrics of answers, which all rows have."""
        return super().usual_metrics(answers=True, choices=choices)
