"""Read texts, pairs of texts or images, each with a class, a set of labels or a number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import datasets
import numpy as np
import pandas
import torch

from ..errors import DataError, refusing
from .batches import Batch, predicts
from .columns import as_images, image_of_row, kind_of, read_labels, read_numbers
from .label_sets import read_label_sets
from .processors import encoded
from .reader import Reader, batched
from .rows import common_values, has_one_value, row_name

# What the label of a candidate says.
_GRADE = "how much a candidate is wanted"


class ClassificationReader(Reader):
    """Reads inputs and, from the column `label`, `labels`.

    They are classes, (batch,) int64, numbers, (batch,) float32, or label sets, (batch, labels) float32.
    """

    def _check_targets(self, rows: datasets.Dataset) -> None:
        if self.columns.label:
            self._labels(rows)

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        labels = self._labels(samples) if self.columns.label else None
        for part in batched(range(len(samples)), batch_size):
            batch = self._inputs(samples, part)
            yield batch if labels is None else batch | {"labels": labels[part]}

    def _labels(self, rows: datasets.Dataset) -> torch.Tensor:
        column, kind = str(self.columns.label), predicts(self.config)
        if kind == "labels":
            return read_label_sets(rows, column=column, config=self.config)
        dtype = torch.float32 if kind == "numbers" else torch.int64
        return torch.tensor(read_labels(rows, column=column, config=self.config), dtype=dtype)

    @abstractmethod
    def _inputs(self, samples: datasets.Dataset, part: list[int]) -> Batch:
        """Return the model's inputs of some of the samples."""


@dataclass(frozen=True)
class TextReader(ClassificationReader):
    """Reads one or two text columns.

    Batches have `input_ids`, `attention_mask` and whatever else the tokenizer gives, (batch, longest of the batch),
    padded on the tokenizer's side.

    With a column `group`, the model is a reranker. Its batches have no labels, but `group` (batch,) int64, the number
    of each row's query; when `judging` and with a column `label`, also `grades` (batch,) float32, how much each
    candidate is wanted.
    """

    judged: bool = False

    def judging(self) -> TextReader:
        """Return the reader of the same samples whose batches have grades, if it reads a column `group`."""
        return replace(self, judged=True)

    def _check_targets(self, rows: datasets.Dataset) -> None:
        if self.columns.group is None:
            super()._check_targets(rows)
            return
        if self.config.num_labels != 1:
            raise DataError(
                f"data.group is for rerankers, whose model has one label, but this one has {self.config.num_labels}; "
                "leave data.group out"
            )
        if not has_one_value(rows, self.columns.group):
            given = kind_of(rows.features[self.columns.group])
            raise DataError(f"the column {self.columns.group!r} must hold a text or a number per row, got {given}")
        for row, value in enumerate(common_values(rows, self.columns.group)):
            if value is None:
                raise DataError(f"every row must have a {self.columns.group!r}, but {row_name(rows, row)} has none")
        if self.columns.label:
            read_numbers(rows, column=self.columns.label, what=_GRADE)

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        if self.columns.group is None:
            yield from super()._batches(samples, batch_size)
            return
        described = {"group": torch.from_numpy(pandas.factorize(np.array(samples[self.columns.group][:]))[0])}
        if self.judged and self.columns.label:
            grades = read_numbers(samples, column=self.columns.label, what=_GRADE)
            described["grades"] = torch.tensor(grades, dtype=torch.float32)
        for part in batched(range(len(samples)), batch_size):
            yield self._inputs(samples, part) | {key: values[part] for key, values in described.items()}

    def _inputs(self, samples: datasets.Dataset, part: list[int]) -> Batch:
        texts = samples.select_columns(list(self.columns.text))[part]
        columns = [texts[name] for name in self.columns.text]
        return encoded(self.processor, self.config, *columns, max_length=self.max_length)


class ImageReader(ClassificationReader):
    """Reads an image column; batches have `pixel_values`, (batch, channels of the model, height, width)."""

    def _inputs(self, samples: datasets.Dataset, part: list[int]) -> Batch:
        column = str(self.columns.image)
        rows, channels = as_images(samples, column), getattr(self.config, "num_channels", 3)
        images = [image_of_row(rows, column, row, channels=channels) for row in part]
        must = f"the image processor must take images of {channels} channels, as the model does, to one size, and fails"
        with refusing(must, "give the one that the model was trained with, or set what it crops to", DataError):
            return dict(self.processor(images, return_tensors="pt"))
