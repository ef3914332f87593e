"""Turn what a user holds in memory into batches: a DataLoader, a list of batches or of texts, or a data set."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, PreTrainedModel, default_data_collator

from ..data.batches import IGNORED, Batch, check_numbers, of_similar_length, size_of
from ..data.columns import holds_images, holds_text
from ..data.processors import tokenizer_of
from ..data.rows import fixed_permutation, is_list, own_columns
from ..errors import DataError, RequestError, did_you_mean, listed, quoted, refusing
from ..files import Rule, check
from ..late import datasets, is_data_set
from ..model.tokens import is_token
from ..recipe.sections import Columns
from .classification import CLASSIFIED
from .labels import LABELS, numbers_column, read_labels
from .task import Task, Use

_COLUMNS = Rule("columns= must be fields of a recipe's data", "see Columns")
# Rows of a data set that go through the model at once.
BATCH_SIZE = 16
# Texts of an item of a list -> what the list is of, and an example.
_LISTS = {1: ("texts", "['a text', 'another']"), 2: ("pairs of texts", "[('a query', 'a document')]")}


def batches_of(
    model: PreTrainedModel,
    given: Any,
    *,
    what: str,
    task: Task,
    processor: Any,
    columns: Mapping[str, Any] | None,
    max_length: int | None = None,
    use: Use = "score",
) -> list[Batch]:
    """Return batches that the model takes, on the CPU, with what is to be predicted in `labels`.

    A DataError refuses texts that are none, or blank, and batches that do not suit the model; a RequestError refuses a
    missing processor, and columns where there are none.

    Args:
        given: Batches, a data set, a list of texts to embed, or a list of pairs of texts to classify.
        what: The name of `given`, for messages.
        processor: Tokenizer or processor, for what is not batches yet.
        columns: Fields of `Columns`, for a data set.
        max_length: The same, where the columns do not say it.
        use: What the rows of a data set are read for.
    """
    # `_rows_of_texts` refuses a list with other items beside.
    has_texts = isinstance(given, (list, tuple)) and any(isinstance(item, str) or _is_pair(item) for item in given)
    if is_data_set(given) and columns is None and model.main_input_name in given.features:
        batches = check_batches(model, _collated(model, given, processor, task), what=what)
    elif is_data_set(given) or columns is not None or has_texts:
        rows, task = _rows_to_read(given, what, task, processor, columns, max_length)
        batches = task.read(task.draw(rows, in_order=True), size=BATCH_SIZE, use=use)
        if not batches:
            raise DataError(f"{what} must have at least one row, got an empty data set")
        if use == "score":
            batches = of_similar_length(batches, config=model.config)
    else:
        batches = check_batches(model, given, what=what)
    if task.predicts in ("words", "tokens"):
        batches = [_without_labels_at_padding(batch, shift=task.shift) for batch in batches]
    return [task.canonical(model, batch) for batch in batches]


def _is_pair(item: Any) -> bool:
    """Return whether an item of a list is a pair of texts."""
    return isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _rows_of_texts(texts: Sequence[Any], what: str, task: Task) -> tuple[datasets.Dataset, dict[str, Any]]:
    """Return texts, or pairs, as rows, and the fields of `Columns` to read; a DataError refuses other items."""
    if not task.of_item:
        raise DataError(
            f"{what} of {task.name} must be batches or a data set, got a list of texts; make a datasets.Dataset of them"
        )
    needed, example = _LISTS[task.of_item]
    for number, item in enumerate(texts):
        texts_of_item = item if _is_pair(item) else [item]
        has_texts = all(isinstance(text, str) and text.strip() for text in texts_of_item)
        if len(texts_of_item) != task.of_item or not has_texts:
            raise DataError(
                f"{what} must be {needed} only, none of them blank, such as {example}, but item {number} (from 0) is "
                f"{quoted(item)}"
            )
    if task.of_item == 1:
        return datasets.Dataset.from_dict({"text": list(texts)}), {"text": ("text",)}
    rows = datasets.Dataset.from_dict({"query": [pair[0] for pair in texts], "document": [pair[1] for pair in texts]})
    fields: dict[str, Any] = {"text": ("query", "document")}
    if task.predicts == "numbers":  # a reranker, which orders the candidates of a query
        fields["group"] = "query"
    return rows, fields


def _without_labels_at_padding(batch: Batch, *, shift: int) -> Batch:
    """Return a batch of text whose labels are -100 where they stand at padding or are predicted from it.

    Outputs at padding are arbitrary, but labels that copy the input, or are padded with a class, have values there. A
    label is predicted at the token that stands `shift` before its own.
    """
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if labels is None or mask is None or labels.shape != mask.shape:
        return batch
    real = mask != 0
    predicted_from_real = real.roll(shift, -1)
    predicted_from_real[:, :shift] = True  # the first label of a row is not predicted
    return {**batch, "labels": labels.where(real & predicted_from_real, IGNORED)}


def _collated(model: PreTrainedModel, rows: datasets.Dataset, processor: Any, task: Task) -> list[Batch]:
    """Return the batches of a data set whose columns are the model's inputs and labels, padded by a tokenizer."""
    accepted = inspect.signature(model.forward).parameters
    names = [name for name in rows.column_names if name in accepted or name in LABELS]
    labels = [name for name in names if name in LABELS]
    tokenizer, classified = tokenizer_of(processor), task.predicts in CLASSIFIED
    collate: Any = default_data_collator
    if hasattr(tokenizer, "pad"):
        labels_by_token = not classified and any(is_list(rows.features[name]) for name in labels)
        # The one for sequences pads labels too.
        collate = DataCollatorForSeq2Seq(tokenizer) if labels_by_token else DataCollatorWithPadding(tokenizer)
    for name in labels if classified else []:
        feature = rows.features[name]
        if isinstance(feature, datasets.ClassLabel) or holds_text(feature):
            numbers = read_labels(rows, column=name, config=model.config, numbers=task.predicts == "numbers")
            rows = rows.remove_columns(name).add_column(name, numbers)
    must = f"rows of {listed(names)} must form batches, but do not"
    with refusing(must, "pass a processor= that can pad them", DataError):
        return list(DataLoader(rows.select_columns(names), batch_size=BATCH_SIZE, collate_fn=collate))


