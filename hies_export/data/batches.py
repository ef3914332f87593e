"""Define a batch: what models take of it, how its rows belong together, and how its rows are ordered by length."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import DataError
from ..model.internals import exact_products
from ..model.modes import evaluating, output_alone
from ..model.tokens import is_token
from .rows import fixed_permutation

Batch = dict[str, torch.Tensor]
"""Arguments of a model's forward by name; the first axis of each is the samples."""

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
# All keys that say how the rows of a batch belong together.
ROW_KEYS = (*CHOICE_KEYS, *TEXT_KEYS, GROUP_KEY)
# Key of a batch, (rows, tokens) bool: the tokens at which a prediction is read.
JUDGED_KEY = "judged"
# Keys of a batch of questions, (rows, tokens) int64: the characters of the text where each token begins and ends, -1 at
# tokens that cannot be an answer.
TOKEN_PLACES = ("begins", "ends")
# Further keys of it, (rows, characters) and (rows, answers, 2): the text, and its right answers.
ANSWER_KEYS = ("context", "answers")
# Key of a batch whose labels are the dense model's own predictions, (rows,) bool.
OWN_KEY = "own"
# Key of a batch of conversations, (rows,) bool: every label token is a prediction of its own, as answers may be long.
CHAT_KEY = "chat"
# Key of a batch whose tokens are of a smaller vocabulary, (rows, tokens) int64: 0, or at tokens that stand for one that
# went, which piece of it they are, from 1. Labels are then judged by the token that they are of.
PIECE_KEY = "piece"
# Keys of the sample that a row is of, where a sample has several rows.
_SAMPLE_KEYS = ("question", GROUP_KEY, "pair")
# What a batch may have that no model takes.
_NO_INPUTS = frozenset(("labels", *ROW_KEYS, JUDGED_KEY, *TOKEN_PLACES, *ANSWER_KEYS, OWN_KEY, CHAT_KEY, PIECE_KEY))


