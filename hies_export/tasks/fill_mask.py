"""The words behind the masks of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import DataError
from .task import Task, column_sets
from .tokens import Tokens, check_token_labels

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
        """Return the rows that have a masked token.

        Collators mask tokens at random, so that short texts may come without.
        """
        if "labels" not in batch:
            raise DataError(
                "a masked language model is judged at its masks, so every batch must have labels: the tokens behind "
                "the masks, and -100 elsewhere, as from DataCollatorForLanguageModeling"
            )
        check_token_labels(model, batch["labels"])
        if (ids := batch.get("input_ids")) is not None and batch["labels"].shape != ids.shape:
            raise DataError(
                f"the labels of a masked language model must be one for each of input_ids, {tuple(ids.shape)}, but a "
                f"batch has {tuple(batch['labels'].shape)}"
            )
        rows = self.predicting(batch["labels"]).any(-1)
        if not rows.any():
            raise DataError(
                "every batch must have a label, the token behind a mask, but one has none; make batches of more rows"
            )
        return {key: value[rows] for key, value in batch.items()}

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest token at every real one, (batch, tokens): which of them are masks, only labels tell."""
        import torch

        from ..data.batches import IGNORED

        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0
        return output.argmax(-1).where(real.to(output.device), IGNORED)

    def _labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        return batch["labels"] if "labels" in batch else self.own_labels(model, batch, output)

    def _are_answers(self, batches: Sequence[Mapping[str, Tensor]]) -> bool:
        return False


class FillMask(Task):
    """Masked language models, such as a base model before it is fine-tuned."""

    name = "fill-mask"
    auto_class = "AutoModelForMaskedLM"
    ort_class = "ORTModelForMaskedLM"
    columns = column_sets("text")
    needs = "data.text (one column)"
    places_by_labels = True
    encoder_decoders = False  # their losses feed the decoder the labels, which are behind the masks

    def behaviour(self, config: Any) -> MaskedTokens:
        """Return that of models that predict masked tokens."""
        return MaskedTokens()

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of texts, which masks some of their tokens."""
        from ..data.masked import MaskedReader

        return MaskedReader
