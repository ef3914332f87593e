"""Trim the vocabulary of a job's model before anything else is done with it, and remember the model as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedModel

from ..data.batches import Batch, by_length
from ..data.processors import tokenizer_of
from ..data.rows import column_values, load_rows, own_columns
from ..errors import DataError, RequestError
from ..files import Rule, check
from ..model.text_encoder import TextEncoder
from ..recipe.sections import Columns, VocabularySection
from ..tasks import Task
from ..tasks.given import holds_inputs
from ..tasks.prompts import template_fields
from ..vocabulary.kept import KeptTokens, check_request
from ..vocabulary.tokenizer import compare_cuts
from ..vocabulary.trim import VocabularyFacts, trim_vocabulary

_VOCABULARY = Rule("vocabulary= must be arguments of trim_vocabulary", "see there")
# Predictions of these kinds are one for each sample, whatever its tokens.
PER_SAMPLE = ("classes", "labels", "numbers", "embeddings")


@dataclass(frozen=True)
class Trimming:
    """What was trimmed: the model as it was, the tokens that stay, and what that does to other texts."""

    dense: PreTrainedModel
    kept: KeptTokens
    facts: VocabularyFacts


@dataclass(frozen=True)
class Texts:
    """The texts that say which tokens stay, and those that show what a trimming does to others.

    Attributes:
        used: Those whose tokens stay.
        judged: Those that show what the trimming does to others.
        source: Where the used ones are from, for the report.
    """

    used: Sequence[str]
    judged: Sequence[str]
    source: str


def trim(
    model: PreTrainedModel, processor: Any, texts: Texts, asked: VocabularySection
) -> tuple[PreTrainedModel, Any, Trimming]:
    """Return a model and its processor without the tokens that texts do not use, and what it does to judged texts.

    What is put around texts counts as a text: the prompts of a SentenceTransformer, and a chat template.
    """
    tokenizer = tokenizer_of(processor)
    around = model.reader.prompts if isinstance(model, TextEncoder) else []
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        around.append(template)
    options: dict[str, Any] = {"keep": asked.keep, "multiple_of": asked.multiple_of, "min_count": asked.min_count}
    trimmed = trim_vocabulary(model, processor, [*texts.used, *around * asked.min_count], **options)
    smaller = tokenizer_of(trimmed.processor)
    facts = VocabularyFacts(
        total=trimmed.kept.total,
        kept=len(trimmed.kept.rows),
        source=texts.source,
        texts=len(texts.used),
        min_count=asked.min_count,
        judged=compare_cuts(tokenizer, smaller, texts.judged, trimmed.kept),
        max_abs=trimmed.max_abs,
    )
    return trimmed.model, trimmed.processor, Trimming(model, trimmed.kept, facts)


def trim_in_memory(
    model: PreTrainedModel,
    processor: Any,
    rows: Mapping[str, Any],
    columns: Mapping[str, Any] | None,
    vocabulary: Mapping[str, Any],
) -> tuple[PreTrainedModel, Any, Trimming]:
    """Trim the vocabulary of a model in memory; the `rows` are those of `prune`, by its arguments.

    Held-out rows show what the trimming does to other texts.
    """
    if processor is None:
        raise RequestError("vocabulary= needs processor=, the model's tokenizer, got none")
    for name, some in rows.items():
        if some is not None and holds_inputs(model, some, columns):
            raise RequestError(
                f"with vocabulary=, {name}= must be read anew, as tokens get other numbers, but it has the model's "
                "inputs already; give a data set of texts, and columns= if it also has inputs, or a list of texts"
            )
    options, given = dict(vocabulary), [_texts_given(rows[name]) for name in ("batches", "held_out")]
    texts = options.pop("texts", given[0])
    if not texts:
        raise DataError(
            "vocabulary= needs texts to see which tokens they use: give batches= as a data set or a list of texts, or "
            'vocabulary={"texts": [...]}'
        )
    asked = check(options, VocabularySection, _VOCABULARY, where="vocabulary")
    check_request(tokenizer_of(processor), texts, keep=asked.keep)
    return trim(model, processor, Texts(texts, given[1] or given[0] or texts, "texts given"), asked)


def _texts_given(rows: Any) -> list[str]:
    """Return the texts of a data set, or of a list of texts; of anything else, none."""
    if isinstance(rows, datasets.Dataset):
        return texts_of(rows)
    return [*_texts(rows)] if isinstance(rows, (list, tuple)) and not any(isinstance(r, dict) for r in rows) else []


def texts_of(rows: datasets.Dataset, columns: Columns | None = None) -> list[str]:
    """Return the texts in some columns of rows, by default in all, and the prompt of the columns, if they have one."""
    asked = list(own_columns(rows))
    if columns is not None:
        named = (*columns.text, *columns.messages, columns.query, columns.document, columns.answer)
        asked = list(dict.fromkeys(name for name in (*named, *template_fields(columns.prompt or "")) if name))
    found = [text for column in asked if column in rows.column_names for text in _texts(column_values(rows, column))]
    return found if columns is None or columns.prompt is None else [*found, columns.prompt]


def _texts(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts among values; a list of words is one text, and each of its words is one too."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, tuple)):
            inside = [*_texts(value)]
            yield from (" ".join(inside), *inside)
        elif isinstance(value, dict):
            yield from _texts(value.values())


def texts_in(files: Sequence[Path]) -> list[str]:
    """Return the texts in all columns of some files; raises DataError if there are none."""
    found = [text for file in files for text in texts_of(load_rows(files={"texts": file}, split="texts"))]
    if not found:
        raise DataError(f"vocabulary.files must have a column of text, but {files[0]} has none; name files of texts")
    return found


def read_in_dense(dense: Task, task: Task, samples: datasets.Dataset, size: int) -> list[Batch]:
    """Return batches of samples as a model with all tokens reads them, in the order in which `task` is judged on them.

    Empty if predictions of the task are not one for each sample, so that those of other tokens cannot be compared.
    """
    if task.predicts not in PER_SAMPLE or not len(samples):
        return []
    own, smaller = (one.read(samples, size=size, use="time") for one in (dense, task))
    return by_length(own, config=dense.config, like=smaller)
