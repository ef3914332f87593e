"""Read words, or texts with labelled spans, for models that give every word a class."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import datasets

from ..errors import DataError, quoted
from ..model.classes import ClassNames, places_in_entities
from .batches import IGNORED, JUDGED_KEY, Batch
from .columns import class_numbers, kind_of
from .processors import as_batch, tokenised
from .reader import Reader, batched
from .rows import row_name


class _Span(NamedTuple):
    """Characters of a text, and the classes of their words by place: of several words, and of an only one."""

    start: int
    end: int  # excluded
    first: int
    others: int
    last: int
    only: int


class WordsReader(Reader):
    """Reads a column of words, or of text, and the classes of the words.

    Words are lists of strings, and their labels a class number or name for each. In a text, the words are those that
    the tokenizer divides it into, and the labels are spans: dicts of `start`, `end` (characters, the end excluded) and
    `label`. The words of a span have its class, or the one of it for their place, such as `B-` for the first word and
    `I-` for the others, if the model's classes are so named; see `places_in_entities`. All other words have `O`.

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
                raise DataError(
                    f"every row must have words in {column!r}, but {row_name(rows, row)} has {what}; leave it out"
                )
        self._labels(rows)

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        texts, labels, split = samples[self.columns.text[0]][:], self._labels(samples), self._split(samples)
        if split and self._space_belongs_to_words():
            texts = [[words[0], *(f" {word}" for word in words[1:])] for words in texts]
        for part in batched(range(len(samples)), batch_size):
            found = tokenised(
                self.processor,
                self.config,
                [texts[row] for row in part],
                max_length=self.max_length,
                is_split_into_words=split,
            )
            begun = [_begun(found.word_ids(row)) for row in range(len(part))]
            found[JUDGED_KEY] = [[word is not None for word in words] for words in begun]
            if labels is not None:
                classes = [
                    labels[row] if split else self._of_spans(found, number, labels[row])
                    for number, row in enumerate(part)
                ]
                found["labels"] = [
                    [IGNORED if word is None else of_row[word] for word in words]
                    for of_row, words in zip(classes, begun, strict=True)
                ]
            batch = as_batch(found, self.processor, self.config)
            yield batch | {JUDGED_KEY: batch[JUDGED_KEY].bool()}

    def _of_spans(self, found: Any, row: int, spans: Sequence[_Span]) -> dict[int, int]:
        """Return the class of each word of a tokenised row."""
        places = {word: found.word_to_chars(row, word) for word in found.word_ids(row) if word is not None}
        classes = dict.fromkeys(places, ClassNames(self.config).find("O")[0])
        for span in spans:
            inside = [word for word, place in places.items() if place.start < span.end and place.end > span.start]
            several = [span.first, *[span.others] * (len(inside) - 2), span.last]
            classes |= dict(zip(inside, [span.only] if len(inside) == 1 else several, strict=False))
        return classes

    def _space_belongs_to_words(self) -> bool:
        """Return whether the tokenizer takes the space before a word for a part of it, as those of bytes do."""
        text, words = self.processor("a a"), self.processor(["a", "a"], is_split_into_words=True)
        return bool(text["input_ids"] != words["input_ids"])

    def _split(self, rows: datasets.Dataset) -> bool:
        """Return whether the column of text holds words."""
        return hasattr(rows.features[self.columns.text[0]], "feature")

    def _labels(self, rows: datasets.Dataset) -> Sequence[Sequence[Any]] | None:
        """Return the labels of each row, after checking all: class numbers of words, or spans; None without labels."""
        if self.columns.label is None:
            return None
        return self._class_numbers(rows, self.columns.label) if self._split(rows) else self._spans(rows)

    def _class_numbers(self, rows: datasets.Dataset, column: str) -> list[list[int]]:
        """Return the class of each word of each row."""
        feature = getattr(rows.features[column], "feature", None)
        if feature is None:
            raise DataError(
                f"the labels of words must be a list for each row, but {column!r} holds "
                f"{kind_of(rows.features[column])}; make a list with a label for each word"
            )
        labels = rows[column][:]
        for row, (words, of_row) in enumerate(zip(rows[self.columns.text[0]][:], labels, strict=True)):
            given = sum(label is not None for label in of_row or ())
            if len(words) != given or given != len(of_row):
                raise DataError(
                    f"every word must have a label, but {row_name(rows, row)} has {len(words)} words and {given} "
                    f"labels in {column!r}; give each word one, or leave the row out"
                )
            if IGNORED in of_row:
                raise DataError(
                    f"every word must have a class, but {row_name(rows, row)} has {IGNORED} in {column!r}, which marks "
                    "tokens without one; give words and their classes, which are then aligned with the tokens"
                )
        ends = list(itertools.accumulate(map(len, labels)))
        numbers = class_numbers(
            [label for of_row in labels for label in of_row],
            feature,
            column=column,
            classes=ClassNames(self.config),
            place=lambda index: row_name(rows, bisect.bisect(ends, index)),
        )
        return [numbers[end - len(of_row) : end] for end, of_row in zip(ends, labels, strict=True)]

    def _spans(self, rows: datasets.Dataset) -> list[list[_Span]]:
        """Return the spans of each row, by their places."""
        column, classes = str(self.columns.label), ClassNames(self.config)
        if not classes.find("O"):
            raise DataError(f"words outside of spans need a class O, but the model has {classes}")
        feature = getattr(rows.features[column], "feature", None)
        names = (
            getattr(feature["label"], "names", None) if isinstance(feature, Mapping) and "label" in feature else None
        )
        texts, labels = rows[self.columns.text[0]][:], rows[column][:]
        found = []
        for row, (text, spans) in enumerate(zip(texts, labels, strict=True)):
            where = f"{row_name(rows, row)} has {{}} in {column!r}"
            of_row = sorted(_span(span, len(text), names, classes, where) for span in spans or ())
            for one, other in itertools.pairwise(of_row):
                if other.start < one.end:
                    raise DataError(
                        "spans of a text must not overlap, as a word has one class, but "
                        + where.format(f"{one.start} to {one.end} and {other.start} to {other.end}")
                    )
            found.append(of_row)
        return found


