"""Remember which row of its file a row is, so that an error names the one its user can look up.

Rows are drawn, shuffled, sliced and repeated before they are read. A column with their numbers goes along with them.
"""

from __future__ import annotations

import datasets
import numpy as np

# The column's name says where the rows are from. No data set or prompt has a column of such a name.
_NUMBERS = "hies_export: row of "


def number_rows(rows: datasets.Dataset, *, source: str) -> datasets.Dataset:
    """Return all rows of a source, such as "train.jsonl", in their own order, with a column of their numbers from 0."""
    return rows.add_column(_NUMBERS + source, np.arange(len(rows)))


def row_name(rows: datasets.Dataset, row: int) -> str:
    """Return what an error calls a row: "row 30 of train.jsonl (from 0)", or "row 3 (from 0)" if it has no number."""
    for column in rows.column_names:
        if column.startswith(_NUMBERS):
            return f"row {rows[column][row]} of {column.removeprefix(_NUMBERS)} (from 0)"
    return f"row {row} (from 0)"


def own_columns(rows: datasets.Dataset) -> list[str]:
    """Return the names of the columns that the data has itself."""
    return [column for column in rows.column_names if not column.startswith(_NUMBERS)]
