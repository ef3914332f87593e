"""A class, a set of labels, a number or a rank for a text or a pair of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .classes import Classes, classifier
from .task import Task, column_sets

if TYPE_CHECKING:
    from ..data.reader import Reader


class TextClassification(Task):
    """Classifiers and regressions of texts, and rerankers of pairs of texts."""

    name = "text-classification"
    auto_class = "AutoModelForSequenceClassification"
    ort_class = "ORTModelForSequenceClassification"
    cascades = True
    columns = column_sets("text", "text label", "text group", "text group label")
    needs = "data.text (one or two columns)"
    text_columns = 2
    of_item = 2

    def behaviour(self, config: Any) -> Classes:
        """Return that of classes, labels or numbers, by the problem type."""
        return classifier(config)

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of texts with labels, or with groups."""
        from ..data.classification import TextReader

        return TextReader
