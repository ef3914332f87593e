"""Read the label sets of a multi-label classifier."""

from __future__ import annotations

from typing import Any

import datasets
import torch

from ..errors import DataError, quoted
from ..model.classes import ClassNames
from ..progress import quiet
from .columns import STRINGS, kind_of, read_labels
from .rows import number_rows, own_columns, row_name


def read_label_sets(rows: datasets.Dataset, *, column: str, config: Any) -> torch.Tensor:
    """Return the label set of each row, (rows, labels) float32: 1 for a label that applies, 0 for any other.

    A row has a list: of the numbers or names of its labels, or of 0 or 1 for each label of the model. Lists of integers
    are read as the latter if all rows can be. A row may also have the number or name of its only label or, if the model
    has a single label, 0 or 1.

    Raises:
        DataError: A row has no list, or a label that the model does not know.
    """
    feature, values, count = rows.features[column], rows[column][:], config.num_labels
    listed = isinstance(feature, (list, datasets.List, datasets.LargeList))
    inner = feature[0] if isinstance(feature, list) else feature.feature if listed else feature
    if not isinstance(inner, (datasets.Value, datasets.ClassLabel)):
        raise DataError(f"{column!r} must hold lists of labels, but it holds {kind_of(feature)} of {kind_of(inner)}")
    for row, value in enumerate(values):
        if value is None or (listed and None in value):
            raise DataError(
                f"every row must have a list of labels, empty if none applies, but {row_name(rows, row)} has "
                f"{quoted(value)} in {column!r}; complete it, or leave data.label out to run without labels"
            )
    classes = ClassNames(config)
    for row, value in enumerate(values if count > 1 and not listed and inner.dtype in STRINGS else ()):
        if not classes.find(value):
            raise DataError(
                f"the labels of a row must be a list, or the only label of it, one of {classes}, but "
                f"{row_name(rows, row)} has {quoted(value)} in {column!r}; split it into a list of labels"
            )
    sets = values if listed else [[value] for value in values]
    dtype = str(inner.dtype)
    named = dtype in STRINGS or (listed and isinstance(inner, datasets.ClassLabel))
    wrong = next((row for row, labels in enumerate(sets) if len(labels) != count or not set(labels) <= {0, 1}), None)
    if wrong is None and not named:
        return torch.tensor(sets, dtype=torch.float32)
    if wrong is not None and (dtype.startswith(("bool", "float")) or (count == 1 and not listed)):
        raise DataError(
            f"the labels in {column!r} must be 0 or 1 for each of the model's {count} labels, or lists of their "
            f"numbers or names, but {row_name(rows, wrong)} has {quoted(values[wrong])}"
        )
    return _of_members(rows, sets, inner, column, config)


def _of_members(rows: datasets.Dataset, sets: list[list[Any]], inner: Any, column: str, config: Any) -> torch.Tensor:
    """Return label sets that are given by the numbers or names of their labels."""
    found = torch.zeros(len(rows), config.num_labels)
    places = [row for row, labels in enumerate(sets) for _ in labels]
    if places:
        # A row for each label, with the number of the row that it comes from.
        numbers = [name for name in rows.column_names if name not in own_columns(rows)]
        with quiet():
            alone = rows.select_columns(numbers or column)
            alone = alone if numbers else number_rows(alone, source="the data").remove_columns(column)
            members = alone.select(places).add_column(
                column, [label for labels in sets for label in labels], feature=inner
            )
        found[places, torch.tensor(read_labels(members, column=column, config=config))] = 1.0
    return found
