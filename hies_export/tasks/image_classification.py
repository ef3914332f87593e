"""A class, a set of labels or a number for an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .classes import Classes, classifier
from .task import Task, column_sets

if TYPE_CHECKING:
    from ..data.reader import Reader


class ImageClassification(Task):
    """Classifiers of images."""

    name = "image-classification"
    auto_class = "AutoModelForImageClassification"
    ort_class = "ORTModelForImageClassification"
    cascades = True
    columns = column_sets("image", "image label")
    needs = "data.image (a column of images)"
    text = False
    images = True

    def behaviour(self, config: Any) -> Classes:
        """Return that of classes, labels or numbers, by the problem type."""
        return classifier(config)

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of images with labels."""
        from ..data.classification import ImageReader

        return ImageReader
