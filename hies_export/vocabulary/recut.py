"""Convert batches to the tokens that stay: each token that went becomes the pieces that its text is cut into."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    """Converts batches of the whole vocabulary to the tokens that stay, with the same predictions to make.

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
        """Return the conversion of batches that a task reads for a dense model.

        `processors` are those of the dense and the smaller model, and `config` is the smaller one's.
        """
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
        """Return batches for the dense model, and for the smaller one.

        The former are as they were, unless a row gets longer than the limit: tokens near its start, but not the first,
        are then left out for both.
        """
        both = [self._batch(batch) for batch in dense]
        return [one for one, _ in both], [other for _, other in both]

    def _batch(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return one batch for both models, whose rows differ in length."""
        real = batch["attention_mask"] != 0
        by_token = [name for name, value in batch.items() if value.shape == real.shape]
        rows = [self._row({name: batch[name][row][real[row]] for name in by_token}) for row in range(len(real))]
        left, filled = bool((~real[:, 0]).any()), batch["input_ids"][~real].tolist()

        def joined(rows: list[Batch], pad: int) -> Batch:
            fill = {**FILL, "input_ids": pad}
            return batch | {n: padded([row[n] for row in rows], fill.get(n, 0), left=left) for n in rows[0]}

        dense = joined([one for one, _ in rows], filled[0] if filled else 0)
        slim = joined([other for _, other in rows], self.pad)
        if self.labels and "labels" in dense and "characters" not in batch:
            texts = [self.text(row[row >= 0].tolist()) for row in dense["labels"][:, self.shift :]]
            dense, slim = (one | {"characters": torch.tensor([*map(len, texts)])} for one in (dense, slim))
        return dense, slim

    def _row(self, row: Batch) -> tuple[Batch, Batch]:
        """Return one row for both models; each value of `row` is (tokens,), without padding."""
        ids, has_labels = row["input_ids"], self.labels and "labels" in row
        # A mask hides a token, which its label says.
        tokens = row["labels"].where(row["labels"] != IGNORED, ids) if has_labels else ids
        cuts = [self.pieces(token) for token in tokens.tolist()]
        counts = torch.tensor([*map(len, cuts)])
        if self.limit is not None and len(ids) > 1 and counts.sum() > self.limit:
            # The first token stays, and as many of the last ones as fit beside it.
            fits = counts.flip(0).cumsum(0).flip(0) + counts[0] <= self.limit
            fits[0] = True
            return self._row({name: value[fits] for name, value in row.items()})
        slim = {name: value.repeat_interleave(counts) for name, value in row.items()}
        pieces = torch.tensor([piece for cut in cuts for piece in cut])
        masks = torch.tensor([self.pieces(token)[0] for token in ids.tolist()]).repeat_interleave(counts)
        slim["input_ids"] = masks.where((ids != tokens).repeat_interleave(counts), pieces)
        went = torch.tensor([token not in self.kept.numbers for token in tokens.tolist()])
        slim[PIECE_KEY] = torch.cat([torch.arange(1, len(cut) + 1) for cut in cuts]) * went.repeat_interleave(counts)
        for name in {*row} & {JUDGED_KEY, *([] if self.labels else ["labels"])}:
            slim[name] = slim[name].masked_fill(slim[PIECE_KEY] > 1, FILL.get(name, 0))  # the first piece has it
        if has_labels:
            labelled = slim["labels"] != IGNORED
            labelled[: int(counts[0]) * self.shift] = False  # nothing predicts a row's first token
            row = row | {"labels": row["labels"].index_fill(0, torch.arange(self.shift), IGNORED)}
            slim["labels"] = pieces.where(labelled, IGNORED)
        return row, slim


def pieces_of(whole: Any, smaller: Any, unknown: int) -> Callable[[int], list[int]]:
    """Return a function from a token of a tokenizer to its pieces in a smaller one; `unknown` where that has none."""
    backend, known = backend_of(smaller), smaller.get_vocab()
    model = json.loads(backend.to_str())["model"]
    prefix = model.get("continuing_subword_prefix") or ""

    @cache
    def pieces(token: int) -> list[int]:
        text = whole.convert_ids_to_tokens(token)
        if text in known:
            return [known[text]]
        if model["type"] == "WordPiece":
            return longest_first(text, prefix, known) or [unknown]
        return [piece.id for piece in backend.model.tokenize(text)] or [unknown]

    return pieces


def longest_first(text: str, prefix: str, known: Mapping[str, int]) -> list[int]:
    """Return the tokens that WordPiece makes of a word, or of its rest, which begins with a prefix; [] if it cannot.

    Examples:
        >>> longest_first("##abc", "##", {"##a": 0, "##ab": 1, "##c": 2})
        [1, 2]
    """
    found: list[int] = []
    while text not in ("", prefix):
        end = next((end for end in range(len(text), 0, -1) if text[:end] in known and text[:end] != prefix), None)
        if end is None:
            return []
        found.append(known[text[:end]])
        text = prefix + text[end:]
    return found


def in_new_numbers(predictions: Predictions, labels: Tensor, kept: KeptTokens) -> Predictions:
    """Return the dense model's predictions of tokens by their new numbers, as `of_pieces` gives the smaller model's.

    A token that went is `WHOLE` where it is the label, (label tokens,), and else like no other.
    """
    values = kept.new_numbers(gone=-2)[predictions.values]
    return replace(predictions, values=values.masked_fill((values < 0) & (predictions.values == labels), WHOLE))


def compare_cuts(dense: Sequence[Batch], slim: Sequence[Batch], kept: KeptTokens) -> CutBeside:
    """Return how many rows, which both models read, have tokens that went, and how many tokens each model reads."""
    if PIECE_KEY in slim[0]:
        went = [batch[PIECE_KEY] > 0 for batch in slim]
    else:
        numbers = kept.new_numbers(gone=-1)
        went = [(numbers[batch["input_ids"]] < 0) & (batch["attention_mask"] != 0) for batch in dense]
    otherwise = sum(int(in_row.any(-1).sum()) for in_row in went)
    tokens = [sum(int(batch["attention_mask"].sum()) for batch in side) for side in (dense, slim)]
    return CutBeside(sum(map(size_of, dense)), otherwise, *tokens)
