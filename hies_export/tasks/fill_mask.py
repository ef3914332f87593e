"""The words behind the masks of a text."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from ..errors import DataError, quoted
from ..late import PreTrainedModel, Tensor, datasets, np, torch
from .late import Batch, data
from .registry import register_task
from .task import Task, Use, batched
from .text_generation import TextGeneration

# The share of the tokens of a text that is masked, as BERT was trained (https://arxiv.org/abs/1810.04805, section 3.1).
SHARE = 0.15


@register_task
class FillMask(TextGeneration):
    """Masked language models, such as a base model before it is fine-tuned.

    Every masked token is predicted, from logits, (batch, tokens, vocabulary), at its own place. Batches have `labels`
    (batch, tokens) int64, the masked tokens of each text, -100 elsewhere: 15 % of its tokens, and one at least. Which
    ones are masked depends on the text alone, so they are the same however rows are drawn.
    """

    name = "fill-mask"
    auto_class = "AutoModelForMaskedLM"
    ort_class = "ORTModelForMaskedLM"
    reads = ("text",)
    needs = "data.text (one column)"
    a_row_is_a_sample = True
    generative = decodes_text = False

    metrics = ("perplexity", "token_accuracy")
    word = "masked token"
    shift = 0

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse a tokenizer without a mask token."""
        if self.processor is not None and self.processor.mask_token_id is None:
            raise DataError(
                "a tokenizer that fills masks must have a mask token, but this one has none; save the model with the "
                "tokenizer that it was trained with"
            )

    samples = Task.samples  # each row is a text, and none is packed

    def tokens(self, samples: datasets.Dataset) -> Iterator[Tensor]:
        """Yield the tokens, (tokens,) int64, of each text without masks, and without a limit on its length."""
        texts = samples[self.columns.text[0]][:]
        encoded = data.tokenize(self.processor, self.config, texts, max_length=None, truncation=False)
        yield from map(torch.tensor, encoded["input_ids"])

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of texts with masks."""
        options: dict[str, Any] = {"max_length": self.columns.max_length, "return_special_tokens_mask": True}
        for texts in batched(samples[self.columns.text[0]][:], size):
            encoded = data.tokenize(self.processor, self.config, texts, **options)
            special = encoded.pop("special_tokens_mask")
            masked = [self._masked(*row) for row in zip(encoded["input_ids"], special, texts, strict=True)]
            encoded["input_ids"], encoded["labels"] = [ids for ids, _ in masked], [labels for _, labels in masked]
            yield data.as_batch(encoded, self.processor, self.config)

    def _masked(self, ids: list[int], special: list[int], text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a text with `SHARE` of its tokens masked, none of them `special`, and its labels."""
        mask_id = self.processor.mask_token_id
        maskable = [place for place, is_special in enumerate(special) if not is_special and ids[place] != mask_id]
        if not maskable:
            raise DataError(
                f"a text must have a token to mask, but {quoted(text)} has none within the {len(ids)} that are read; "
                "leave it out, or raise max_length"
            )
        generator: Any = np.random.default_rng(zlib.crc32(text.encode()))  # the text seeds its own draw
        chosen = set(generator.choice(maskable, max(1, round(SHARE * len(maskable))), replace=False).tolist())
        masked = [mask_id if place in chosen else token for place, token in enumerate(ids)]
        return masked, [token if place in chosen else data.IGNORED for place, token in enumerate(ids)]

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return the rows of a batch that have a masked token: collators, which mask at random, leave some without."""
        if "labels" not in batch:
            raise DataError(
                "a masked language model is judged at its masks, so every batch must have labels: the tokens behind "
                "the masks, and -100 elsewhere, as from DataCollatorForLanguageModeling"
            )
        rows = self.predicting(batch["labels"]).any(-1)
        if not rows.any():
            raise DataError(
                "every batch must have a label, the token behind a mask, but one has none; make batches of more rows"
            )
        return {key: value[rows] for key, value in batch.items()}