def _span(span: Any, length: int, names: Sequence[str] | None, classes: ClassNames, where: str) -> _Span:
    """Return a span of a text of some characters; `names` are those of its labels, if these are numbers."""
    if not isinstance(span, Mapping) or not {"start", "end", "label"} <= span.keys():
        raise DataError(
            f"the labels of texts must be spans, dicts of start, end and label, but {where.format(quoted(span))}; give "
            "lists of words with a label for each, or spans"
        )
    start, end, label = span["start"], span["end"], span["label"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= length):
        raise DataError(
            f"a span must be in its text of {length} characters, but {where.format(f'{start} to {end}')}; count "
            "characters from 0, the end excluded"
        )
    name = names[label] if names is not None and isinstance(label, int) else label
    found = _by_place(str(name), classes)
    if None in found:
        raise DataError(
            f"the label of a span must be a class of the model ({classes}), with or without B- and I-, but "
            f"{where.format(quoted(name))}"
        )
    return _Span(start, end, *found)  # type: ignore[arg-type]


def _by_place(name: str, classes: ClassNames) -> list[int | None]:
    """Return the classes of a type for the first of several words, others, the last and an only one; None if unknown.

    Of a class that is named as a whole, all are this class.
    """
    numbers = {(place, kind.casefold()): n for n, (place, kind) in enumerate(places_in_entities(classes.names))}
    whole = next(iter(classes.find(name)), None)

    def find(letters: str, other: int | None) -> int | None:
        found = [numbers[letter, name.casefold()] for letter in letters if (letter, name.casefold()) in numbers]
        return found[0] if found else other

    first, others = find("BI", whole), find("IM", whole)
    return [first, others, find("EL", others), find("SUW", first)]


def _begun(words: Sequence[int | None]) -> list[int | None]:
    """Return the number of the word that each token begins, by that of its word; None where none does."""
    return [None if word == last else word for last, word in zip([None, *words[:-1]], words, strict=True)]
