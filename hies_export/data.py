"""Tensor batches out: rows.load_rows -> check_rows -> make_batches, for calibration and for evaluation."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import PIL.Image
import torch
from transformers import AutoImageProcessor, AutoTokenizer

from .errors import DataError, RequestError
from .labels import STRINGS, is_regression, kind_of, read_labels
from .rows import listed, said

logger = logging.getLogger(__name__)

TASKS = ("text-classification", "image-classification")
# These models number positions from pad_token_id + 1: that many of their position embeddings go unused.
_POSITIONS_START_AFTER_PAD = {
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


@dataclass(frozen=True)
class Columns:
    """Which columns of the rows a task reads.

    Args:
        text: The text column, or two of them for sentence pairs.
        image: The image column.
        label: The column of labels; None for unlabelled rows.
    """

    text: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None


def check_rows(rows: datasets.Dataset, *, columns: Columns, config: Any, task: str) -> None:
    """Check that a model can be fed with these rows, before anything is computed.

    Args:
        rows: What `load_rows` returned.
        columns: The columns to read.
        config: The model's configuration (its labels and problem type are read).
        task: `text-classification` (regression is this with one label) or `image-classification`.

    Raises:
        DataError: a column is missing or of the wrong kind, or a row has no text, image or usable label.
        RequestError: the task is not one of these.
    """
    if task not in TASKS:
        raise RequestError(f"the task must be one of {', '.join(TASKS)}, got {task!r}")
    inputs = columns.text if task == "text-classification" else (columns.image,) if columns.image else ()
    if not 1 <= len(inputs) <= 2:
        wanted = "one or two data.text columns" if task == "text-classification" else "a data.image column"
        raise DataError(f"{task} needs {wanted}, got {len(inputs)}; the data has {listed(rows.column_names)}")
    for column in (*inputs, *([columns.label] if columns.label else [])):
        if column not in rows.column_names:
            raise DataError(f"the data must have the column {column!r}, but it has {listed(rows.column_names)}")
    for column in inputs:
        feature = rows.features[column]
        if task == "text-classification" and getattr(feature, "dtype", None) not in STRINGS:
            raise DataError(f"the column {column!r} must hold text, but it holds {kind_of(feature)}")
        if task == "image-classification" and not _holds_images(feature):
            raise DataError(f"the column {column!r} must hold images, but it holds {kind_of(feature)}")
        # An Image feature is one step from its storage; asking the table avoids decoding every image here.
        for row, value in enumerate(rows.with_format("arrow")[column][:]):
            if not value.is_valid:
                raise DataError(f"every row must have a {column!r}, but row {row} (from 0) has none")
    if columns.label:
        read_labels(rows, column=columns.label, config=config)


def _holds_images(feature: Any) -> bool:
    if isinstance(feature, dict):
        return {"bytes", "path"} <= set(feature)
    return isinstance(feature, datasets.Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def load_processor(path: str | Path, *, task: str, revision: str | None = None) -> Any:
    """Load what turns a row into tensors: a tokenizer, or an image processor.

    Images always go through the Pillow backend, so results do not depend on torchvision being installed.

    Args:
        path: A checkpoint folder or Hub id.
        task: `text-classification` or `image-classification`.
        revision: A branch, tag or commit of the Hub id.

    Raises:
        DataError: the checkpoint has no tokenizer or image processor that can be loaded.
        RequestError: the task is not one of these.
    """
    if task not in TASKS:
        raise RequestError(f"the task must be one of {', '.join(TASKS)}, got {task!r}")
    what = "an image processor" if task == "image-classification" else "a tokenizer"
    remedy = "save the one the model was trained with into that folder with save_pretrained"
    options = {} if revision is None else {"revision": revision}
    try:
        if task == "image-classification":
            return AutoImageProcessor.from_pretrained(path, backend="pil", **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except Exception as error:  # transformers, tokenizers, json and the Hub: each raises its own kind
        raise DataError(
            f"{task} needs {what}, but none could be loaded from {path} ({said(error)}); {remedy}"
        ) from error
    # Where the files are missing, transformers 5 makes a tokenizer of nothing but special tokens.
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if len(set(tokenizer.get_vocab().values()) - special) < 2:
        raise DataError(f"{task} needs {what}, but the one of {path} has no vocabulary; {remedy}")
    return tokenizer


def make_batches(
    rows: datasets.Dataset,
    *,
    columns: Columns,
    config: Any,
    task: str,
    processor: Any,
    batch_size: int,
    max_length: int | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Turn rows into batches for `model(**batch)`, in the rows' order, after `check_rows`.

    A tokenizer without a padding token gets one (the config's, else its end-of-text token), and a config
    without `pad_token_id` gets the tokenizer's: both are changed in place, with a logged warning.

    Args:
        rows: What `load_rows` returned.
        columns: The columns to read.
        config: The model's configuration.
        task: `text-classification` or `image-classification`.
        processor: What `load_processor` returned.
        batch_size: Samples per batch; the last one may have fewer.
        max_length: Tokens a text is cut to; None for as many as tokenizer and model take.

    Returns:
        Text: `input_ids`, `attention_mask` and what else the tokenizer gives, (batch, longest of the batch).
        Images: `pixel_values`, (batch, 3, height, width). With `columns.label`, `labels` (batch,): int64
        classes, or float32 for regression.

    Raises:
        DataError: as `check_rows`; an image that cannot be decoded; a max_length the model cannot take.
        RequestError: as `check_rows`.
    """
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1, got {batch_size}")
    check_rows(rows, columns=columns, config=config, task=task)
    if task == "text-classification":
        _settle_padding(processor, config)
        limit = _token_limit(processor, config, max_length)
    elif rows.features[columns.image] != datasets.Image():
        rows = rows.cast_column(columns.image, datasets.Image())
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
            images = [_rgb_image(rows, columns.image, row) for row in range(start, stop)]
            encoded = processor(images, return_tensors="pt")
        batch = dict(encoded)
        if "input_ids" in batch and batch["input_ids"].max() >= config.vocab_size:
            raise DataError(
                f"the tokenizer must be the model's own, but it gives the token {batch['input_ids'].max()} "
                f"and the model knows {config.vocab_size} tokens"
            )
        if labels is not None:
            batch["labels"] = labels[start:stop].clone()
        batches.append(batch)
    return batches


