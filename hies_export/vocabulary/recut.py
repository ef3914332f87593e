"""Convert batches to the tokens that stay: each token that went becomes the pieces that its text is cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..data.batches import FILL, IGNORED, JUDGED_KEY, PIECE_KEY, Batch, padded, size_of
from ..data.processors import padding_token, tokenizer_of
from ..model.tokens import longest_sequence
from ..tasks import Predictions, Task
from ..tasks.text_generation import WHOLE
from .kept import KeptTokens, backend_of
from .tokenizer import CutBeside


@dataclass(frozen=True)
class Recut:
    """Converts batches for the dense model, with its whole vocabulary, to the tokens that the smaller model has.

    A token that went becomes its pieces, as if its text stood alone: beside others of the same word, the tokenizer may
    cut them together otherwise.
    """

    kept: KeptTokens
    pieces: Callable[[int], list[int]]  # the pieces of a token of the whole vocabulary, by their new numbers
    text: Callable[[list[int]], str]  # the text of tokens of the whole vocabulary
    labels: bool  # whether labels are tokens of the text; otherwise a token's first piece has its label
    shift: int  # how many tokens before a label its prediction stands
    pad: int  # what the smaller model pads with
    limit: int | None  # the most tokens that the models take; None for no limit

    @classmethod
    def of(cls, task: Task, kept: KeptTokens, processors: tuple[Any, Any], config: Any) -> Recut:
        """Return the conversion for a task, by the processors of the dense and slim model and the latter's config."""
        whole, smaller = map(tokenizer_of, processors)
        pad = padding_token(smaller, config)
        return cls(
            kept,
            pieces=pieces_of(whole, smaller, pad),
            text=partial(whole.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            labels=task.predicts == "tokens",
            shift=task.shift,
            pad=pad,
            limit=longest_sequence(task.config),
        )

    def batches(self, dense: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
        """Return the batches for the dense model, and those for the smaller one.

        The former are as they were, unless a row gets longer than the limit: tokens near its start, but not the first,
        are then left out for both.
        """
        pairs = [self._batch(batch) for batch in dense]
        return [for_dense for for_dense, _ in pairs], [for_slim for _, for_slim in pairs]

    def _batch(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return a batch as the dense model reads it, and as the smaller one does, where rows may be longer."""
        real = batch["attention_mask"] != 0
        by_token = [name for name, value in batch.items() if value.shape == real.shape]
        pairs = [self._row({name: batch[name][row][real[row]] for name in by_token}) for row in range(len(real))]
        pads_left, pad_ids = bool((~real[:, 0]).any()), batch["input_ids"][~real].tolist()

        def joined(rows: list[Batch], pad: int) -> Batch:
            fill = {**FILL, "input_ids": pad}
            columns = {name: padded([row[name] for row in rows], fill.get(name, 0), left=pads_left) for name in rows[0]}
            return batch | columns

        dense = joined([for_dense for for_dense, _ in pairs], pad_ids[0] if pad_ids else 0)
        slim = joined([for_slim for _, for_slim in pairs], self.pad)
        if self.labels and "labels" in dense and "characters" not in batch:
            texts = [self.text(row[row >= 0].tolist()) for row in dense["labels"][:, self.shift :]]
            dense["characters"] = slim["characters"] = torch.tensor([len(text) for text in texts])
        return dense, slim

    def _row(self, row: Batch) -> tuple[Batch, Batch]:
        """Return a row as the dense and as the smaller model read it; values are (tokens,), without padding."""
        ids, has_labels = row["input_ids"], self.labels and "labels" in row
        # A mask hides a token, which its label says.
        tokens = row["labels"].where(row["labels"] != IGNORED, ids) if has_labels else ids
        pieces = [self.pieces(token) for token in tokens.tolist()]
        counts = torch.tensor([len(of_token) for of_token in pieces])
        if self.limit is not None and len(ids) > 1 and counts.sum() > self.limit:
            # The first token stays, and as many of the last ones as fit beside it.
            to_the_end = counts.flip(0).cumsum(0).flip(0)
            fits = to_the_end + counts[0] <= self.limit
            fits[0] = True
            return self._row({name: value[fits] for name, value in row.items()})
        slim = {name: value.repeat_interleave(counts) for name, value in row.items()}
        new_ids = torch.tensor([piece for of_token in pieces for piece in of_token])
        masks = torch.tensor([self.pieces(token)[0] for token in ids.tolist()]).repeat_interleave(counts)
        slim["input_ids"] = masks.where((ids != tokens).repeat_interleave(counts), new_ids)
        # 1, 2, ... for the pieces of a token that went, 0 for tokens that stay.
        went = torch.tensor([token not in self.kept.numbers for token in tokens.tolist()]).repeat_interleave(counts)
        slim[PIECE_KEY] = torch.cat([torch.arange(1, count + 1) for count in counts.tolist()]) * went
        by_first_piece = (JUDGED_KEY,) if self.labels else (JUDGED_KEY, "labels")
        for name in by_first_piece:
            if name in row:
                slim[name] = slim[name].masked_fill(slim[PIECE_KEY] > 1, FILL.get(name, 0))
        if has_labels:
            labelled = slim["labels"] != IGNORED
            labelled[: int(counts[0]) * self.shift] = False  # nothing predicts a row's first token
            row = row | {"labels": row["labels"].index_fill(0, torch.arange(self.shift), IGNORED)}
            slim["labels"] = new_ids.where(labelled, IGNORED)
        return row, slim


def pieces_of(whole: Any, smaller: Any, unknown: int) -> Callable[[int], list[int]]:
    """Return a function from a token of a tokenizer to its pieces in a smaller one; `unknown` where that has none.

    Of a token that continues a word, such as ##ing, WordPiece takes the longest beginnings that it has, as of a word.
    """
    backend, known = backend_of(smaller), smaller.get_vocab()

    @cache
    def pieces(token: int) -> list[int]:
        text = whole.convert_ids_to_tokens(token)
        if text in known:
            return [known[text]]
        return [piece.id for piece in backend.model.tokenize(text)] or [unknown]

    return pieces


def in_new_numbers(predictions: Predictions, labels: Tensor, kept: KeptTokens) -> Predictions:
    """Return the dense model's predictions of tokens by their new numbers, to compare with the smaller model's.

    As there, a token that went is `WHOLE`, which says that all its pieces are right, where it is in `labels`, (label
    tokens,); elsewhere it is like no other.
    """
    values = kept.new_numbers(gone=-2)[predictions.values]
    return replace(predictions, values=values.masked_fill((values < 0) & (predictions.values == labels), WHOLE))


def compare_cuts(dense: Sequence[Batch], slim: Sequence[Batch], kept: KeptTokens) -> CutBeside:
    """Return how many rows have tokens that went, and how many tokens each model reads in its batches of these rows."""
    if PIECE_KEY in slim[0]:
        went = [batch[PIECE_KEY] > 0 for batch in slim]
    else:
        numbers = kept.new_numbers(gone=-1)
        went = [(numbers[batch["input_ids"]] < 0) & (batch["attention_mask"] != 0) for batch in dense]
    return CutBeside(
        texts=sum(size_of(batch) for batch in dense),
        otherwise=sum(int(by_token.any(-1).sum()) for by_token in went),
        dense_tokens=sum(int(batch["attention_mask"].sum()) for batch in dense),
        slim_tokens=sum(int(batch["attention_mask"].sum()) for batch in slim),
    )
