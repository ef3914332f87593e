"""Read words, or texts with labelled spans, for models that give every word a class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets

from ..errors import DataError, listed, quoted
from ..model.classes import ClassNames
from .batches import Batch
from .labels import kind_of
from .reader import Reader, batched
from .rows import row_name
from .targets import IGNORED, JUDGED_KEY
from .tokens import as_batch, tokenised

_SPAN = ("start", "end", "label")


class WordsReader(Reader):
    """Reads a column of words, or of text, and the classes of the words.

    Words are lists of strings, and their labels a class number or name for each. In a text, the words are those that
    the tokenizer divides it into, and the labels are spans: dicts of `start`, `end` (characters, the end excluded) and
    `label`. The words of a span have its class or, if the model's classes begin so, `B-` of it for the first word and
    `I-` for the others; all other words have `O`.

    Batches have `judged` (batch, tokens) bool, the first token of every word, where its class is read, and `labels`
    (batch, tokens) int64, -100 at all other tokens. Words beyond the length limit are cut off.
    """

    def _is_text(self, feature: Any) -> bool:
        return super()._is_text(getattr(feature, "feature", feature))

    def _check_targets(self, rows: datasets.Dataset) -> None:
        if not getattr(self.processor, "is_fast", True):
            raise DataError(
                "a class for each word needs a fast tokenizer, which tells which tokens belong to it, got "
                f"{type(self.processor).__name__}; save the model with its tokenizer.json"
            )
        column = self.columns.text[0]
        for row, words in enumerate(rows[column][:]):
            if not words or not all((word or "").strip() for word in ([words] if isinstance(words, str) else words)):
                what = "a blank one" if words else "none"
                raise DataError(f"every row must have words in {column!r}, but {row_name(rows, row)} has {what}")
        if self.columns.label is not None:
            self._labels(rows)

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        texts, labels = samples[self.columns.text[0]][:], None
        if self.columns.label is not None:
            labels = self._labels(samples)
        for part in batched(range(len(samples)), batch_size):
            found = tokenised(
                self.processor,
                self.config,
                [texts[row] for row in part],
                max_length=self.max_length,
                is_split_into_words=self._split(samples),
            )
            found[JUDGED_KEY] = [_begins_word(found.word_ids(row)) for row in range(len(part))]
            if labels is not None:
                found["labels"] = [
                    self._labels_of_tokens(found, number, labels[row]) for number, row in enumerate(part)
                ]
            batch = as_batch(found, self.processor, self.config)
            yield batch | {JUDGED_KEY: batch[JUDGED_KEY].bool()}

    def _labels_of_tokens(self, found: Any, row: int, labels: Sequence[Any]) -> list[int]:
        """Return the class of the word that each token begins, -100 where none does."""
        words, judged = found.word_ids(row), found[JUDGED_KEY][row]
        if labels and isinstance(labels[0], Mapping):
            places = {word: tuple(found.word_to_chars(row, word)) for word in filter(_is_word, words)}
            of_words = self._of_spans(places, labels)
        else:
            of_words = dict(enumerate(labels)) or dict.fromkeys(
                (word for word in words if word is not None), self._none
            )
        return [of_words[word] if begins else IGNORED for word, begins in zip(words, judged, strict=True)]

    def _of_spans(self, places: Mapping[int, tuple[int, int]], spans: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Return the class of each word by its number; `places` are the characters where words begin and end."""
        found = dict.fromkeys(places, self._none)
        for span in spans:
            first, others = self._classes_of(span["label"])
            inside = [word for word, (start, end) in places.items() if start < span["end"] and end > span["start"]]
            found |= {word: others if number else first for number, word in enumerate(inside)}
        return found

    def _classes_of(self, name: str) -> tuple[int, int]:
        """Return the classes of the first word and of the other words of a span with a label."""
        names = ClassNames(self.config)
        found = [[*names.find(f"{prefix}{name}"), *names.find(name)][:1] for prefix in ("B-", "I-")]
        if not all(found):
            raise DataError(f"the label of a span must be a class of the model ({names}), got {quoted(name)}")
        return found[0][0], found[1][0]

    @property
    def _none(self) -> int:
        """The class of words outside of spans."""
        found = ClassNames(self.config).find("O")
        if not found:
            raise DataError(f"words outside of spans need a class O, but the model has {ClassNames(self.config)}")
        return found[0]

    def _split(self, rows: datasets.Dataset) -> bool:
        """Return whether the column of text holds words."""
        return hasattr(rows.features[self.columns.text[0]], "feature")

    def _labels(self, rows: datasets.Dataset) -> list[list[Any]]:
        """Return the labels of each row, after checking all: class numbers of words, or spans."""
        column = str(self.columns.label)
        feature = getattr(rows.features[column], "feature", None)
        texts, labels = rows[self.columns.text[0]][:], rows[column][:]
        if not self._split(rows):
            self._check_spans(rows, texts, labels, column)
            return labels
        if feature is None:
            raise DataError(
                f"the labels of words must be a list for each row, but {column!r} holds "
                f"{kind_of(rows.features[column])}"
            )
        for row, (words, of_row) in enumerate(zip(texts, labels, strict=True)):
            if len(words) != len(of_row or ()):
                raise DataError(
                    f"every word must have a label, but {row_name(rows, row)} has {len(words)} words and "
                    f"{len(of_row or ())} labels in {column!r}"
                )
        return _class_numbers(rows, labels, feature, column, ClassNames(self.config))

    def _check_spans(self, rows: datasets.Dataset, texts: Sequence[str], labels: Sequence[Any], column: str) -> None:
        for row, (text, spans) in enumerate(zip(texts, labels, strict=True)):
            for span in spans or ():
                if not isinstance(span, Mapping) or not span.keys() >= set(_SPAN):
                    raise DataError(
                        f"the labels of texts must be spans, dicts of {listed(_SPAN)}, but {row_name(rows, row)} has "
                        f"{quoted(span)} in {column!r}; give lists of words with a label for each, or spans"
                    )
                if not 0 <= span["start"] < span["end"] <= len(text):
                    raise DataError(
                        f"a span must be in its text of {len(text)} characters, but {row_name(rows, row)} has one from "
                        f"{span['start']} to {span['end']}"
                    )
                self._classes_of(span["label"])


def _is_word(word: int | None) -> bool:
    return word is not None


def _begins_word(words: Sequence[int | None]) -> list[bool]:
    """Return which tokens are the first of their word, by the number of each token's word."""
    before = [None, *words[:-1]]
    return [word is not None and word != last for word, last in zip(words, before, strict=True)]


def _class_numbers(
    rows: datasets.Dataset, labels: Sequence[Sequence[Any]], feature: Any, column: str, classes: ClassNames
) -> list[list[int]]:
    """Return class numbers of words, from numbers, names, or numbers of named classes."""
    named = feature.names if isinstance(feature, datasets.ClassLabel) else None
    if named is not None and not all(classes.find(name) for name in named):
        named = None
    numbers: dict[Any, int] = {}
    for row, of_row in enumerate(labels):
        for value in dict.fromkeys(of_row):
            if value in numbers:
                continue
            name = named[value] if named is not None else value
            if isinstance(name, str):
                found = classes.find(name)
            else:
                found = [name] if isinstance(name, int) and 0 <= name < len(classes.names) else []
            if len(found) != 1:
                raise DataError(
                    f"the label of a word must be a class of the model ({classes}) or its number, but "
                    f"{row_name(rows, row)} has {quoted(value)} in {column!r}"
                )
            numbers[value] = found[0]
    return [[numbers[value] for value in of_row] for of_row in labels]
