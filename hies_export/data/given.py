"""Turn a DataLoader, a list of batches, or a data set with its columns into batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import datasets
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, PreTrainedModel, default_data_collator

from ..errors import DataError, RequestError, listed, refusing
from ..tasks import Task
from .batches import Batch, check_batches
from .images import holds_images
from .labels import STRINGS
from .reader import Columns
from .registry import reader_for
from .targets import size_of, text_labels

# Rows of a data set that go through the model at once.
BATCH_SIZE = 16
# Columns of labels, as transformers' collators know them.
LABELS = ("labels", "label", "label_ids")


def batches_of(
    model: PreTrainedModel, given: Any, *, what: str, task: Task, processor: Any, columns: Mapping[str, Any] | None
) -> list[Batch]:
    """Return batches as lists of tensors by the names that the model takes."""
    if isinstance(given, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise DataError(f"{what} must be one split of a data set, got {listed(list(given))}; pass one of these")
    if isinstance(given, datasets.Dataset):
        if not len(given):
            raise DataError(f"{what} must have at least one row, got an empty data set")
        inputs = (
            _of_inputs(model, given, processor) if columns is None and model.main_input_name in given.features else None
        )
        return _labelled(model, task, inputs or _of_rows(model, given, what, task, processor, columns))
    if columns is not None:
        raise RequestError(
            f"columns= belongs to a datasets.Dataset, but {what} is a {type(given).__name__}; leave it out"
        )
    return _labelled(model, task, check_batches(model, given, what=what))


def _labelled(model: PreTrainedModel, task: Task, batches: Iterable[Mapping[str, Tensor]]) -> list[Batch]:
    """Return the batches; text without labels is its own label, as in training on plain text."""
    if not task.generative:
        return [dict(batch) for batch in batches]
    return [{**batch, "labels": text_labels(model, batch)} for batch in batches]


def _of_inputs(model: PreTrainedModel, rows: datasets.Dataset, processor: Any) -> list[Batch]:
    """Return the batches of a data set whose columns are the model's inputs, padded if they differ in length."""
    accepted = inspect.signature(model.forward).parameters
    names = [name for name in rows.column_names if name in accepted or name in LABELS]
    tokenizer = getattr(processor, "tokenizer", processor)
    collate: Any = default_data_collator
    if hasattr(tokenizer, "pad"):
        of_tokens = any(isinstance(rows.features[name], (list, datasets.List)) for name in names if name in LABELS)
        collate = (DataCollatorForSeq2Seq if of_tokens else DataCollatorWithPadding)(tokenizer)
    must = f"rows of {listed(names)} must form batches, but do not"
    with refusing(must, "pass a processor= that can pad them", DataError):
        found = list(DataLoader(rows.select_columns(names), batch_size=BATCH_SIZE, collate_fn=collate))
    return check_batches(model, found, what="batches")


def _of_rows(
    model: PreTrainedModel,
    rows: datasets.Dataset,
    what: str,
    task: Task,
    processor: Any,
    columns: Mapping[str, Any] | None,
) -> list[Batch]:
    """Return the batches of a data set of texts or images."""
    if processor is None:
        raise RequestError(
            f"{what} with the columns {listed(rows.column_names)} needs processor=, the model's tokenizer or processor"
        )
    fields = dict(usual_columns(rows, task) if columns is None else columns)
    if isinstance(fields.get("text"), str):
        fields["text"] = (fields["text"],)
    try:
        read = Columns(**{name: fields.pop(name) for name in list(fields) if name in Columns.__dataclass_fields__})
        # Readers may set a padding token in the config and the tokenizer, which stay the user's own.
        own = {"config": copy.deepcopy(model.config), "processor": copy.deepcopy(processor)}
        reader = reader_for(task.name, columns=read, **own, **fields)
    except TypeError:
        known = (*Columns.__dataclass_fields__, "max_length", "packing")
        raise RequestError(f"columns must be among {', '.join(known)}, got {listed(list(fields))}") from None
    reader.check(rows)
    return reader.batches(reader.draw(rows, in_order=True), batch_size=BATCH_SIZE)


def usual_columns(rows: datasets.Dataset, task: Task) -> dict[str, Any]:
    """Return the columns of a data set whose names and types leave no choice."""
    texts = [name for name, feature in rows.features.items() if getattr(feature, "dtype", None) in STRINGS]
    images = [name for name, feature in rows.features.items() if holds_images(feature)]
    label = next((name for name in LABELS if name in rows.column_names), None)
    texts = [name for name in texts if name != label]
    if task.images and not task.text and len(images) == 1:
        return {"image": images[0], "label": label}
    if task.text and not task.images and 1 <= len(texts) <= task.text_columns:
        return {"text": tuple(texts), "label": None if task.generative else label}
    raise DataError(
        f"{task.name} needs columns= that name what to read ({task.needs}), such as "
        f"columns={{'text': 'sentence', 'label': 'label'}}, got none for a data set with {listed(rows.column_names)}"
    )


def split_held_out(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return the batches to score on, and the last quarter, which is held out; a single batch is split by its rows.

    A single row stays, and nothing is held out.
    """
    if len(batches) > 1:
        first = len(batches) - max(1, len(batches) // 4)
        return batches[:first], batches[first:]
    rows = size_of(batches[0])
    if rows == 1 or any(len(value) != rows for value in batches[0].values()):
        return batches, []
    first = rows - max(1, rows // 4)
    (batch,) = batches
    return [{k: v[:first] for k, v in batch.items()}], [{k: v[first:] for k, v in batch.items()}]


def first_rows(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return the batches up to a number of rows."""
    found: list[Batch] = []
    for batch in batches:
        if count <= 0:
            break
        found.append({key: value[:count] for key, value in batch.items()} if size_of(batch) > count else batch)
        count -= size_of(batch)
    return found


def unlabelled(batches: Sequence[Batch], task: Task) -> list[Batch]:
    """Return the batches to refit on: without labels, except of text, whose prediction depends on them."""
    if task.generative:
        return list(batches)
    return [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
