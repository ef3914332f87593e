"""Read texts for masked language models, and mask some of their tokens."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np

from ..errors import DataError, quoted
from .batches import IGNORED, Batch
from .processors import as_batch, tokenised
from .reader import Reader, batched
from .rows import row_name

# The share of the tokens of a text that is masked, as BERT was trained (https://arxiv.org/abs/1810.04805, section 3.1).
SHARE = 0.15


class MaskedReader(Reader):
    """Reads a column of text.

    Batches have `labels` (batch, tokens) int64, the masked tokens of each text, -100 elsewhere: 15 % of its tokens, and
    one at least. Which ones are masked depends on the text alone, so they are the same however rows are drawn.
    """

    def _check_targets(self, rows: datasets.Dataset) -> None:
        if self.processor is not None and self.processor.mask_token_id is None:
            raise DataError(
                "a tokenizer that fills masks must have a mask token, but this one has none; save the model with the "
                "tokenizer that it was trained with"
            )
        for row, text in enumerate(rows[self.columns.text[0]][:]):
            if not text.strip():
                raise DataError(f"every row must have text to mask, but {row_name(rows, row)} is blank; leave it out")

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        texts = samples[self.columns.text[0]][:]
        for part in batched(range(len(samples)), batch_size):
            chosen = [texts[row] for row in part]
            found = tokenised(
                self.processor, self.config, chosen, max_length=self.max_length, return_special_tokens_mask=True
            )
            special = found.pop("special_tokens_mask")
            found["labels"] = []
            for row, text in enumerate(chosen):
                ids, labels = self._masked(found["input_ids"][row], special[row], text)
                found["input_ids"][row] = ids
                found["labels"].append(labels)
            yield as_batch(found, self.processor, self.config)

    def _masked(self, ids: list[int], special: list[int], text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a text with masks, and what is behind them."""
        mask = self.processor.mask_token_id
        words = [place for place, mark in enumerate(special) if not mark and ids[place] != mask]
        if not words:
            raise DataError(
                f"a text must have a token to mask, but {quoted(text)} has none within the {len(ids)} that are read; "
                "leave it out, or raise max_length"
            )
        generator: Any = np.random.default_rng(zlib.crc32(text.encode()))
        chosen = set(generator.choice(words, max(1, round(SHARE * len(words))), replace=False).tolist())
        masked = [mask if place in chosen else token for place, token in enumerate(ids)]
        return masked, [token if place in chosen else IGNORED for place, token in enumerate(ids)]
