"""Read the targets of finished batches: whether they are numbers, classes or tokens, and which tokens are judged.

Scoring needs this, but none of the libraries that read rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel

from ..errors import DataError, RequestError, quoted
from ..model.tokens import judged_tokens

# The label that transformers' losses ignore.
IGNORED = -100
# Keys of a batch whose rows are choices, (rows,) int64 each: the number of the question, of the choice and of the right
# choice, from 0, and how many characters the choice has. Models do not take these.
CHOICE_KEYS = ("question", "choice", "right", "characters")
# Keys of a batch of texts to embed, (rows,) or (rows, documents). A row is a query or a document by its number in
# `query` or `document`, where the other is -1. The documents that a query should find are in `relevant`, and how much
# each is wanted in `grades`; -1 and 0 fill up. Of two texts whose similarity is known, both rows have the number of the
# pair in `pair`, 0 or 1 in `side`, and the similarity in `score`.
TEXT_KEYS = ("query", "document", "relevant", "grades", "pair", "side", "score")
# Key of a batch for a reranker, (rows,) int64: the number of the query whose candidate the row is.
GROUP_KEY = "group"
# What a batch may have beside the inputs of a model and its labels: how rows belong together.
ROW_KEYS = (*CHOICE_KEYS, *TEXT_KEYS, GROUP_KEY)
# Key of a batch, (rows, tokens) bool: the tokens at which a prediction is read.
JUDGED_KEY = "judged"
# Keys of a batch of questions about texts, (rows, tokens) int64: the characters of the text where each token begins and
# ends, -1 at other tokens.
TOKEN_PLACES = ("begins", "ends")
# Further keys of such a batch, (rows, characters) and (rows, answers, 2): the text, and where right answers are in it.
ANSWER_KEYS = ("context", "answers")
# Key of a batch whose labels are the dense model's own predictions, (rows,) bool.
OWN_KEY = "own"
# What is predicted for a sample as a whole, see `predicts`.
Classified = Literal["classes", "labels", "numbers"]
CLASSIFIED: tuple[str, ...] = get_args(Classified)
# What a batch may have that no model takes.
_NO_INPUTS = frozenset(("labels", *ROW_KEYS, JUDGED_KEY, *TOKEN_PLACES, *ANSWER_KEYS, OWN_KEY))


def predicts(config: Any) -> Classified:
    """Return what a classifier's configuration makes of its logits, as the losses of transformers do.

    With "classes", the largest logit is the answer. With "labels" (multi_label_classification), each logit says by
    itself whether its label applies; there may be a single one. With "numbers", a regression, the only logit is the
    answer. Without a problem type, one label means a regression, and more mean classes.

    Raises:
        RequestError: The problem type is unknown, or does not suit the number of labels.
    """
    problem, count = getattr(config, "problem_type", None), config.num_labels
    if problem == "multi_label_classification":
        return "labels"
    if problem == "single_label_classification" and count == 1:
        raise RequestError(
            "problem_type single_label_classification needs two labels or more, but the model has 1; set problem_type "
            "to multi_label_classification if its logit is a yes or no, or to regression if it is a number or a rank"
        )
    if problem == "regression" and count != 1:
        raise RequestError(f"a regression must have one label, but the model has {count}")
    if problem not in (None, "regression", "single_label_classification"):
        raise RequestError(
            "problem_type must be regression, single_label_classification or multi_label_classification, got "
            f"{quoted(problem)}; correct the model's config"
        )
    return "numbers" if count == 1 else "classes"


def are_tokens(labels: torch.Tensor) -> bool:
    """Return whether labels are tokens, (batch, tokens) int64, rather than one class, number or label set each."""
    return labels.dim() == 2 and not labels.is_floating_point()


def text_labels(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the labels of a language model's batch, (batch, tokens): by default its own `judged_tokens`."""
    if "labels" in batch:
        return batch["labels"]
    if "input_ids" not in batch:
        raise DataError(f"a language model's batch must have labels or input_ids, got {', '.join(batch)}")
    ids = batch["input_ids"]
    return ids.where(judged_tokens(model, batch, ids), IGNORED)


def inputs_of(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a model takes of a batch to predict it: all but labels, and keys that say how rows are judged."""
    return {key: value for key, value in batch.items() if key not in _NO_INPUTS}


def is_of_documents(batch: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a batch has the documents that queries are compared with; they come in batches of their own."""
    return "query" in batch and bool((batch["query"] < 0).all())


def image_shape(batch: Mapping[str, torch.Tensor]) -> tuple[int, ...] | None:
    """Return the shape of a batch's images, such as (channels, height, width); None without images."""
    pixels = batch.get("pixel_values")
    return None if pixels is None else tuple(pixels.shape[1:])


def size_of(batch: Mapping[str, torch.Tensor]) -> int:
    """Return how many rows a batch has."""
    return len(next(iter(batch.values())))


def has_references(batch: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a batch has what metrics compare with: labels, relevant documents, grades or scores of pairs."""
    return not batch.keys().isdisjoint({"labels", "relevant", "grades", "score"})


def samples_of(batches: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """Return how many samples batches have: rows, or the questions, queries or pairs that they are of."""
    keys = batches[0].keys() if batches else ()
    for key in ("question", GROUP_KEY, "pair"):
        if key in keys:
            return len(torch.cat([batch[key] for batch in batches]).unique())
    if "query" in keys:
        return sum(int((batch["query"] >= 0).sum()) for batch in batches)
    return sum(map(size_of, batches))


def sample_contents(batches: Sequence[Mapping[str, torch.Tensor]]) -> list[tuple[bytes, ...]]:
    """Return digests of all inputs of each sample, see `samples_of`: equal for what a model reads alike.

    Of a question with choices, its right one counts, as models are fitted on that.
    """
    samples: dict[Any, list[bytes]] = {}
    for number, batch in enumerate(batches):
        of = next((batch[key].tolist() for key in ("question", GROUP_KEY, "pair") if key in batch), None)
        counted = torch.ones(size_of(batch), dtype=torch.bool)
        if "choice" in batch:
            counted = batch["choice"] == batch["right"]
        elif "query" in batch and of is None:
            counted = batch["query"] >= 0
        for row, content in enumerate(_contents(batch)):
            if counted[row]:
                samples.setdefault((number, row) if of is None else of[row], []).append(content)
    return list(map(tuple, samples.values()))


def _contents(batch: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    """Yield a digest of the inputs of each row: tokens without padding, images and sounds."""
    given = {key: batch[key] for key in ("input_ids", "pixel_values", "input_features") if key in batch}
    mask = batch.get("attention_mask")
    for row in range(size_of(batch)):
        digest = hashlib.blake2b(digest_size=16)
        for key, values in given.items():
            if len(values) != size_of(batch):  # pieces of images, which no row tells apart
                continue
            value = values[row]
            if key == "input_ids" and mask is not None and mask.shape == values.shape:
                value = value[mask[row].bool()]
            digest.update(value.flatten().contiguous().view(torch.uint8).numpy().tobytes())
        yield digest.digest()


def batches_fingerprint(batches: Sequence[Mapping[str, torch.Tensor]]) -> str:
    """Return the SHA-256, in hexadecimal, of the batches: their keys, dtypes, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        for key in sorted(batch):
            tensor = batch[key].detach().cpu()
            digest.update(f"{key}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            digest.update(tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(b"|")
    return digest.hexdigest()
