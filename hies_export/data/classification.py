"""Read texts, pairs of texts or images, each with a class or a number as its label."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import datasets
import torch

from .batches import Batch
from .images import as_images, image_of_row
from .labels import read_labels
from .reader import Reader, batched
from .targets import is_regression
from .tokens import check_vocabulary, settle_padding, token_limit


class ClassificationReader(Reader):
    """Reads inputs and, from the column `label`, `labels` (batch,): int64 classes, or float32 for regression."""

    def _check_targets(self, rows: datasets.Dataset) -> None:
        if self.columns.label:
            read_labels(rows, column=self.columns.label, config=self.config)

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        labels: torch.Tensor | None = None
        if self.columns.label:
            dtype = torch.float32 if is_regression(self.config) else torch.int64
            labels = torch.tensor(read_labels(samples, column=self.columns.label, config=self.config), dtype=dtype)
        for part in batched(range(len(samples)), batch_size):
            batch = self._inputs(samples, part)
            yield batch if labels is None else batch | {"labels": labels[part]}

    @abstractmethod
    def _inputs(self, samples: datasets.Dataset, part: list[int]) -> Batch:
        """Return the model's inputs of some of the samples."""


class TextReader(ClassificationReader):
    """Reads one or two text columns.

    Batches have `input_ids`, `attention_mask` and whatever else the tokenizer gives, (batch, longest of the batch),
    padded on the tokenizer's side.
    """

    task = "text-classification"

    def _inputs(self, samples: datasets.Dataset, part: list[int]) -> Batch:
        settle_padding(self.processor, self.config)
        limit = token_limit(self.processor, self.config, self.max_length)
        texts = samples.select_columns(list(self.columns.text))[part]
        encoded = self.processor(
            *(texts[name] for name in self.columns.text),
            padding=True,
            truncation=limit is not None,
            max_length=limit,
            return_attention_mask=True,
            # A model of fewer than two segments has no use for segment ids, or no embedding for the second.
            return_token_type_ids=None if getattr(self.config, "type_vocab_size", 0) >= 2 else False,
            return_tensors="pt",
        )
        check_vocabulary(encoded["input_ids"], self.config)
        return dict(encoded)


class ImageReader(ClassificationReader):
    """Reads an image column; batches have `pixel_values`, (batch, 3, height, width)."""

    task = "image-classification"

    def _inputs(self, samples: datasets.Dataset, part: list[int]) -> Batch:
        column = str(self.columns.image)
        images = as_images(samples, column)
        return dict(self.processor([image_of_row(images, column, row) for row in part], return_tensors="pt"))
