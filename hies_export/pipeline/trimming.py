"""Trim the vocabulary of a model before it is pruned, and keep the untrimmed model to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import Batch, by_length, of_similar_length
from ..data.rows import column_values, load_rows, own_columns
from ..errors import DataError
from ..tasks import Predictions, Task
from ..tasks.task import Use
from ..vocabulary.kept import KeptTokens
from ..vocabulary.recut import Recut, compare_cuts, in_new_numbers
from ..vocabulary.tokenizer import CutBeside
from ..vocabulary.trim import VocabularyFacts, trim_vocabulary

# Predictions of these kinds are one for each sample, whatever its tokens, so that each model reads samples by itself.
PER_SAMPLE = ("classes", "labels", "numbers", "embeddings", "spans")


@dataclass(frozen=True)
class Trimming:
    """A trimmed vocabulary, and the model before it."""

    dense: PreTrainedModel  # with all its tokens
    processor: Any  # that reads its inputs
    kept: KeptTokens
    facts: VocabularyFacts  # for the report

    def with_judged_rows(self, dense: Sequence[Batch], slim: Sequence[Batch]) -> Trimming:
        """Return a trimming whose facts compare the judged rows as the dense and the slim model read them."""
        judged = compare_cuts(dense, slim, self.kept) if dense else self.facts.judged
        return replace(self, facts=replace(self.facts, judged=judged))

    def renumbered(self, predictions: Predictions, labels: Tensor) -> Predictions:
        """Return the dense model's predicted tokens by their ids in the trimmed vocabulary; see `in_new_numbers`."""
        return in_new_numbers(predictions, labels, self.kept)


@dataclass(frozen=True)
class Texts:
    """Texts whose tokens stay."""

    used: Sequence[str]
    read: set[int]  # the tokens that a task reads of the texts
    source: str  # where they are from, for the report


@dataclass(frozen=True)
class Reading:
    """How rows are read by the model that is pruned, and by the dense one with all its tokens."""

    task: Task
    processor: Any
    dense: Task  # the same as `task` without trimming
    trimming: Trimming | None

    def read(self, samples: datasets.Dataset, *, size: int, use: Use = "score") -> list[Batch]:
        """Return batches of up to `size` samples as the pruned model reads them; to score, of similar length."""
        task = self.task if self._recut is None else self.dense
        batches = task.read(samples, size=size, use=use)
        if use == "score":
            batches = of_similar_length(batches, config=task.config)
        return batches if self._recut is None else self._recut.batches(batches)[1]  # the first are the dense model's

    def to_judge(self, samples: datasets.Dataset, size: int) -> tuple[list[Batch], list[Batch]]:
        """Return batches to judge predictions on, shortest samples first, and those of the untrimmed model.

        Both have the samples in the same order. The second list is empty if nothing was trimmed.
        """
        if self._recut is not None:
            whole = by_length(self.dense.read(samples, size=size, use="judge"), config=self.dense.config)
            dense, slim = self._recut.batches(whole)
            return slim, dense
        slim = by_length(self.task.read(samples, size=size, use="judge"), config=self.task.config)
        if self.trimming is None or not len(samples):
            return slim, []
        dense = self.dense.read(samples, size=size, use="time")
        # In the order of the trimmed lengths. A question may have more windows in other tokens, which carry its number.
        like = None if self.task.predicts == "spans" else self.task.read(samples, size=size, use="time")
        return slim, by_length(dense, config=self.dense.config, like=like)

    @cached_property
    def _recut(self) -> Recut | None:
        """What converts batches of the untrimmed model; None if each model reads samples by itself."""
        if self.trimming is None or self.task.predicts in PER_SAMPLE:
            return None
        return Recut.of(self.dense, self.trimming.kept, (self.trimming.processor, self.processor), self.task.config)


def trim(model: PreTrainedModel, processor: Any, texts: Texts) -> tuple[PreTrainedModel, Any, Trimming]:
    """Return copies of a model and its processor without the tokens that texts do not use, and what was trimmed."""
    trimmed = trim_vocabulary(model, processor, texts.used, read=texts.read)
    facts = VocabularyFacts(
        total=trimmed.kept.total,
        kept=len(trimmed.kept.rows),
        source=texts.source,
        texts=len(texts.used),
        judged=CutBeside(0, 0, 0, 0),
        max_abs=trimmed.max_abs,
    )
    return trimmed.model, trimmed.processor, Trimming(model, processor, trimmed.kept, facts)


def read_tokens(task: Task, rows: datasets.Dataset) -> set[int]:
    """Return the tokens of rows as a task reads them, without cutting long ones."""
    return {token for ids in task.tokens(task.samples(rows)) for token in ids.tolist()}


def tokens_in_place(task: Task, texts: Sequence[str]) -> set[int]:
    """Return the tokens that a task reads of rows that have the same text in every column of text."""
    if task.generative and not task.columns.prompt:
        return set()  # `trim_vocabulary` reads plain texts and conversations in the same way anyway
    texts = [text for text in texts if text.strip()]
    rows = datasets.Dataset.from_dict(dict.fromkeys(task.columns_of_text, texts))
    text_columns = task.columns.model_copy(update={"label": None, "group": None})
    return read_tokens(task.to_read(text_columns, task.processor), rows)


def texts_of(rows: datasets.Dataset, columns: Sequence[str]) -> list[str]:
    """Return the texts in those of the columns that rows have."""
    return [text for column in columns if column in rows.column_names for text in _texts(column_values(rows, column))]


def _texts(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts in values, lists and dicts, and nothing else; a list gives its texts joined, and then each."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, tuple)):
            if texts := list(_texts(value)):
                yield " ".join(texts)  # as a list of words is read
                yield from texts
        elif isinstance(value, dict):
            yield from _texts(value.values())


def texts_in(files: Sequence[Path], task: Task) -> Texts:
    """Return the texts in all columns of files, and the tokens that a task reads of them; refuse files without."""
    used: list[str] = []
    read: set[int] = set()
    for file in files:
        rows = load_rows(files={"texts": file}, split="texts")
        texts = texts_of(rows, own_columns(rows))
        if not texts:
            raise DataError(f"vocabulary.files must have a column of text, but {file} has none; name files of texts")
        used += texts
        read |= tokens_in_place(task, texts)
        others = filter(None, (task.columns.image, task.columns.label, task.columns.group))
        if {*task.columns_of_text, *others} <= set(rows.column_names):  # they are rows of the task, too
            read |= read_tokens(task, rows)
    return Texts(used, read, ", ".join(file.name for file in files))