def _rows_to_read(
    given: Any, what: str, task: Task, processor: Any, columns: Mapping[str, Any] | None, max_length: int | None
) -> tuple[datasets.Dataset, Task]:
    """Check and return the rows of a data set or list of texts, and the task to read them; see `batches_of`."""
    if not is_data_set(given):
        if columns is not None:
            raise RequestError(
                f"columns= belongs to a datasets.Dataset, but {what} is a {type(given).__name__}; leave it out"
            )
        given, columns = _rows_of_texts(given, what, task)
    elif columns is None:
        columns = usual_columns(given, type(task))
    if columns is None:
        raise DataError(
            f"{task.name} needs columns= that name what to read ({task.needs}), such as "
            f"columns={{'text': 'sentence'}}, got none for a data set with {listed(own_columns(given))}"
        )
    if processor is None:
        raise RequestError(
            f"{what} with the columns {listed(own_columns(given))} needs processor=, the model's tokenizer or processor"
        )
    checked = check({"max_length": max_length, **(columns or {})}, Columns, _COLUMNS, where="columns")
    task = task.to_read(checked, processor)
    task.check_rows(given)
    return given, task


def usual_columns(
    rows: datasets.Dataset, task: type[Task], *, preferred: Iterable[Sequence[str]] = ()
) -> dict[str, Any] | None:
    """Return which columns of a data set to read, by the fields of `Columns`; None if names and types leave a choice.

    `preferred` are sets of text columns, the best first: the first that the data set has is read, whatever its other
    texts.
    """
    features = {name: rows.features[name] for name in own_columns(rows)}
    if columns := task.usual_columns(features):
        return columns
    by_type = features if task.columns_by_type else {}
    present = [names for names in preferred if len(names) <= task.text_columns and {*names} <= {*features}]
    texts = list(present[0]) if present else [name for name, feature in by_type.items() if holds_text(feature)]
    images = [name for name, feature in by_type.items() if holds_images(feature)]
    label = next((name for name in LABELS if name in features), None)
    texts = [name for name in texts if name != label]
    if task.embeds:
        # The only text, or a pair with a number.
        score = numbers_column(features) if len(texts) == 2 else None
        if len(texts) == 1 or score is not None or present:
            return {"text": tuple(texts), "label": score}
    elif task.images and not task.text and len(images) == 1:
        return {"image": images[0], "label": label}
    elif task.text and not task.images and 1 <= len(texts) <= task.text_columns:
        return {"text": tuple(texts), "label": label if "text label" in task.reads else None}
    return None


