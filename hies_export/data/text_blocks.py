"""Pack plain text into blocks of equal length, as language models are trained and judged on it."""

from __future__ import annotations

from typing import Any

import datasets

from ..errors import DataError


def pack_text(rows: datasets.Dataset, *, column: str, tokenizer: Any, length: int) -> list[list[int]]:
    """Tokenise all texts, join them, and cut them into blocks.

    Each row is a text of its own, and the tokenizer's end-of-text (or else begin-of-text) token is set between two of
    them. Rows that come from a txt file, or of which some are blank (as in WikiText), are instead the lines of one
    running text, joined by line breaks: there a blank row is the empty line between paragraphs or stories.

    Args:
        rows: In their own order, as lines may continue each other.
        column: The text column.
        tokenizer: Adds no special token but the one between texts.
        length: Tokens in a block.

    Returns:
        Blocks of exactly `length` tokens; the incomplete last one is dropped unless it is the only one.

    Raises:
        DataError: There are fewer than two tokens, or several texts but no token to set between them.
    """
    texts = list(rows[column][:])
    if rows.info.builder_name == "text" or not all(text.strip() for text in texts):
        texts = ["".join(text if text.endswith("\n") else text + "\n" for text in texts)]
    between = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if between is None and len(texts) > 1:
        raise DataError(
            "texts are joined by the tokenizer's end-of-text or begin-of-text token, but it has neither; set "
            "tokenizer.eos_token and save it with the model, or set packing to false"
        )
    tokens: list[int] = []
    for ids in tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]:
        tokens += [between, *ids] if tokens else ids
    if len(tokens) < 2:
        raise DataError(f"text must have at least two tokens to predict one from the other, but {column!r} has fewer")
    return [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)] or [tokens]