def _rgb_image(rows: datasets.Dataset, column: str | None, row: int) -> PIL.Image.Image:
    try:
        image = rows[row][column]
        if image.mode in ("P", "PA"):  # straight to RGB, Pillow warns about a palette with transparency
            image = image.convert("RGBA")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"every {column!r} must be an image, but row {row} (from 0) is not: {error}") from error


def _settle_padding(tokenizer: Any, config: Any) -> None:
    pad_token_id = getattr(config, "pad_token_id", None)
    if tokenizer.pad_token_id is None:
        own = tokenizer.convert_ids_to_tokens(pad_token_id) if pad_token_id is not None else None
        tokenizer.pad_token = own or tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise DataError(
                "texts of different length need a padding token, but the tokenizer has neither a padding nor "
                "an end-of-text token; set tokenizer.pad_token and save it with the model"
            )
        logger.warning("the tokenizer has no padding token: texts are padded with %r", tokenizer.pad_token)
    if pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
        logger.warning("the model's config has no pad_token_id: it is set to %d", tokenizer.pad_token_id)


def _token_limit(tokenizer: Any, config: Any, max_length: int | None) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in _POSITIONS_START_AFTER_PAD:
        positions -= config.pad_token_id + 1
    if max_length is not None:
        if max_length < 1 or (positions is not None and 0 < positions < max_length):
            range_ = f"in [1, {positions}], what the model takes" if positions else "at least 1"
            raise DataError(f"max_length must be {range_}, got {max_length}")
        return max_length
    # transformers writes 1e30 where it knows no limit, and some configs -1.
    limits = [limit for limit in (tokenizer.model_max_length, positions) if limit and 0 < limit < 1_000_000]
    return min(limits) if limits else None


def batches_fingerprint(batches: Sequence[Mapping[str, torch.Tensor]]) -> str:
    """Return the SHA-256, in hexadecimal, of the batches: their keys, dtypes, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        for key in sorted(batch):
            tensor = batch[key].detach().cpu()
            digest.update(f"{key}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        digest.update(b"|")
    return digest.hexdigest()
