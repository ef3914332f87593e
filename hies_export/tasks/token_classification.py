"""A class for each word of a text, such as the entities in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from ..errors import DataError, listed
from ..model.classes import places_in_entities
from .behaviour import Behaviour, Predicted
from .task import Task, column_sets

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..data.reader import Reader

logger = logging.getLogger(__name__)

Entity = tuple[str, int, int]  # its type, its first word, and the word after its last one


@dataclass(frozen=True)
class TagPredictions(Predicted):
    """The likeliest class of every judged word of all samples, in order; on the CPU.

    Two samples have the same prediction if they have the same entities. Where the names of the classes have no prefix,
    such as parts of speech, every word is an entity, so all words must have the same class.
    """

    kind = "words"

    classes: Tensor  # (words,) int64
    counts: Sequence[int]  # of words in each sample
    names: Sequence[str]  # of the classes

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def decided(self) -> Tensor:
        """The classes, (words,)."""
        return self.classes

    def same(self, other: TagPredictions) -> Tensor:
        """Return which samples have the same entities, (samples,) bool."""
        import torch

        self.check_samples(self.counts, other.counts)
        pairs = zip(self.entities, other.entities, strict=True)
        return torch.tensor([one == two for one, two in pairs])

    def table(self, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return how many words and entities of each sample are right, and how many there are."""
        import numpy as np

        wanted = TagPredictions(references, self.counts, self.names)
        rows = np.empty(len(self), dtype=[("right", np.int64), ("found", np.int64), ("words", np.int64)])
        rows["right"] = [len(one & two) for one, two in zip(self.entities, wanted.entities, strict=True)]
        rows["found"] = [*map(len, self.entities)]
        right = (self.classes == references).split(list(self.counts))
        rows["words"] = [int(of_sample.sum()) for of_sample in right]
        there = np.empty(len(self), dtype=[("entities", np.int64), ("words", np.int64)])
        there["entities"], there["words"] = [*map(len, wanted.entities)], self.counts
        return rows, there

    @cached_property
    def entities(self) -> list[set[Entity]]:
        """The entities of each sample."""
        of_samples, places = self.classes.split(list(self.counts)), places_in_entities(self.names)
        return [entities_of([places[number] for number in of_sample.tolist()]) for of_sample in of_samples]


def entities_of(places: Sequence[tuple[str, str]]) -> set[Entity]:
    """Return the entities of words, of each of which the place in an entity and its type are given.

    These are those of `places_in_entities`. An entity ends where the type changes too, and `I` without a word before it
    begins one. This is the rule of CoNLL's `conlleval`, as in seqeval.
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


@dataclass(frozen=True)
class Tags(Behaviour):
    """The likeliest class of each word, from logits, (batch, tokens, classes), at its first token."""

    predicts = "words"
    metrics = ("entity_f1", "word_accuracy", "own_entity_f1")
    word = "sentence"
    names: tuple[str, ...]  # of the classes

    def canonical(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch with the tokens at which classes are read: those with a label, else all of the text.

        Raises a DataError if labels are no classes of tokens.
        """
        from ..data.batches import IGNORED, JUDGED_KEY

        labels, shape = batch.get("labels"), batch["input_ids"].shape if "input_ids" in batch else None
        if labels is not None:
            wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= len(self.names)))]
            if labels.is_floating_point() or labels.dim() != 2 or shape not in (None, labels.shape) or len(wrong):
                raise DataError(
                    f"the labels of words must be int64, (batch, tokens), each in [0, {len(self.names)}) or "
                    f"{IGNORED} where no class is read, but a batch has "
                    f"{wrong[0].item() if len(wrong) else labels.dtype} in labels of shape {tuple(labels.shape)}"
                )
        return {**batch, JUDGED_KEY: _judged(batch)}

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest class of each word at its first token, -100 elsewhere, (batch, tokens)."""
        from ..data.batches import IGNORED

        return output.argmax(-1).where(_judged(batch).to(output.device), IGNORED)

    def losses(self, labels: Tensor) -> Tensor:
        """Return how many words of each sample have a label, (batch,)."""
        from ..data.batches import IGNORED

        return (labels != IGNORED).sum(-1)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the margins of each sample's words over the runner-up, summed with random signs, (batch,).

        The mean of its square over such signs is the sum of the squared changes, so that words cannot make up for each
        other; see `projected`.
        """
        from .feature_extraction import projected

        best, second = output.float().topk(2, dim=-1).values.unbind(-1)
        return projected((best - second) * _judged(batch).to(output.device), index)

    def check(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Refuse samples without a word."""
        for number, batch in enumerate(batches):
            if not _judged(batch).any(-1).all():
                raise DataError(
                    f"every sample must have a word to classify, but batch {number} (from 0) has one without; leave "
                    "out samples without labels, or of which the tokenizer makes no token"
                )

    def kept(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the likeliest class of each word and its logit, (words,) each."""
        likeliest = output[_judged(batch).to(output.device)].max(-1)
        return likeliest.indices, likeliest.values

    def joined(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Mapping[str, Tensor]]) -> TagPredictions:
        """Return the predictions of all batches, in their order."""
        import torch

        counts = [count for batch in batches for count in _judged(batch).sum(-1).tolist()]
        return TagPredictions(torch.cat([classes for classes, _ in kept]), counts, self.names)

    def references(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the classes of all words, (words,)."""
        import torch

        return torch.cat([batch["labels"][_judged(batch)] for batch in batches]).cpu()


def _judged(batch: Mapping[str, Tensor]) -> Tensor:
    """Return at which tokens a class is read, (batch, tokens) bool: at all if neither labels nor a mask tell."""
    import torch

    from ..data.batches import IGNORED, JUDGED_KEY

    if JUDGED_KEY in batch:
        return batch[JUDGED_KEY]
    if "labels" in batch:
        return batch["labels"] != IGNORED
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0


@cache
def _warn_of_names(names: tuple[str, ...]) -> None:
    logger.warning(
        "the model's classes are named %s, which tells no entities: every word counts as one; name them in id2label of "
        "its config as they were trained, such as O, B-PER and I-PER",
        listed(names, most=3),
    )


_USAGE = """
from transformers import pipeline

find = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="first")
found = find("a text")
"""


class TokenClassification(Task):
    """Models that find entities, or parts of speech."""

    name = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    ort_class = "ORTModelForTokenClassification"
    usage = _USAGE
    columns = column_sets("text", "text label")
    needs = "data.text (a column of words, or of text with spans as labels)"

    def behaviour(self, config: Any) -> Tags:
        """Return that of a class for each word, with the names of the classes."""
        names = tuple(str(config.id2label[number]) for number in range(config.num_labels))
        if all(name.casefold().removeprefix("label_").isdecimal() for name in names):
            _warn_of_names(names)
        return Tags(names)

    def usual_columns(self, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the column of words and that of their labels, by the names that data sets on the Hub give them."""
        words = next((name for name in ("tokens", "words") if name in features), None)
        if words is None:
            return None
        label = next((name for name in ("ner_tags", "tags", "pos_tags", "labels") if name in features), None)
        return {"text": (words,), "label": label}

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of words, or of texts with spans."""
        from ..data.words import WordsReader

        return WordsReader
