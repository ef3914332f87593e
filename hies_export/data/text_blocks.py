"""Pack plain text into blocks of equal length, as language models are trained and judged on it."""

from __future__ import annotations

import itertools
import tempfile
from array import array
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from ..errors import DataError
from .rows import column_values

# The one column of samples that are packed blocks.
BLOCK = "input_ids"


# Texts that are tokenised at once.
TEXTS = 1000


def pack_text(rows: datasets.Dataset, *, column: str, tokenizer: Any, length: int) -> datasets.Dataset:
    """Tokenise all texts, join them, and cut them into blocks: one row each, of `length` tokens in the column `BLOCK`.

    Tokens go to a temporary file, so that memory does not grow with the number of rows, except for a running text,
    which is tokenised in one piece. The incomplete last block is dropped unless it is the only one.

    Each row is a separate text, and the tokenizer's end-of-text (or else begin-of-text) token separates them. Rows from
    a txt file, or rows of which some are blank (as in WikiText), are instead the lines of one running text, joined by
    line breaks: a blank row is the empty line between paragraphs or stories.
    """
    running = rows.info.builder_name == "text" or not all(text.strip() for text in column_values(rows, column))
    between = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if between is None and len(rows) > 1 and not running:
        raise DataError(
            "texts are joined by the tokenizer's end-of-text or begin-of-text token, but it has neither; set "
            "tokenizer.eos_token and save it with the model, or set packing to false"
        )
    texts = column_values(rows, column)
    if running:
        texts = iter(["".join(text if text.endswith("\n") else text + "\n" for text in texts)])
    count = 0
    with tempfile.TemporaryFile() as file:
        while part := list(itertools.islice(texts, TEXTS)):
            encoded = tokenizer(part, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids in encoded["input_ids"]:
                ids = [between, *ids] if count else ids
                array("q", ids).tofile(file)
                count += len(ids)
        if count < 2:
            raise DataError(
                f"text must have at least two tokens to predict one from the other, but {column!r} has fewer"
            )
        file.flush()
        tokens = np.memmap(file, dtype=np.int64, mode="r", shape=(count,))
    return _blocks(tokens, min(length, count))


def _blocks(tokens: np.ndarray, length: int) -> datasets.Dataset:
    """Return tokens (tokens,) cut into whole blocks, without a copy of them."""
    starts = np.arange(0, len(tokens) - len(tokens) % length + 1, length, dtype=np.int64)
    blocks = pa.LargeListArray.from_arrays(pa.array(starts), pa.array(tokens[: starts[-1]]))
    return datasets.Dataset(datasets.table.InMemoryTable(pa.table({BLOCK: blocks})))