def check_batches(model: PreTrainedModel, batches: Iterable[Any], *, what: str = "batches") -> list[Batch]:
    """Return batches as plain dicts of tensors on the CPU; a DataError refuses those that the model does not take."""
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise DataError(f"{what} must be a list or a DataLoader of batches, got a {type(batches).__name__}")
    checked: list[Batch] = []
    for number, batch in enumerate(batches):
        name = f"batch {number} (from 0) of {what}"
        checked.append(_checked(model, batch, name))
        if checked[0].keys() != checked[-1].keys():
            raise DataError(
                f"all batches must have the keys of the first one ({', '.join(checked[0])}), but {name} has "
                f"{', '.join(checked[-1])}"
            )
    if not checked:
        raise DataError(f"{what} must have at least one batch, got none; an iterator gives its batches only once")
    return checked


def _checked(model: PreTrainedModel, batch: Any, name: str) -> Batch:
    """Return one batch as `check_batches` does; `name` is that of the batch in messages."""
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(f"a batch must map names of arguments to tensors, but {name} is a {type(batch).__name__}")
    arguments = [argument for argument in inspect.signature(model.forward).parameters if argument != "kwargs"]
    for key, value in batch.items():
        if key not in arguments:
            raise DataError(
                f"every key of a batch must be an argument of {type(model).__name__}.forward, but {name} has "
                f"{quoted(key)}; leave it out{did_you_mean(str(key), arguments)}"
            )
        if not isinstance(value, Tensor):
            raise DataError(
                f"a batch must hold tensors only, but {quoted(key)} of {name} is a {type(value).__name__}; tokenizers "
                "and image processors make some with return_tensors='pt'"
            )
    if len({value.shape[:1] for value in batch.values()}) != 1 or not all(map(Tensor.numel, batch.values())):
        shapes = listed(f"{key} {tuple(value.shape)}" for key, value in batch.items())
        raise DataError(f"the first axis of every tensor must be the samples, one or more, but {name} has {shapes}")
    checked = {str(key): value.detach().cpu() for key, value in batch.items()}
    config, ids, mask = model.config.get_text_config(), checked.get("input_ids"), checked.get("attention_mask")
    vocabulary, pad = getattr(config, "vocab_size", None), getattr(config, "pad_token_id", None)
    if ids is not None and vocabulary is not None:
        check_numbers(ids, vocabulary, "input_ids", name, dtypes=(torch.int32, torch.int64))
    # A mask of another shape says for each token which others it sees.
    if is_token(pad, model.config) and ids is not None and mask is not None and mask.shape == ids.shape:
        # Some models tell padding from text by their config's token alone; collators pad with the tokenizer's.
        checked["input_ids"] = ids.where(mask.bool(), pad)
    return checked


def split_held_out(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Divide batches, or the rows of a single one, into three quarters to score on and a quarter to hold out.

    The quarter is drawn at random, as rows are often sorted, such as by label. Nothing is held out of a single row, nor
    of a single batch in which a tensor has no entry for each row.
    """
    single = len(batches) == 1
    count = size_of(batches[0]) if single else len(batches)
    if count == 1 or (single and any(len(value) != count for value in batches[0].values())):
        return batches, []
    order, quarter = fixed_permutation(count).tolist(), max(1, count // 4)
    scored, held_out = sorted(order[:-quarter]), sorted(order[-quarter:])
    if not single:
        return [batches[number] for number in scored], [batches[number] for number in held_out]
    tensors = batches[0].items()
    return [{key: value[scored] for key, value in tensors}], [{key: value[held_out] for key, value in tensors}]


def first_rows(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return the first `count` rows of batches, in batches."""
    chosen: list[Batch] = []
    for batch in batches:
        if count <= 0:
            break
        chosen.append({key: value[:count] for key, value in batch.items()} if size_of(batch) > count else batch)
        count -= size_of(batch)
    return chosen


def unlabelled(batches: Sequence[Batch], task: Task) -> list[Batch]:
    """Return the batches without labels, unless these say where predictions are read."""
    if task.places_by_labels:
        return list(batches)
    return [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
