"""Read text to generate: plain text, or prompts with answers. Labels are tokens; -100 means no loss."""

from __future__ import annotations

import itertools
import logging
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import datasets
import numpy as np
import pyarrow as pa
import torch

from ..errors import DataError, quoted
from .batches import IGNORED, Batch, padded
from .processors import check_vocabulary, padding_token, position_ids, token_limit
from .prompts import (
    Choices,
    check_one_question,
    check_prompt,
    end_of_text,
    filled,
    one_row_per_choice,
    one_row_per_question,
    right_choice,
    template_fields,
    tokenise,
)
from .reader import Reader, batched
from .rows import column_values, row_name

logger = logging.getLogger(__name__)

AnyGenerationReader = TypeVar("AnyGenerationReader", bound="GenerationReader")

# Default tokens of a block of plain text, if the model takes as many.
BLOCK_LENGTH = 512
# The one column of samples that are packed blocks.
BLOCK = "input_ids"
# Texts that are tokenised at once.
TEXTS = 1000


@dataclass(frozen=True)
class GenerationReader(Reader):
    """Reads prompts and answers, for any model that generates text.

    Rows with lists of questions become a sample per question (`one_row_per_question`). With several choices, the right
    one becomes the answer (`right_choice`), or every choice is read (`of_choices`).

    Batches have `labels` (batch, longest), the tokens themselves, not shifted: all of a plain text, only the answer's
    after a prompt, -100 elsewhere; with left padding also `position_ids`, if the model takes them.
    """

    a_row_is_a_sample: ClassVar[bool] = False
    # Whether every choice becomes a row of a batch, without the end-of-text token. Batches then describe their rows
    # (`CHOICE_KEYS`).
    every_choice: bool = False

    def of_choices(self: AnyGenerationReader) -> AnyGenerationReader:
        """Return the reader of the same samples that reads every choice, to be judged by likelihood."""
        return replace(self, every_choice=True)

    def unlabelled(self: AnyGenerationReader) -> AnyGenerationReader:
        """Return this reader: its labels are tokens, and the label column only selects the choice to read."""
        return self

    @property
    def prompted(self) -> bool:
        """Whether there are prompts and answers, rather than plain text."""
        return self.columns.prompt is not None

    @property
    def template(self) -> dict[str, str]:
        """The prompt's template and the column of answers."""
        return {"prompt": str(self.columns.prompt), "answer": str(self.columns.answer)}

    def _check_targets(self, rows: datasets.Dataset) -> None:
        if self.prompted:
            check_prompt(rows, **self.template)
            if self.columns.label:
                right_choice(rows, answer=self.template["answer"], label=self.columns.label)
                check_one_question(rows, prompt=self.template["prompt"])

    def _as_samples(self, rows: datasets.Dataset) -> datasets.Dataset:
        return rows if self.columns.label else one_row_per_question(rows, **self.template)

    def with_one_answer(self, samples: datasets.Dataset) -> tuple[datasets.Dataset, Choices | None]:
        """Return the samples with one answer each, or each row once for every choice, with a description of these."""
        if not self.columns.label:
            return samples, None
        columns = {"answer": self.template["answer"], "label": self.columns.label}
        return one_row_per_choice(samples, **columns) if self.every_choice else (right_choice(samples, **columns), None)

    def texts(self, samples: datasets.Dataset) -> datasets.Dataset:
        """Return only the columns that prompts and answers need, because reading a row decodes its images."""
        fields = template_fields(self.template["prompt"])
        return samples.select_columns(list(dict.fromkeys([*fields, self.template["answer"]])))

    def prompt_and_answer(self, row: dict[str, Any], choice: str | None = None) -> tuple[str, str]:
        """Return the prompt of a row, and its answer or the given choice."""
        return filled(row if choice is None else {**row, self.template["answer"]: choice}, **self.template)

    @cached_property
    def end(self) -> str:
        """What ends an answer; nothing where every choice is read."""
        return "" if self.every_choice else end_of_text(getattr(self.processor, "tokenizer", self.processor))

    def prepare_tokenizer(self) -> tuple[Any, int | None]:
        """Return the tokenizer, and how many tokens a sample may have."""
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        return tokenizer, token_limit(tokenizer, self.config, self.max_length)


