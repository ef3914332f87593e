"""Read questions about a text, whose answers are parts of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
import torch

from ..errors import DataError, quoted
from .batches import TOKEN_PLACES, Batch, padded
from .processors import as_batch, token_limit, tokenised
from .reader import Reader, batched
from .rows import row_name

# Tokens of a window, and how many of them two windows of one text share, as in transformers' question answering.
WINDOW, STRIDE = 384, 128
_ANSWER = ("text", "answer_start")
# Questions that are tokenised at once: the places of their tokens are Python lists.
_AT_ONCE = 100


class QuestionsReader(Reader):
    """Reads two columns, the question and the context, and the column of answers in the form of SQuAD.

    Answers are dicts of the lists `text` and `answer_start`, the character where it begins in the context. A context
    that is too long is read in windows that overlap by a third, at most 128 tokens; each window is a row of a batch,
    and a question may have rows in two batches. Windows have `max_length` tokens, by default 384 or as many as the
    model takes. As in transformers' question answering, the context comes before the question if the tokenizer pads on
    the left. Rows are padded on the right in any case, so that a token's place is the same in every batch.

    Batches have, beside the inputs,

    - `question` (batch,) int64: the number of the question that a window belongs to;
    - `begins` and `ends` (batch, tokens) int64: the characters of the context where a token begins and ends; -1 at
      tokens of the question and others that cannot be an answer;
    - `context` (batch, characters) int32: the context, as code points, -1 fills;
    - with answers, `labels` (batch, 2) int64, the first and the last token of the first answer or, if it is not whole
      in the window, twice the token that stands for no answer; and `answers` (batch, answers, 2) int64, the characters
      where each answer begins and ends, without the blanks around it, -1 fills.
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
        column = str(self.columns.label)
        contexts = rows[self.columns.text[1]][:]
        return [
            self._spans(context, answers, f"{row_name(rows, row)} has", column)
            for row, (context, answers) in enumerate(zip(contexts, rows[column][:], strict=True))
        ]

    def _spans(self, context: str, answers: Any, has: str, column: str) -> list[tuple[int, int]]:
        """Return where the answers of a row begin and end; `has` names the row in an error."""
        parts: list[Any] = [answers.get(name) for name in _ANSWER] if isinstance(answers, Mapping) else []
        if parts and not any(parts):
            raise DataError(
                f"every question must have an answer in its context, but {has} none in {column!r}; leave such rows out"
            )
        if not parts or not all(isinstance(part, list) for part in parts) or len(parts[0]) != len(parts[1]):
            raise DataError(
                f"answers must be dicts of the lists text and answer_start, of equal length, but {has} "
                f"{quoted(answers)} in {column!r}; write them as {{'text': ['Ada'], 'answer_start': [0]}}"
            )
        spans = []
        for text, start in zip(*parts, strict=True):
            given = context[start : start + len(text)] if text and isinstance(start, int) and start >= 0 else ""
            if not text or given != text:
                raise DataError(
                    f"an answer must stand in its context at answer_start, but {has} {quoted(given)} at {start}, not "
                    f"{quoted(text)}; count the characters of the context from 0, and name the question before the "
                    "context in data.text"
                )
            hidden = len(text) - len(_without_blanks(text))
            if hidden == len(text):
                raise DataError(f"an answer must have a word, but {has} {quoted(text)} in {column!r}; leave it out")
            # Blanks and invisible characters belong to no token.
            spans.append((start + hidden, start + len(_without_blanks(text[::-1])[::-1])))
        return spans

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        contexts = [_code_points(context) for context in samples[self.columns.text[1]][:]]
        answers = None if self.columns.label is None else [*map(torch.tensor, self._answers(samples))]
        for part in batched(self._windows(samples), batch_size):
            questions = [question for question, _ in part]
            found = {key: [window[key] for _, window in part] for key in part[0][1]}
            batch = as_batch(found, self.processor, self.config, left=False)
            batch["question"] = torch.tensor(questions)
            batch["context"] = padded([contexts[question] for question in questions], -1, left=False)
            if answers is not None:
                labels = [self._label(window, answers[question][0].tolist()) for question, window in part]
                batch["labels"] = torch.tensor(labels)
                batch["answers"] = padded([answers[question] for question in questions], -1, left=False)
            yield batch

    def _windows(self, samples: datasets.Dataset) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """Yield the number of a question, and what the tokens of a window are, in order."""
        limit = token_limit(self.processor, self.config, self.max_length) or WINDOW
        window = min(WINDOW, limit) if self.max_length is None else limit
        stride = min(STRIDE, window // 3)
        context_first = self.processor.padding_side == "left"
        for first in range(0, len(samples), _AT_ONCE):
            part = samples[first : first + _AT_ONCE]
            texts = [part[name] for name in self.columns.text]
            self._check_room(samples, first, texts[0], window, stride)
            found = tokenised(
                self.processor,
                self.config,
                *(reversed(texts) if context_first else texts),
                max_length=window,
                truncation="only_first" if context_first else "only_second",
                stride=stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            questions, offsets = found.pop("overflow_to_sample_mapping"), found.pop("offset_mapping")
            for row, question in enumerate(questions):
                of_context = [number == (0 if context_first else 1) for number in found.sequence_ids(row)]
                if not any(of_context):
                    raise DataError(
                        f"every context must have words, but {row_name(samples, first + question)} has "
                        f"{quoted(texts[1][question])} in {self.columns.text[1]!r}; leave it out"
                    )
                places = [place if inside else (-1, -1) for place, inside in zip(offsets[row], of_context, strict=True)]
                begins, ends = map(list, zip(*places, strict=True))
                yield (
                    first + question,
                    {
                        **{key: rows[row] for key, rows in found.items()},
                        **dict(zip(TOKEN_PLACES, (begins, ends), strict=True)),
                    },
                )

    def _check_room(
        self, samples: datasets.Dataset, first: int, questions: Sequence[str], window: int, stride: int
    ) -> None:
        """Refuse a question that leaves a window no more of the context than the next one repeats."""
        lengths = [len(ids) for ids in self.processor(questions, add_special_tokens=False, verbose=False)["input_ids"]]
        most = window - stride - 1 - self.processor.num_special_tokens_to_add(pair=True)
        for row, length in enumerate(lengths):
            if length > most:
                raise DataError(
                    f"a question must have at most {max(0, most)} tokens, to leave room for its context in windows of "
                    f"{window}, but {row_name(samples, first + row)} has {length}; raise max_length, or leave it out"
                )

    def _label(self, window: Mapping[str, list[int]], answer: Sequence[int]) -> tuple[int, int]:
        """Return the first and the last token of an answer that is whole in a window, else twice that of no answer."""
        begins, ends = (window[name] for name in TOKEN_PLACES)
        inside = [token for token, end in enumerate(ends) if begins[token] < answer[1] and end > answer[0]]
        if inside and begins[inside[0]] <= answer[0] and answer[1] <= ends[inside[-1]]:
            return inside[0], inside[-1]
        ids = window["input_ids"]
        special = (self.processor.cls_token_id, self.processor.bos_token_id)
        nowhere = next((ids.index(token) for token in special if token in ids), 0)
        return nowhere, nowhere


def _without_blanks(text: str) -> str:
    """Return a text without the blanks and invisible characters that it begins with."""
    return "".join(itertools.dropwhile(lambda letter: letter.isspace() or not letter.isprintable(), text))


def _code_points(text: str) -> torch.Tensor:
    return torch.tensor([*map(ord, text)], dtype=torch.int32)
