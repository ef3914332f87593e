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
from .task import Predictions, Task, Use, batched, check_same_samples, random_projection

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
        """Yield batches of words, or of texts that are divided into words."""
        texts, labels, split = samples[self.columns.text[0]][:], self._labels(samples), self._in_words(samples)
        if split:
            two_words = self.processor(["a", "a"], is_split_into_words=True)
            if self.processor("a a")["input_ids"] != two_words["input_ids"]:
                # The tokenizer takes the space before a word for a part of it, as those of bytes do.
                texts = [[words[0], *(f" {word}" for word in words[1:])] for words in texts]
        for part in batched(range(len(samples)), size):
            chosen, limit = [texts[row] for row in part], self.columns.max_length
            found = data.tokenize(self.processor, self.config, chosen, max_length=limit, is_split_into_words=split)
            # Of each row, by the number of a word's first token: its own number, or its characters; and its class.
            words: list[dict[int, Any]] = []
            classes: list[dict[int, int]] = []
            for number, row in enumerate(part):
                of_row: Any = () if labels is None else labels[row]
                if split:
                    words.append(_first_tokens(found.word_ids(number)))
                else:
                    words.append(self._places(found, number, texts[row], of_row))
                if labels is not None and split:
                    classes.append({token: of_row[word] for token, word in words[-1].items()})
                elif labels is not None:
                    classes.append(self._of_spans(words[-1], of_row))
            found[data.JUDGED_KEY] = _by_token(found, [dict.fromkeys(first, True) for first in words], False)
            if labels is not None:
                found["labels"] = _by_token(found, classes, data.IGNORED)
            batch = data.as_batch(found, self.processor, self.config)
            yield batch | {data.JUDGED_KEY: batch[data.JUDGED_KEY].bool()}

    def _places(self, found: Any, row: int, text: str, spans: Sequence[_Span]) -> dict[int, tuple[int, int]]:
        """Return the characters of each word of a tokenised text, by the number of its first token.

        `found` is the `BatchEncoding` of several texts, of which `text` is that in its `row`.
        """
        marks_pieces = getattr(self.processor.backend_tokenizer.model, "continuing_subword_prefix", None)
        places = {}
        for first, word in _first_tokens(found.word_ids(row)).items():
            start, end = found.word_to_chars(row, word)
            is_word = marks_pieces and not _NO_WORD.search(text[start:end].strip())
            if is_word and sum(span.start < end and start < span.end for span in spans) < 2:
                places[first] = start, end
            else:
                tokens = range(*found.word_to_tokens(row, word))
                places |= {token: tuple(found.token_to_chars(row, token)) for token in tokens}
        return places

    def _of_spans(self, places: Mapping[int, tuple[int, int]], spans: Sequence[_Span]) -> dict[int, int]:
        """Return the class of each word by the number of its first token, given its characters: O outside of spans."""
        classes = dict.fromkeys(places, ClassNames(self.config).find("O")[0])
        for span in spans:
            inside = [word for word, (start, end) in places.items() if start < span.end and end > span.start]
            several = [span.first, *[span.others] * (len(inside) - 2), span.last]
            classes |= dict(zip(inside, [span.only] if len(inside) == 1 else several, strict=False))
        return classes

    def _in_words(self, rows: datasets.Dataset) -> bool:
        """Return whether the column of text holds words."""
        return hasattr(rows.features[self.columns.text[0]], "feature")

    def _labels(self, rows: datasets.Dataset) -> Sequence[Sequence[Any]] | None:
        """Return the labels of each row, checked: class numbers of words, or spans; None without labels."""
        if self.columns.label is None:
            return None
        return self._class_numbers(rows, self.columns.label) if self._in_words(rows) else self._spans(rows)

    def _class_numbers(self, rows: datasets.Dataset, column: str) -> list[list[int]]:
        """Return the class number of each word; a DataError refuses rows without a label for each."""
        feature = getattr(rows.features[column], "feature", None)
        if feature is None:
            raise DataError(
                f"the labels of words must be a list for each row, but {column!r} holds "
                f"{data.kind_of(rows.features[column])}; make a list with a label for each word"
            )
        labels = rows[column][:]
        for row, (words, of_row) in enumerate(zip(rows[self.columns.text[0]][:], labels, strict=True)):
            given = sum(label is not None for label in of_row or ())
            if len(words) != given or given != len(of_row):
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
        found = []
        for row, (text, spans) in enumerate(zip(texts, labels, strict=True)):
            where = f"{data.row_name(rows, row)} has {{}} in {column!r}"
            of_row = sorted(_span(span, len(text), names, classes, where) for span in spans or ())
            if any(other.start < one.end for one, other in itertools.pairwise(of_row)):
                raise DataError(f"spans of a text must not overlap, but {where.format(quoted(spans))}")
            found.append(of_row)
        return found

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch with the mask of tokens that `_judged` returns."""
        return {**batch, data.JUDGED_KEY: _judged(batch)}

    def own_labels(self, model: PreTrainedModel, batch: Batch, output: Tensor) -> Tensor:
        """Return the likeliest class of each word at its first token, -100 elsewhere, (batch, tokens)."""
        return output.argmax(-1).where(_judged(batch).to(output.device), data.IGNORED)

    def losses(self, labels: Tensor) -> Tensor:
        """Return how many words of each sample have a label, (batch,)."""
        return (labels != data.IGNORED).sum(-1)

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return by how much each word's best logit exceeds the second, summed with random signs over words, (batch,).

        So changes at several words cannot cancel out, see `random_projection`.
        """
        margins = super().effect(model, batch, output, number)  # (batch, tokens)
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
        check_same_samples(dense, other)
        pairs = zip(self.entities(dense, dense.values), self.entities(other, other.values), strict=True)
        return torch.tensor([one == two for one, two in pairs])

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return counts of each sample as two structured arrays, (samples,).

        The first has the entities that are `right` and `found`, and the right `words`. The second has all `entities`
        and `words` of the labels.
        """
        given, wanted = (self.entities(predictions, classes) for classes in (predictions.values, references))
        rows = np.empty(len(given), dtype=[("right", np.int64), ("found", np.int64), ("words", np.int64)])
        rows["right"] = [len(one & two) for one, two in zip(given, wanted, strict=True)]
        rows["found"] = [*map(len, given)]
        rows["words"] = predictions.per_sample(predictions.values == references)
        there = np.empty(len(given), dtype=[("entities", np.int64), ("words", np.int64)])
        there["entities"], there["words"] = [*map(len, wanted)], self._counts(predictions)
        return rows, there

    def entities(self, predictions: Predictions, classes: Tensor) -> list[set[Entity]]:
        """Return the entities of each sample of the predictions; `classes` (words,) are those of all words in order."""
        places, of_samples = places_in_entities(self.names), classes.split(self._counts(predictions))
        return [entities_of([places[number] for number in of.tolist()]) for of in of_samples]

    @staticmethod
    def _counts(predictions: Predictions) -> list[int]:
        """Return how many words each sample has."""
        assert predictions.sample is not None
        return predictions.sample.bincount().tolist()


class _Span(NamedTuple):
    """Characters of a text, and the classes of their words by place: of several words, and of an only one."""

    start: int
    end: int  # excluded
    first: int
    others: int
    last: int
    only: int


def entities_of(places: Sequence[tuple[str, str]]) -> set[Entity]:
    """Return the entities of a sequence of words, given what `places_in_entities` gives for the class of each.

    An entity ends where the type changes too, and `I` without a word before it begins one. This is the rule of CoNLL's
    `conlleval`, as in seqeval.
    """
    found, start, kind = set(), 0, ""
    for word, (place, name) in enumerate([*places, ("", "")]):
        if kind and (name != kind or place in "BSUW"):
            found.add((kind, start, word))
            kind = ""
        if name and not kind:
            start, kind = word, name
        if kind and place in "ELSUW":
            found.add((kind, start, word + 1))
            kind = ""
    return found


def _judged(batch: Batch) -> Tensor:
    """Return the mask of the tokens whose class is read, (batch, tokens) bool; all if no labels or mask say which."""
    if data.JUDGED_KEY in batch:
        return batch[data.JUDGED_KEY]
    if "labels" in batch:
        return batch["labels"] != data.IGNORED
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0


def _span(span: Any, length: int, names: Sequence[str] | None, classes: ClassNames, where: str) -> _Span:
    """Return a row's span as a checked `_Span`, in characters of a text of `length` characters.

    Numbered labels are looked up in `names`; without `names`, labels are names. `where` completes an error message.
    """
    if not isinstance(span, Mapping) or not {"start", "end", "label"} <= span.keys():
        raise DataError(f"labels must be spans, dicts of start, end and label, but {where.format(quoted(span))}")
    start, end, label = span["start"], span["end"], span["label"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= length):
        raise DataError(
            f"a span must be in its text of {length} characters, the end excluded, but "
            f"{where.format(f'{start} to {end}')}"
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

    For the whole name of a class, as O or B-PER, all four are this class.
    """
    numbers = {(place, kind.casefold()): n for n, (place, kind) in enumerate(places_in_entities(classes.names))}
    whole = next(iter(classes.find(name)), None)

    def find(letters: str, other: int | None) -> int | None:
        found = [numbers[letter, name.casefold()] for letter in letters if (letter, name.casefold()) in numbers]
        return found[0] if found else other

    first, others = find("BI", whole), find("IM", whole)
    return [first, others, find("EL", others), find("SUW", first)]


def _first_tokens(words: Sequence[int | None]) -> dict[int, int]:
    """Return the number of each word by that of its first token, given the word of each token, None for no word."""
    pairs = enumerate(itertools.pairwise([None, *words]))
    return {token: word for token, (last, word) in pairs if word not in (None, last)}


def _by_token(found: Mapping[str, Any], of_rows: Sequence[Mapping[int, Any]], others: Any) -> list[list[Any]]:
    """Return the value for each token of rows, given some by the numbers of tokens; all other tokens have `others`."""
    lengths = map(len, found["input_ids"])
    return [[of_row.get(n, others) for n in range(length)] for of_row, length in zip(of_rows, lengths, strict=True)]
