"""Read questions about a text, whose answers are parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import datasets
import torch

from ..errors import DataError, quoted
from .batches import Batch
from .reader import Reader, batched
from .rows import row_name
from .tokens import as_batch, padded, token_limit, tokenised

# Tokens of a window, and how many of them two windows of one text share, as in transformers' question answering.
WINDOW, STRIDE = 384, 128


class QuestionsReader(Reader):
    """Reads two columns, the question and the context, and the column of answers in the form of SQuAD.

    Answers are dicts of the lists `text` and `answer_start`, the character where it begins in the context. A context
    that is too long is read in windows that overlap; each window is a row of a batch.

    Batches have, beside the inputs,

    - `question` (batch,) int64: the number of the question that a window belongs to;
    - `begins` and `ends` (batch, tokens) int64: the characters of the context where a token begins and ends; -1 at
      tokens of the question and others that cannot be an answer;
    - `context` (batch, characters) int32: the context, as code points, 0 fills;
    - with answers, `labels` (batch, 2) int64, the first and the last token of the first answer, 0 and 0 if it is not in
      the window; and `answers` (batch, answers, 2) int64, the characters where each answer begins and ends, -1 fills.
    """

    def _check_targets(self, rows: datasets.Dataset) -> None:
        if not getattr(self.processor, "is_fast", True):
            raise DataError(
                "answers in a text need a fast tokenizer, which tells where its tokens are, got "
                f"{type(self.processor).__name__}; save the model with its tokenizer.json"
            )
        if self.columns.label is not None:
            self._answers(rows)

    def _answers(self, rows: datasets.Dataset) -> list[list[tuple[int, int]]]:
        """Return where the answers to each question begin and end in its context, after checking them."""
        column, found = str(self.columns.label), []
        contexts = rows[self.columns.text[1]][:]
        for row, (context, answers) in enumerate(zip(contexts, rows[column][:], strict=True)):
            if not isinstance(answers, Mapping) or not answers.keys() >= {"text", "answer_start"}:
                raise DataError(
                    f"answers must be dicts of the lists text and answer_start, but {row_name(rows, row)} has "
                    f"{quoted(answers)} in {column!r}"
                )
            if not answers["text"]:
                raise DataError(
                    f"every question must have an answer in its context, but {row_name(rows, row)} has none; leave "
                    "such rows out"
                )
            spans = []
            for text, start in zip(answers["text"], answers["answer_start"], strict=True):
                if not text or context[start : start + len(text)] != text:
                    raise DataError(
                        f"an answer must stand in its context at answer_start, but {row_name(rows, row)} has "
                        f"{quoted(context[start : start + len(text)])} at {start}, not {quoted(text)}"
                    )
                spans.append((start, start + len(text)))
            found.append(spans)
        return found

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        questions, contexts = (samples[name][:] for name in self.columns.text)
        answers = self._answers(samples) if self.columns.label is not None else None
        limit = token_limit(self.processor, self.config, self.max_length)
        window = min(WINDOW, limit or WINDOW)
        found = tokenised(
            self.processor,
            self.config,
            questions,
            contexts,
            max_length=window,
            truncation="only_second",
            stride=min(STRIDE, window // 4),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        of = found.pop("overflow_to_sample_mapping")
        places = found.pop("offset_mapping")
        spans = [_of_context(found.sequence_ids(row), places[row]) for row in range(len(of))]
        found["begins"], found["ends"] = ([[span[end] for span in row] for row in spans] for end in (0, 1))
        for part in batched(range(len(of)), batch_size):
            batch = as_batch(
                {key: [rows[row] for row in part] for key, rows in found.items()}, self.processor, self.config
            )
            batch["question"] = torch.tensor([of[row] for row in part])
            batch["context"] = padded([_code_points(contexts[of[row]]) for row in part], 0, left=False)
            if answers is not None:
                first = [_tokens_of(spans[row], answers[of[row]][0]) for row in part]
                batch["labels"] = torch.tensor(first)
                batch["answers"] = padded([torch.tensor(answers[of[row]]) for row in part], -1, left=False)
            yield batch


def _of_context(sequences: Sequence[int | None], places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where the tokens of a context begin and end in it; -1 and -1 for all other tokens."""
    return [place if number == 1 else (-1, -1) for number, place in zip(sequences, places, strict=True)]


def _tokens_of(places: Sequence[tuple[int, int]], answer: tuple[int, int]) -> tuple[int, int]:
    """Return the first and the last token of an answer; 0 and 0 if it is not whole in the window."""
    inside = [
        token for token, (start, end) in enumerate(places) if start < answer[1] and end > answer[0] and start >= 0
    ]
    if not inside or places[inside[0]][0] > answer[0] or places[inside[-1]][1] < answer[1]:
        return 0, 0
    return inside[0], inside[-1]


def _code_points(text: str) -> torch.Tensor:
    return torch.tensor([*map(ord, text)], dtype=torch.int32)