class TextGenerationReader(GenerationReader):
    """Reads plain text, or prompts and answers; too long prompts lose their beginning."""

    def _as_samples(self, rows: datasets.Dataset) -> datasets.Dataset:
        if self.prompted:
            return super()._as_samples(rows)
        if not self.packing:
            return rows
        length = token_limit(self.processor, self.config, self.max_length) or BLOCK_LENGTH
        length = length if self.max_length is not None else min(length, BLOCK_LENGTH)
        if length < 2:
            raise DataError(f"blocks of text must have at least two tokens, got max_length {length}")
        length -= len(self._begin)
        return pack_text(rows, column=self.columns.text[0], tokenizer=self.processor, length=length)

    @cached_property
    def _begin(self) -> list[int]:
        """What every block begins with: the begin-of-text token, or nothing."""
        token = self.processor.bos_token_id
        if self.bos not in (True, False, "auto"):
            raise DataError(f"data.bos must be true, false or auto, got {quoted(self.bos)}")
        if self.bos is True and token is None:
            raise DataError("data.bos must be false or auto for a tokenizer without begin-of-text token, got true")
        own = self.bos == "auto" and self.processor("a", verbose=False)["input_ids"][:1] == [token]
        return [token] if self.bos is True or own else []

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        if samples.column_names == [BLOCK]:
            yield from (self._blocks(samples, part) for part in batched(range(len(samples)), batch_size))
        else:
            tokenizer, limit = self.prepare_tokenizer()
            if self.prompted:
                samples, choices = self.with_one_answer(samples)
                counted = self._answers(samples, choices, tokenizer, limit)
            else:
                counted, choices = self._plain_texts(samples, tokenizer, limit), None
            for part in batched(range(len(counted)), batch_size):
                batch = self._padded([counted[row] for row in part], tokenizer)
                yield batch if choices is None else batch | choices.of(part)

    def _blocks(self, samples: datasets.Dataset, part: list[int]) -> Batch:
        """A batch of packed blocks: every token is real, and all but what each block begins with are labels."""
        begin = self._begin
        ids = torch.tensor([begin + block for block in samples[part][BLOCK]])
        check_vocabulary(ids, self.config)
        labels = ids.clone()
        labels[:, : len(begin)] = IGNORED
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def _plain_texts(self, samples: datasets.Dataset, tokenizer: Any, limit: int | None) -> list[tuple[list[int], int]]:
        """Tokens of each text, cut on the right, all of which are labels. Blank rows are left out."""
        column, found = self.columns.text[0], []
        for row, text in enumerate(samples[column][:]):
            if not text.strip():
                continue
            ids = tokenizer(text, truncation=limit is not None, max_length=limit, verbose=False)["input_ids"]
            if len(ids) < 2:
                raise DataError(
                    "a text must have at least two tokens to predict one from the other, but "
                    f"{row_name(samples, row)} has {len(ids)} in {column!r}; remove it, raise max_length or pack the "
                    "texts into blocks"
                )
            found.append((ids, len(ids)))
        if not found:
            raise DataError(f"at least one row must have text, but all of {column!r} are blank")
        if len(found) < len(samples):
            blank = len(samples) - len(found)
            logger.warning("%d of %d rows are blank in %r and left out", blank, len(samples), column)
        return found

    def _answers(
        self, samples: datasets.Dataset, choices: Choices | None, tokenizer: Any, limit: int | None
    ) -> list[tuple[list[int], int]]:
        """Tokens of each prompt with its answer, cut on the left, and how many at the end are the answer's."""
        found = []
        for number, row in enumerate(self.texts(samples)):
            pair = self.prompt_and_answer(row, None if choices is None else choices.text[number])
            ids, answer_tokens = tokenise(*pair, tokenizer, self.end)
            check_answer(len(ids), answer_tokens, row_name(samples, number), limit)
            if limit is not None and len(ids) > limit:
                begin = ids[:1] if ids[0] == tokenizer.bos_token_id and limit > answer_tokens + 1 else []
                ids = begin + ids[len(ids) - limit + len(begin) :]
            found.append((ids, answer_tokens))
        return found

    def _padded(self, samples: Sequence[tuple[list[int], int]], tokenizer: Any) -> Batch:
        """A batch of (tokens, how many at the end are labels), padded on the tokenizer's side to the longest."""
        left, width = tokenizer.padding_side == "left", max(len(ids) for ids, _ in samples)
        tokens = [torch.tensor(ids) for ids, _ in samples]
        labels = [ids.clone() for ids in tokens]
        for of_row, (ids, counted) in zip(labels, samples, strict=True):
            # Nothing predicts a text's first token; as a label it would be predicted from padding.
            of_row[: max(len(ids) - counted, int(left and len(ids) < width))] = IGNORED
        input_ids = padded(tokens, padding_token(tokenizer, self.config), left=left)
        mask = padded([torch.ones_like(ids) for ids in tokens], 0, left=left)
        check_vocabulary(input_ids, self.config)
        batch = {"input_ids": input_ids, "attention_mask": mask}
        return with_positions(batch, self.config, padded(labels, IGNORED, left=left))


def check_answer(tokens: int, answer_tokens: int, row: str, limit: int | None) -> None:
    """Check that a sample with this many tokens has a prompt, and an answer that fits after it."""
    if answer_tokens == 0 or answer_tokens == tokens:
        what = "an answer" if answer_tokens == 0 else "a prompt"
        raise DataError(f"every row must have {what} of at least one token, but {row} has none")
    if limit is not None and answer_tokens >= limit:
        raise DataError(
            f"answers are never cut and need a token before them, but {row} has {answer_tokens} answer tokens and "
            f"at most {limit} tokens are read; leave such rows out, or raise max_length if it is given and the model "
            "takes more"
        )


def with_positions(batch: Batch, config: Any, labels: torch.Tensor) -> Batch:
    """Return a batch with its labels, and with position ids if the model needs them."""
    positions = position_ids(batch["attention_mask"], config)
    return batch | ({} if positions is None else {"position_ids": positions}) | {"labels": labels}


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