def inputs_of(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a model takes of a batch to predict it: all but labels, and keys that say how rows are judged."""
    return {key: value for key, value in batch.items() if key not in _NO_INPUTS}


def first_output(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a model's first output (logits, or the last hidden state) in evaluation mode, without labels, on CPU.

    It is float32, or float64 if the model computes in that.
    """
    device = next(model.parameters()).device
    with evaluating(model), output_alone(model), exact_products(), torch.inference_mode():
        outputs = model(**{key: value.to(device) for key, value in inputs_of(batch).items()})
    return outputs[0].to("cpu", torch.promote_types(outputs[0].dtype, torch.float32))


def is_of_documents(batch: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a batch has the documents that queries are compared with; they come in batches of their own."""
    return "query" in batch and bool((batch["query"] < 0).all())


def image_shape(batch: Mapping[str, torch.Tensor]) -> tuple[int, ...] | None:
    """Return the shape of a batch's images, such as (channels, height, width); None without images."""
    pixels = batch.get("pixel_values")
    return None if pixels is None else tuple(pixels.shape[1:])


def size_of(batch: Mapping[str, torch.Tensor]) -> int:
    """Return how many rows a batch has: as many as the first of its tensors."""
    return len(next(iter(batch.values())))


def in_rows(batch: Batch, size: int) -> list[Batch]:
    """Return a batch as batches of at most `size` rows; as it is if one of its tensors has another number of rows."""
    count = size_of(batch)
    if count <= size or any(value.dim() == 0 or len(value) != count for value in batch.values()):
        return [batch]
    return [{key: value[first : first + size] for key, value in batch.items()} for first in range(0, count, size)]


def has_references(batch: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a batch has what metrics compare with: labels, relevant documents, grades or scores of pairs."""
    return not batch.keys().isdisjoint({"labels", "relevant", "grades", "score"})


def samples_of(batches: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """Return how many samples batches have: rows, or the questions, queries or pairs that they are of."""
    for key in _SAMPLE_KEYS:
        if batches and key in batches[0]:
            return len(torch.cat([batch[key] for batch in batches]).unique())
    # Where rows are queries and documents, a document has no query, but -1.
    return sum(int((batch["query"] >= 0).sum()) if "query" in batch else size_of(batch) for batch in batches)


def sample_contents(batches: Sequence[Mapping[str, torch.Tensor]]) -> list[tuple[bytes, ...]]:
    """Return the digests of the inputs of each sample, as `samples_of` counts samples; equal inputs have equal ones.

    Of a question with choices, only the right one is included, as models are fitted on that.
    """
    digests: dict[Any, list[bytes]] = {}  # of each sample
    for number, batch in enumerate(batches):
        rows = range(size_of(batch))
        sample_of: Sequence[Any] = [(number, row) for row in rows]
        included = torch.ones(len(rows), dtype=torch.bool)
        if keys := [key for key in _SAMPLE_KEYS if key in batch]:
            sample_of = batch[keys[0]].tolist()
        elif "query" in batch:
            included = batch["query"] >= 0
        if "choice" in batch:
            included = batch["choice"] == batch["right"]
        for row, digest in enumerate(_row_digests(batch)):
            if included[row]:
                digests.setdefault(sample_of[row], []).append(digest)
    return list(map(tuple, digests.values()))


def _row_digests(batch: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    """Yield a digest of the inputs of each row: tokens without padding, images and sounds."""
    keys = [key for key in ("input_ids", "pixel_values", "input_features") if key in batch]
    mask = batch.get("attention_mask")
    for row in range(size_of(batch)):
        digest = hashlib.blake2b(digest_size=16)
        for key in keys:
            if len(batch[key]) != size_of(batch):  # pieces of images, and no row says which are its own
                continue
            value = batch[key][row]
            if key == "input_ids" and mask is not None and mask.shape == batch[key].shape:
                value = value[mask[row].bool()]
            digest.update(_bytes_of(value))
        yield digest.digest()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values, in its own dtype."""
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def batches_fingerprint(batches: Sequence[Mapping[str, torch.Tensor]]) -> str:
    """Return the SHA-256, in hexadecimal, of the batches: their keys, dtypes, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        for key in sorted(batch):
            digest.update(f"{key}:{batch[key].dtype}:{tuple(batch[key].shape)};".encode())
            digest.update(_bytes_of(batch[key]))
        digest.update(b"|")
    return digest.hexdigest()


# Key of a batch -> what pads its values; 0 pads all others.
FILL = {"labels": IGNORED, **dict.fromkeys((*TOKEN_PLACES, *ANSWER_KEYS), -1)}


def check_numbers(numbers: torch.Tensor, known: int, key: str, place: str, *, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse, by a DataError that has `key` and `place`, numbers outside of [0, known) or of another dtype."""
    wrong = numbers[(numbers < 0) | (numbers >= known)]
    if numbers.dtype not in dtypes or len(wrong):
        given = wrong[0].item() if numbers.dtype in dtypes else numbers.dtype
        raise DataError(f"{key} must be {dtypes[-1]} in [0, {known}), which the model knows, but {place} has {given}")


def check_one_size(batches: Iterable[Batch]) -> None:
    """Refuse, by a DataError, images of several sizes: a graph is exported for one."""
    shapes = list(dict.fromkeys(image_shape(batch) or () for batch in batches))
    if len(shapes) > 1:
        given = " and ".join(" x ".join(map(str, shape)) for shape in shapes[:2])
        raise DataError(
            f"the image processor must make all images of one size, got {given}; set its crop_size, or height and width"
        )


def by_length(batches: Sequence[Batch], *, config: Any, like: Sequence[Batch] | None = None) -> list[Batch]:
    """Return batches of the same samples, shortest samples first, padded no more than needed.

    This is for batches of text. Their tensors are by token, shaped as `attention_mask`, (batch, tokens), and padded on
    either side, or by sample: (batch,), `ROW_KEYS`, `ANSWER_KEYS` and label sets. Other batches, such as images, are
    returned as they are.

    Samples of equal length keep their order. Queries come before the documents that they should find, in batches of
    their own. If `like` is given, it has the same samples in other tokens, and their lengths decide the order.
    """
    if not batches or not all(map(_is_text, batches)):
        return list(batches)
    samples = [{key: value[row] for key, value in batch.items()} for batch in batches for row in range(size_of(batch))]
    lengths = [int(length) for batch in like or batches for length in batch["attention_mask"].sum(-1)]
    left = any(bool((batch["attention_mask"][:, 0] == 0).any()) for batch in batches)
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    fill = {**FILL, "input_ids": pad if is_token(pad, config) else 0}  # without a padding token, nothing reads it
    size = max(map(size_of, batches))

    def is_document(number: int) -> bool:
        return "document" in samples[number] and bool(samples[number]["document"] >= 0)

    ordered: list[Batch] = []
    by_kind = sorted(range(len(samples)), key=lambda number: (is_document(number), lengths[number]))
    for _, of_kind in itertools.groupby(by_kind, is_document):
        numbers = list(of_kind)
        for start in range(0, len(numbers), size):
            chosen = [samples[number] for number in numbers[start : start + size]]
            columns = {key: [sample[key] for sample in chosen] for key in batches[0]}
            for key in columns:
                if not _of_samples(key, batches[0]):  # of tokens, without those of padding
                    columns[key] = [sample[key][sample["attention_mask"] != 0] for sample in chosen]
            ordered.append({key: padded(values, fill.get(key, 0), left=left) for key, values in columns.items()})
    return ordered


def of_similar_length(batches: Sequence[Batch], *, config: Any) -> list[Batch]:
    """Return batches of the same samples, each of texts of similar length, in a random order that is always the same.

    Of 32 rows of STS-B or SST-2, half to two thirds of the tokens are padding otherwise. The order is random because
    the first batches are often taken for all. Batches without padding, or not of text, are returned as they are.
    """
    if not all(map(_is_text, batches)) or all(bool(batch["attention_mask"].all()) for batch in batches):
        return list(batches)
    ordered = by_length(batches, config=config)
    return [ordered[number] for number in fixed_permutation(len(ordered))]


def _is_text(batch: Batch) -> bool:
    """Return whether every tensor of a batch belongs to the tokens of its texts, or to its samples as wholes."""
    mask = batch.get("attention_mask")
    if mask is None or "input_ids" not in batch:
        return False
    return all(_of_samples(key, batch) or value.shape == mask.shape for key, value in batch.items())


def _of_samples(key: str, batch: Batch) -> bool:
    """Return whether a tensor of a batch belongs to its samples as wholes, rather than to their tokens."""
    if key == "labels":  # (batch, tokens) int64, unless a class or number each, label sets, or the ends of an answer
        return batch[key].dim() != 2 or batch[key].is_floating_point() or "answers" in batch
    return key in (*ROW_KEYS, *ANSWER_KEYS) or batch[key].dim() == 1


def padded(rows: list[torch.Tensor], fill: int, *, left: bool) -> torch.Tensor:
    """Return rows as one tensor, (rows, longest, ...), padded with `fill` on one side; (rows,) of single numbers."""
    if rows[0].dim() == 0:
        return torch.stack(rows)
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side="left" if left else "right")
