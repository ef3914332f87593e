"""The common part of all readers: load the rows of a split, check them, draw samples, make batches."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import datasets

from ..errors import DataError, did_you_mean, listed, quoted
from .batches import Batch
from .columns import STRINGS, holds_images, kind_of
from .rows import load_rows, mapped_rows, own_columns, row_name, take

if TYPE_CHECKING:
    from ..tasks import Task

AnyReader = TypeVar("AnyReader", bound="Reader")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Columns:
    """Which columns of the rows a task reads, by the fields of a recipe's `data` section."""

    text: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None
    prompt: str | None = None
    answer: str | None = None
    query: str | None = None
    document: str | None = None
    group: str | None = None

    @property
    def together(self) -> str | None:
        """The column of what rows have in common that are drawn together: a query."""
        return self.query or self.group


@dataclass(frozen=True)
class Reader(ABC):
    """Turns rows into samples, and samples into batches, for one task and one model."""

    columns: Columns
    config: Any  # the model's configuration. Its labels, problem type, positions and vocabulary are read
    processor: Any = None  # the reader's own, see `Task.reader`; only `check` does without
    # Tokens a text is cut to; None for as many as tokenizer and model take. Plain text to generate is cut into blocks
    # of this length, by default 512 if the model takes as many. A prompt with an answer loses its first tokens, but
    # none of the answer's; one with an image is refused if it is too long.
    max_length: int | None = None
    packing: bool = True  # whether plain text to generate is packed into blocks; otherwise every row is a sample
    # Whether a block begins with the begin-of-text token, as one of its tokens; by default if the tokenizer begins a
    # text with it.
    bos: bool | Literal["auto"] = "auto"
    task: Task | None = None  # which columns go together; None to take them as they are
    # Whether a row is a sample, so that only as many rows are read as samples are wanted.
    a_row_is_a_sample: ClassVar[bool] = True

    def load(
        self, split: str, *, name: str | None = None, files: Mapping[str, str | Path] | None = None, **drawn: Any
    ) -> datasets.Dataset:
        """Load rows as `load_rows` does, `check` them, and `draw` samples from them by its options."""
        source: dict[str, Any] = {"name": name, "files": files, "split": split, "numbered": True}
        if self.a_row_is_a_sample:
            rows = load_rows(**source, **drawn, together=self.columns.together)
            self.check(rows)
            return rows
        with mapped_rows(**source) as rows:
            self.check(rows)
            return self.draw(rows, **drawn)

    def check(self, rows: datasets.Dataset) -> None:
        """Check that the model can be fed with these rows, before anything is computed."""
        columns = self.columns
        if self.task is not None and (refusal := self.task.refusal(columns)):
            raise DataError(f"{refusal}; the data has {listed(own_columns(rows))}")
        inputs = (*columns.text, *([columns.image] if columns.image else []))
        others = (columns.query, columns.document, columns.group, columns.label)
        for column in (*inputs, *(name for name in others if name)):
            if column not in rows.column_names:
                known = own_columns(rows)
                raise DataError(
                    f"the data must have the column {quoted(column)}, but it has {listed(known)}"
                    f"{did_you_mean(column, known)}"
                )
        for column in inputs:
            feature = rows.features[column]
            if column == columns.image and not holds_images(feature):
                raise DataError(
                    f"the column {column!r} must hold images, but it holds {kind_of(feature)}; write one image in each "
                    "row, its bytes and not its path or address, such as by datasets.Dataset.from_list([{'image': "
                    "PIL.Image.open(path)}]).to_parquet('train.parquet')"
                )
            if column != columns.image and not self._is_text(feature):
                raise DataError(
                    f"the column {column!r} must hold text, but it holds {kind_of(feature)}; name a column of text"
                )
            # An Image feature is one step from its storage; asking the table avoids decoding every image here.
            values = rows.with_format("arrow")[column][:]
            for row, value in enumerate(values if values.null_count else ()):
                if not value.is_valid:
                    raise DataError(
                        f"every row must have a {column!r}, but {row_name(rows, row)} has none; leave it out"
                    )
        self._check_targets(rows)

    def _is_text(self, feature: Any) -> bool:
        """Return whether a column may be named in `text`."""
        return getattr(feature, "dtype", None) in STRINGS

    @abstractmethod
    def _check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse rows without a label or answer that the model knows."""

    def draw(
        self,
        rows: datasets.Dataset,
        *,
        samples: int | None = None,
        shuffle_seed: int | None = None,
        in_order: bool = False,
    ) -> datasets.Dataset:
        """Turn all rows, in their own order, into one row per sample, and `take` as many of these as wanted."""
        together = self.columns.together
        return take(
            self._as_samples(rows), samples=samples, shuffle_seed=shuffle_seed, in_order=in_order, together=together
        )

    def _as_samples(self, rows: datasets.Dataset) -> datasets.Dataset:
        """Return one row per sample."""
        return rows

    def batches(self, samples: datasets.Dataset, *, batch_size: int) -> list[Batch]:
        """Turn samples into batches for `model(**batch)`, in their order, padded with the config's `pad_token_id`."""
        return list(self._batches(samples, batch_size)) if len(samples) else []

    @abstractmethod
    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[Batch]:
        """Make batches of at least one sample."""

    def judging(self: AnyReader) -> AnyReader:
        """Return the reader of the same samples whose batches say how rows belong together, for ranking metrics."""
        return self

    def as_they_come(self: AnyReader) -> AnyReader:
        """Return the reader of the same samples in the order of their rows, for timing."""
        return self

    def unlabelled(self: AnyReader) -> AnyReader:
        """Return the reader of the same samples without their label column."""
        return replace(self, columns=replace(self.columns, label=None))


def batched(items: Iterable[Item], batch_size: int) -> Iterator[list[Item]]:
    """Yield `batch_size` items at a time; the last batch may have fewer."""
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1, got {batch_size}")
    remaining = iter(items)
    while part := list(itertools.islice(remaining, batch_size)):
        yield part
