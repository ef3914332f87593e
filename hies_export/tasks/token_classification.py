"""A class for each word of a text, such as the entities in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import DataError, quoted
from ..late import PreTrainedModel, Tensor, datasets, np, torch
from .labels import ClassNames, class_numbers, places_in_entities
from .late import Batch, data
from .registry import register_task
from .task import Predictions, Task, Use, batched, random_projection

# Its type, and the numbers of its first word and of the word after its last one.
Entity = tuple[str, int, int]
# What is no word: a text with spaces, or in a script without any: Thai, Lao, Tibetan, Burmese, Khmer, kana or Han.
_NO_WORD = re.compile("\\s|[\u0e01-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")

_USAGE = """
from transformers import pipeline

# Of texts whose tokenizer does not mark the pieces of words, as ## does, every token was judged: "simple".
find = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="first")
found = find("a text")
"""


@register_task
class TokenClassification(Task):
    """Models that find entities, or parts of speech.

    The likeliest class of each word is read from logits, (batch, tokens, classes), at its first token. Two samples have
    the same prediction if they have the same entities. Where the names of the classes have no prefix, such as parts of
    speech, every word is an entity, so all words must have the same class.

    Words are lists of strings, and their labels a class number or name for each. In a text, the words are those that
    the tokenizer divides it into, if it marks the tokens that go on with a word, as WordPiece does; without such marks,
    in a script without spaces, and in a word with several spans, every token is a word by itself. So the entities are
    those of transformers' pipeline, by the aggregation strategy "first" where tokens are marked, else by "simple".

    The labels of a text are spans: dicts of `start`, `end` (characters, the end excluded) and `label`. The words of a
    span have its class, or the one of it for their place, such as `B-` for the first word and `I-` for the others, if
    the model's classes are so named; see `places_in_entities`. All other words have `O`.

    Batches have `judged` (batch, tokens) bool, the first token of every word, where its class is read, and `labels`
    (batch, tokens) int64, -100 at all other tokens. Words beyond the length limit are cut off.
    """

    name = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    ort_class = "ORTModelForTokenClassification"
    usage = _USAGE
    reads = ("text", "text label")
    needs = "data.text (a column of words, or of text with spans as labels)"

    predicts = "words"
    metrics = ("entity_f1", "word_accuracy", "own_entity_f1")
    word = "sentence"

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.names = ClassNames(config).names

    @classmethod
    def usual_columns(cls, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the column of words and that of their labels, by the names that data sets on the Hub give them."""
        words = next((name for name in ("tokens", "words") if name in features), None)
        if words is None:
            return None
        label = next((name for name in ("ner_tags", "tags", "pos_tags", "labels") if name in features), None)
        return {"text": (words,), "label": label}

    def is_text(self, feature: Any) -> bool:
        """Return whether a column holds text, or lists of words."""
        return super().is_text(data.item_feature(feature))

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse rows without words, or without a class that the model knows for each."""
        must = "every row must have words, none of them blank"
        data.check_each(rows, self.columns.text[0], data.has_text, must, "leave it out")
        self._labels(rows)

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of rows whose words are given, or are found in texts as the class describes."""
        texts, labels, as_words = samples[self.columns.text[0]][:], self._labels(samples), self._holds_words(samples)
        if as_words:
            two_words = self.processor(["a", "a"], is_split_into_words=True)
            if self.processor("a a")["input_ids"] != two_words["input_ids"]:
                # The tokenizer reads a space as part of the word behind it, so all words but the first need one.
                texts = [[words[0], *(f" {word}" for word in words[1:])] for words in texts]
        for rows in batched(range(len(samples)), size):
            chosen, limit = [texts[row] for row in rows], self.columns.max_length
            encoded = data.tokenize(self.processor, self.config, chosen, max_length=limit, is_split_into_words=as_words)
            # For each row: the number of the first token of each word -> the class of that word, None without labels.
            classes: list[Mapping[int, int | None]] = []
            for number, row in enumerate(rows):
                of_row = None if labels is None else labels[row]
                if as_words:
                    words = _first_tokens(encoded.word_ids(number))
                    classes.append({token: None if of_row is None else of_row[word] for token, word in words.items()})
                else:
                    characters = self._words_of_text(encoded, number, texts[row], of_row or ())
                    classes.append(self._classes_of_words(characters, of_row))
            judged = [dict.fromkeys(first_tokens, True) for first_tokens in classes]
            encoded[data.JUDGED_KEY] = _by_token(encoded, judged, False)
            if labels is not None:
                encoded["labels"] = _by_token(encoded, classes, data.IGNORED)
            batch = data.as_batch(encoded, self.processor, self.config)
            yield batch | {data.JUDGED_KEY: batch[data.JUDGED_KEY].bool()}

    def _words_of_text(self, encoded: Any, row: int, text: str, spans: Sequence[_Span]) -> dict[int, tuple[int, int]]:
        """Return the characters of each word of the text in a row of `encoded`, by the number of its first token."""
        marks_pieces = getattr(self.processor.backend_tokenizer.model, "continuing_subword_prefix", None)
        characters = {}
        for first, word in _first_tokens(encoded.word_ids(row)).items():
            start, end = encoded.word_to_chars(row, word)
            is_word = marks_pieces and not _NO_WORD.search(text[start:end].strip())
            spans_of_word = [span for span in spans if span.start < end and start < span.end]
            if is_word and len(spans_of_word) < 2:
                characters[first] = start, end
            else:  # every token is a word by itself
                for token in range(*encoded.word_to_tokens(row, word)):
                    characters[token] = tuple(encoded.token_to_chars(row, token))
        return characters

    def _classes_of_words(
        self, characters: Mapping[int, tuple[int, int]], spans: Sequence[_Span] | None
    ) -> dict[int, int | None]:
        """Return the classes of words by the same keys as their characters: O outside of spans; None without spans."""
        if spans is None:
            return dict.fromkeys(characters)
        classes: dict[int, int | None] = dict.fromkeys(characters, ClassNames(self.config).find("O")[0])
        for span in spans:
            words = [word for word, (start, end) in characters.items() if start < span.end and end > span.start]
            classes |= dict.fromkeys(words, span.classes.others)
            if len(words) == 1:
                classes[words[0]] = span.classes.only
            elif words:
                classes[words[0]], classes[words[-1]] = span.classes.first, span.classes.last
        return classes

    def _holds_words(self, rows: datasets.Dataset) -> bool:
        """Return whether the column of text holds lists of words, rather than texts."""
        return hasattr(rows.features[self.columns.text[0]], "feature")

    def _labels(self, rows: datasets.Dataset) -> Sequence[Sequence[Any]] | None:
        """Return the labels of each row, checked: class numbers of words, or spans; None without labels."""
        if self.columns.label is None:
            return None
        return self._class_numbers(rows, self.columns.label) if self._holds_words(rows) else self._spans(rows)

    def _class_numbers(self, rows: datasets.Dataset, column: str) -> list[list[int]]:
        """Return the class number of each word; a DataError refuses rows without a label for each."""
        feature = getattr(rows.features[column], "feature", None)
        if feature is None:
            raise DataError(
                f"the labels of words must be a list for each row, but {column!r} holds "
                f"{data.kind_of(rows.features[column])}; make a list with a label for each word"
            )
        labels = rows[column][:]
        for row, (words, labels_of_row) in enumerate(zip(rows[self.columns.text[0]][:], labels, strict=True)):
            given = sum(label is not None for label in labels_of_row or ())
            if len(words) != given or given != len(labels_of_row):
                raise DataError(
                    f"every word must have a label, but {data.row_name(rows, row)} has {len(words)} words and {given} "
                    f"labels in {column!r}; give each word one, or leave the row out"
                )
        return class_numbers(rows, labels, feature, column=column, classes=ClassNames(self.config))

    def _spans(self, rows: datasets.Dataset) -> list[list[_Span]]:
        """Return the spans of each text in order; a DataError refuses those that overlap or whose class is unknown."""
        column, classes = str(self.columns.label), ClassNames(self.config)
        if not classes.find("O"):
            raise DataError(f"words outside of spans need a class O, but the model has {classes}")
        feature = getattr(rows.features[column], "feature", None)
        names = getattr(feature.get("label"), "names", None) if isinstance(feature, Mapping) else None
        texts, labels = rows[self.columns.text[0]][:], rows[column][:]
        spans_of_rows = []
        for row, (text, given) in enumerate(zip(texts, labels, strict=True)):
            name = data.row_name(rows, row)
            spans = sorted(_span(label, len(text), names, classes, name, column) for label in given or ())
            if any(following.start < span.end for span, following in itertools.pairwise(spans)):
                raise DataError(f"spans of a text must not overlap, but {name} has {quoted(given)} in {column!r}")
            spans_of_rows.append(spans)
        return spans_of_rows

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch with the mask of tokens that `_judged` returns."""
        return {**batch, data.JUDGED_KEY: _judged(batch)}

    def own_labels(self, model: PreTrainedModel, batch: Batch, output: Tensor) -> Tensor:
        """Return the likeliest class of each word at its first token, -100 elsewhere, (batch, tokens)."""
        return output.argmax(-1).where(_judged(batch).to(output.device), data.IGNORED)

    def losses(self, labels: Tensor) -> Tensor:
        """Return how many terms of the mean loss belong to each sample, (batch,): one for each word with a label."""
        return (labels != data.IGNORED).sum(-1)

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return the margins of words' best logits over the second, summed over words with random signs, (batch,)."""
        margins = super().effect(model, batch, output, number)  # (batch, tokens)
        # By random signs, so that changes at several words do not cancel out.
        return random_projection(margins * _judged(batch).to(output.device), number)

    def check_batches(self, batches: Sequence[Batch]) -> None:
        """Refuse samples without a word."""
        for number, batch in enumerate(batches):
            if not _judged(batch).any(-1).all():
                raise DataError(
                    f"every sample must have a word to classify, but batch {number} (from 0) has one without; leave "
                    "out samples without labels, or of which the tokenizer makes no token"
                )

    def keep(self, output: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Return the likeliest class of each word and its logit, (words,) each."""
        likeliest = output[_judged(batch).to(output.device)].max(-1)
        return likeliest.indices, likeliest.values

    def join(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Batch]) -> Predictions:
        """Return the classes of all words, of which those of a sample are one prediction."""
        counts = torch.cat([_judged(batch).sum(-1) for batch in batches]).cpu()
        sample = torch.arange(len(counts)).repeat_interleave(counts)
        return Predictions(self.predicts, torch.cat([classes for classes, _ in kept]), sample, joint=True)

    def references(self, batches: Sequence[Batch]) -> Tensor:
        """Return the classes of all words, (words,)."""
        return torch.cat([batch["labels"][_judged(batch)] for batch in batches]).cpu()

    def decide(self, predictions: Predictions) -> Tensor:
        """Return the classes, (words,)."""
        return predictions.values

    def same(self, dense: Predictions, other: Predictions) -> Tensor:
        """Return which samples have the same entities, (samples,) bool."""
        pairs = zip(self.entities(dense, dense.values), self.entities(other, other.values), strict=True)
        return torch.tensor([of_dense == of_other for of_dense, of_other in pairs])

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return counts of each sample as two structured arrays, (samples,).

        The first has the entities that are `right` and `found`, and the right `words`. The second has all `entities`
        and `words` of the labels.
        """
        found = self.entities(predictions, predictions.values)
        labelled = self.entities(predictions, references)
        counts = np.empty(len(found), dtype=[("right", np.int64), ("found", np.int64), ("words", np.int64)])
        counts["right"] = [len(entities & right) for entities, right in zip(found, labelled, strict=True)]
        counts["found"] = list(map(len, found))
        counts["words"] = predictions.per_sample(predictions.values == references)
        totals = np.empty(len(found), dtype=[("entities", np.int64), ("words", np.int64)])
        totals["entities"], totals["words"] = list(map(len, labelled)), self._counts(predictions)
        return counts, totals

    def entities(self, predictions: Predictions, classes: Tensor) -> list[set[Entity]]:
        """Return the entities of each sample of the predictions; `classes` (words,) are those of all words in order."""
        places = places_in_entities(self.names)
        by_sample = classes.split(self._counts(predictions))
        return [entities_of([places[number] for number in sample.tolist()]) for sample in by_sample]

    @staticmethod
    def _counts(predictions: Predictions) -> list[int]:
        """Return how many words each sample has."""
        assert predictions.sample is not None
        return predictions.sample.bincount().tolist()


class _SpanClasses(NamedTuple):
    """The classes of the words of a span by their place: the first of several, further ones, the last; an only one."""

    first: int
    others: int
    last: int
    only: int


class _Span(NamedTuple):
    """Characters of a text, the end excluded, and the classes of their words."""

    start: int
    end: int
    classes: _SpanClasses


def entities_of(places: Sequence[tuple[str, str]]) -> set[Entity]:
    """Return the entities of a sequence of words, given the letter and the type of each by `places_in_entities`.

    An entity ends where the type changes too, and `I` without a word before it begins one. This is the rule of CoNLL's
    `conlleval`, as in seqeval.
    """
    entities, start, open_type = set(), 0, ""  # the first word and the type of the entity that has not ended
    for word, (letter, word_type) in enumerate([*places, ("", "")]):
        if open_type and (word_type != open_type or letter in "BSUW"):
            entities.add((open_type, start, word))
            open_type = ""
        if word_type and not open_type:
            start, open_type = word, word_type
        if open_type and letter in "ELSUW":
            entities.add((open_type, start, word + 1))
            open_type = ""
    return entities


def _judged(batch: Batch) -> Tensor:
    """Return the mask of the tokens whose class is read, (batch, tokens) bool; all if no labels or mask say which."""
    if data.JUDGED_KEY in batch:
        return batch[data.JUDGED_KEY]
    if "labels" in batch:
        return batch["labels"] != data.IGNORED
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0


def _span(given: Any, length: int, names: Sequence[str] | None, classes: ClassNames, row: str, column: str) -> _Span:
    """Return a span that a row gives for a text of `length` characters, after checking it."""
    if not isinstance(given, Mapping) or not {"start", "end", "label"} <= given.keys():
        raise DataError(
            f"labels must be spans, dicts of start, end and label, but {row} has {quoted(given)} in {column!r}"
        )
    start, end, label = given["start"], given["end"], given["label"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= length):
        raise DataError(
            f"a span must be in its text of {length} characters, the end excluded, but {row} has {start} to {end} in "
            f"{column!r}"
        )
    # Where the data has class `names`, a label may be the number of one.
    name = names[label] if names is not None and isinstance(label, int) else label
    of_words = _span_classes(str(name), classes)
    if of_words is None:
        raise DataError(
            f"the label of a span must be a class of the model ({classes}), with or without B- and I-, but {row} has "
            f"{quoted(name)} in {column!r}"
        )
    return _Span(start, end, of_words)


def _span_classes(label: str, classes: ClassNames) -> _SpanClasses | None:
    """Return the classes of the words of a span with this label; None if it is neither a type nor a class.

    For a type such as PER, they are B-PER, I-PER and so on; for the whole name of a class, such as O, this class alone.
    """
    places = enumerate(places_in_entities(classes.names))
    of_letter = {letter: number for number, (letter, kind) in places if kind.casefold() == label.casefold()}
    of_name = next(iter(classes.find(label)), None)
    first = of_letter.get("B", of_letter.get("I", of_name))
    others = of_letter.get("I", of_letter.get("M", of_name))
    if first is None or others is None:
        return None
    last = of_letter.get("E", of_letter.get("L", others))
    only = of_letter.get("S", of_letter.get("U", of_letter.get("W", first)))
    return _SpanClasses(first, others, last, only)


def _first_tokens(words: Sequence[int | None]) -> dict[int, int]:
    """Return the number of each word by that of its first token, given the word of each token, None for no word."""
    pairs = enumerate(itertools.pairwise([None, *words]))
    return {token: word for token, (previous, word) in pairs if word not in (None, previous)}


def _by_token(encoded: Mapping[str, Any], of_rows: Sequence[Mapping[int, Any]], others: Any) -> list[list[Any]]:
    """Return a value for each token of rows: those that `of_rows` has by the numbers of tokens, else `others`."""
    lengths = map(len, encoded["input_ids"])
    return [[of_row.get(n, others) for n in range(length)] for of_row, length in zip(of_rows, lengths, strict=True)]
