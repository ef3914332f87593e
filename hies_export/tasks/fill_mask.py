"""The words behind the masks of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import DataError
from .task import Task, column_sets
from .tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..data.reader import Reader


class MaskedTokens(Tokens):
    """A prediction of every masked token, from logits, (batch, tokens, vocabulary), at its own place."""

    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "token_accuracy")
    word = "masked token"
    shift = 0

    def canonical(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch, which must have labels."""
        if "labels" not in batch:
            raise DataError(
                "a masked language model is judged at its masks, so every batch must have labels: the tokens behind "
                "the masks, and -100 elsewhere, as from DataCollatorForLanguageModeling"
            )
        return dict(batch)

    def _labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        # What is behind the masks is in the labels alone.
        return batch["labels"] if "labels" in batch else self.own_labels(model, batch, output)

    def _are_answers(self, batches: Sequence[Mapping[str, Tensor]]) -> bool:
        return False


class FillMask(Task):
    """Masked language models."""

    name = "fill-mask"
    auto_class = "AutoModelForMaskedLM"
    ort_class = "ORTModelForMaskedLM"
    columns = column_sets("text")
    needs = "data.text (one column)"
    places_by_labels = True

    def behaviour(self, config: Any) -> MaskedTokens:
        """Return that of models that predict masked tokens."""
        return MaskedTokens()

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of texts, which masks some of their tokens."""
        from ..data.masked import MaskedReader

        return MaskedReader
