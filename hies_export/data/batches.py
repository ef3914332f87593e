"""Tensor batches out: rows.load_rows -> check_rows -> draw_samples -> make_batches, for calibration and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

from ..errors import DataError, RequestError, listed
from ..tasks import GENERATIVE, TASKS
from .generation import answer_batches, block_batches, image_text_batches, text_batches
from .images import as_images, holds_images, rgb_image
from .labels import STRINGS, kind_of, read_labels
from .prompts import check_prompt, one_row_per_question, right_choice
from .rows import said
from .targets import is_regression
from .text_blocks import pack_text
from .tokens import check_vocabulary, settle_padding, token_limit

# Tokens of a block of plain text where the recipe does not say, and the model takes as many.
BLOCK_LENGTH = 512
# The one column of rows that `draw_samples` has packed into blocks.
BLOCK = "input_ids"


@dataclass(frozen=True)
class Columns:
    """Which columns of the rows a task reads.

    Args:
        text: The text column, or two of them for sentence pairs; one for plain text to generate.
        image: The image column.
        label: The column of labels of a classification, None for unlabelled rows; of generated text, the column that
            says which of the choices in `answer` is right.
        prompt: A template over the columns, such as "Question: {question}\\nAnswer:".
        answer: The column with what is to follow the prompt.
    """

    text: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None
    prompt: str | None = None
    answer: str | None = None


def check_rows(rows: datasets.Dataset, *, columns: Columns, config: Any, task: str) -> None:
    """Check that a model can be fed with these rows, before anything is computed.

    Args:
        rows: What `load_rows` returned.
        columns: The columns to read.
        config: The model's configuration (its labels and problem type are read).
        task: One of `TASKS`; regression is `text-classification` with one label. `text-generation` reads either one
            text column or a prompt and its answer, `image-text-to-text` an image, a prompt and its answer.

    Raises:
        DataError: a column is missing or of the wrong kind, a row has no text, image or usable label, or the prompt
            names no column.
        RequestError: the task is not one of these.
    """
    _check_task(task)
    inputs = _input_columns(rows, columns=columns, task=task)
    for column in (*inputs, *([columns.label] if columns.label else [])):
        if column not in rows.column_names:
            raise DataError(f"the data must have the column {column!r}, but it has {listed(rows.column_names)}")
    for column in inputs:
        feature = rows.features[column]
        if column == columns.image and not holds_images(feature):
            raise DataError(f"the column {column!r} must hold images, but it holds {kind_of(feature)}")
        if column != columns.image and getattr(feature, "dtype", None) not in STRINGS:
            raise DataError(f"the column {column!r} must hold text, but it holds {kind_of(feature)}")
        # An Image feature is one step from its storage; asking the table avoids decoding every image here.
        for row, value in enumerate(rows.with_format("arrow")[column][:]):
            if not value.is_valid:
                raise DataError(f"every row must have a {column!r}, but row {row} (from 0) has none")
    if columns.prompt is not None and columns.answer is not None and task in GENERATIVE:
        check_prompt(rows, prompt=columns.prompt, answer=columns.answer)
        if columns.label:
            right_choice(rows, answer=columns.answer, label=columns.label)
    if columns.label and task not in GENERATIVE:
        read_labels(rows, column=columns.label, config=config)


def _check_task(task: str) -> None:
    if task not in TASKS:
        raise RequestError(f"the task must be one of {', '.join(TASKS)}, got {task!r}")


def _input_columns(rows: datasets.Dataset, *, columns: Columns, task: str) -> tuple[str, ...]:
    """The text or image columns that a task reads as they are."""
    has = f"the data has {listed(rows.column_names)}"
    image = () if columns.image is None else (columns.image,)
    if task in GENERATIVE:
        prompted = columns.prompt is not None and columns.answer is not None
        if task == "text-generation" and not prompted and (columns.prompt, columns.answer) != (None, None):
            raise DataError(f"data.prompt and data.answer go together, got only one of them; {has}")
        if task == "text-generation" and (prompted, len(columns.text)) not in {(True, 0), (False, 1)}:
            raise DataError(
                f"{task} needs either one data.text column, or data.prompt and data.answer, got {len(columns.text)} "
                f"text columns and {'a' if prompted else 'no'} prompt; {has}"
            )
        if task == "image-text-to-text" and not (image and prompted):
            raise DataError(f"{task} needs data.image, data.prompt and data.answer, but not all are given; {has}")
        return image if task == "image-text-to-text" else columns.text
    inputs = columns.text if task == "text-classification" else image
    if not 1 <= len(inputs) <= 2:
        wanted = "one or two data.text columns" if task == "text-classification" else "a data.image column"
        raise DataError(f"{task} needs {wanted}, got {len(inputs)}; {has}")
    return inputs


def load_processor(path: str | Path, *, task: str, revision: str | None = None) -> Any:
    """Load what turns a row into tensors: a tokenizer, an image processor, or a processor of both.

    Images always go through the Pillow backend, so results do not depend on torchvision being installed.

    Args:
        path: A checkpoint folder or Hub id.
        task: One of `TASKS`.
        revision: A branch, tag or commit of the Hub id.

    Raises:
        DataError: the checkpoint has none that can be loaded.
        RequestError: the task is not one of these.
    """
    _check_task(task)
    loaders: dict[str, tuple[Any, str]] = {
        "image-classification": (AutoImageProcessor, "an image processor"),
        "image-text-to-text": (AutoProcessor, "a processor of images and text"),
    }
    loader, what = loaders.get(task, (AutoTokenizer, "a tokenizer"))
    remedy = "save the one the model was trained with into that folder with save_pretrained"
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        loaded = loader.from_pretrained(path, **options, **({} if loader is AutoTokenizer else {"backend": "pil"}))
    except Exception as error:  # transformers, tokenizers, json and the Hub: each raises its own kind
        raise DataError(
            f"{task} needs {what}, but none could be loaded from {path} ({said(error)}); {remedy}"
        ) from error
    if task == "image-classification":
        return loaded
    if task == "image-text-to-text" and not (hasattr(loaded, "tokenizer") and hasattr(loaded, "image_processor")):
        raise DataError(f"{task} needs {what}, but {path} has only a {type(loaded).__name__}; {remedy}")
    tokenizer = getattr(loaded, "tokenizer", loaded)
    # Where the files are missing, transformers 5 makes a tokenizer of nothing but special tokens.
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if len(set(tokenizer.get_vocab().values()) - special) < 2:
        raise DataError(f"{task} needs {what}, but the one of {path} has no vocabulary; {remedy}")
    return loaded


def draw_samples(
    rows: datasets.Dataset,
    *,
    columns: Columns,
    config: Any,
    task: str,
    processor: Any,
    max_length: int | None = None,
    packing: bool = True,
    samples: int | None = None,
    shuffle_seed: int | None = None,
) -> datasets.Dataset:
    """Turn rows into one row per sample, then take as many as wanted, so that samples are what is counted.

    Rows are samples already, but for three cases. Plain text to generate is packed into blocks (`pack_text`), so give
    all rows, in their own order. Rows with lists of questions become a row per question (`one_row_per_question`). Of
    several choices the right one becomes the answer (`right_choice`).

    Args:
        rows: What `load_rows` returned and `check_rows` accepted.
        columns: The columns to read.
        config: The model's configuration.
        task: One of `TASKS`.
        processor: What `load_processor` returned.
        max_length: As in `make_batches`.
        packing: As in `make_batches`.
        samples: How many; None for all. When there are fewer, all are returned.
        shuffle_seed: Take them in a seeded random order.

    Returns:
        Rows for `make_batches`; blocks are its column `input_ids`.

    Raises:
        DataError: as `pack_text` and `one_row_per_question`; a max_length the model cannot take.
    """
    if task in GENERATIVE and columns.prompt is not None and columns.answer is not None:
        if columns.label:
            rows = right_choice(rows, answer=columns.answer, label=columns.label)
        rows = one_row_per_question(rows, prompt=columns.prompt, answer=columns.answer)
    elif task == "text-generation" and packing and not _packed(rows):
        length = token_limit(processor, config, max_length) or BLOCK_LENGTH
        length = length if max_length is not None else min(length, BLOCK_LENGTH)
        if length < 2:
            raise DataError(f"blocks of text must have at least two tokens, got max_length {length}")
        blocks = pack_text(rows, column=columns.text[0], tokenizer=processor, length=length)
        rows = datasets.Dataset.from_dict({BLOCK: blocks})
    order: Sequence[int] | np.ndarray = range(len(rows))
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(rows))
    return rows.select(order[:samples], keep_in_memory=True)


def _packed(rows: datasets.Dataset) -> bool:
    return rows.column_names == [BLOCK]


def make_batches(
    rows: datasets.Dataset,
    *,
    columns: Columns,
    config: Any,
    task: str,
    processor: Any,
    batch_size: int,
    max_length: int | None = None,
    packing: bool = True,
) -> list[dict[str, torch.Tensor]]:
    """Turn rows into batches for `model(**batch)`, in the rows' order, after `check_rows` and `draw_samples`.

    A tokenizer without a padding token gets one (the config's, else its end-of-text token), and a config
    without `pad_token_id` gets the tokenizer's: both are changed in place, with a logged warning.

    Args:
        rows: What `load_rows` or `draw_samples` returned.
        columns: The columns to read.
        config: The model's configuration.
        task: One of `TASKS`.
        processor: What `load_processor` returned.
        batch_size: Samples per batch; the last one may have fewer.
        max_length: Tokens a text is cut to; None for as many as tokenizer and model take. Plain text to generate is
            cut into blocks of so many, by default of 512 if the model takes them. A prompt with an answer loses its
            first tokens, but never one of the answer's; one with an image is refused when it is too long.
        packing: Whether plain text to generate is packed into blocks; otherwise every row is a sample.

    Returns:
        Text: `input_ids`, `attention_mask` and what else the tokenizer gives, (batch, longest of the batch), padded on
        the tokenizer's side. Images: `pixel_values`, (batch, 3, height, width). With `columns.label`, `labels`
        (batch,): int64 classes, or float32 for regression. Generated text: `labels` (batch, longest), the tokens
        themselves, not shifted: all of a plain text, only the answer's after a prompt, -100 elsewhere; under left
        padding also `position_ids`, where the model takes them.

    Raises:
        DataError: as `check_rows` and `draw_samples`; an image that cannot be decoded (of images to talk about, more
            than one in a hundred; others are left out, with a logged warning); a max_length the model cannot take.
        RequestError: as `check_rows`.
    """
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1, got {batch_size}")
    options: dict[str, Any] = {"columns": columns, "config": config, "task": task}
    if not (task == "text-generation" and _packed(rows)):
        check_rows(rows, **options)
    if task in GENERATIVE:
        rows = draw_samples(rows, **options, processor=processor, max_length=max_length, packing=packing)
        return _generative_batches(rows, **options, processor=processor, batch_size=batch_size, max_length=max_length)
    if task == "text-classification":
        settle_padding(processor, config)
        limit = token_limit(processor, config, max_length)
    else:
        rows = as_images(rows, str(columns.image))
    labels: torch.Tensor | None = None
    if columns.label:
        dtype = torch.float32 if is_regression(config) else torch.int64
        labels = torch.tensor(read_labels(rows, column=columns.label, config=config), dtype=dtype)
    batches = []
    for start in range(0, len(rows), batch_size):
        stop = min(start + batch_size, len(rows))
        if task == "text-classification":
            texts = rows.select_columns(list(columns.text))[start:stop]
            # A model of fewer than two segments has no use for segment ids, or no embedding for the second.
            segments = None if getattr(config, "type_vocab_size", 0) >= 2 else False
            encoded = processor(
                *(texts[column] for column in columns.text),
                padding=True,
                truncation=limit is not None,
                max_length=limit,
                return_attention_mask=True,
                return_token_type_ids=segments,
                return_tensors="pt",
            )
        else:
            images = [rgb_image(rows, str(columns.image), row) for row in range(start, stop)]
            encoded = processor(images, return_tensors="pt")
        batch = dict(encoded)
        if "input_ids" in batch:
            check_vocabulary(batch["input_ids"], config)
        if labels is not None:
            batch["labels"] = labels[start:stop].clone()
        batches.append(batch)
    return batches


def _generative_batches(
    rows: datasets.Dataset,
    *,
    columns: Columns,
    config: Any,
    task: str,
    processor: Any,
    batch_size: int,
    max_length: int | None,
) -> list[dict[str, torch.Tensor]]:
    if task == "text-generation" and _packed(rows):
        return block_batches(rows, config=config, batch_size=batch_size)
    tokenizer = getattr(processor, "tokenizer", processor)
    settle_padding(tokenizer, config)
    options: dict[str, Any] = {
        "config": config,
        "batch_size": batch_size,
        "limit": token_limit(tokenizer, config, max_length),
    }
    if columns.prompt is None:
        return text_batches(rows, column=columns.text[0], tokenizer=tokenizer, **options)
    options |= {"prompt": columns.prompt, "answer": columns.answer}
    if task == "text-generation":
        return answer_batches(rows, tokenizer=tokenizer, **options)
    return image_text_batches(rows, image=str(columns.image), processor=processor, **options)
