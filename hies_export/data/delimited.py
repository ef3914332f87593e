"""Read large csv and tsv files in chunks, with the column types that reading them as a whole would find."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa

# Files below this many bytes are read as a whole, by `datasets`; gzipped text is a fraction of its size.
WHOLE_BYTES = 8_000_000
WHOLE_GZIPPED_BYTES = 1_000_000
ROWS = 20_000


def is_large(parts: Sequence[Path]) -> bool:
    """Return whether any of the files is better read in chunks."""
    return any(part.stat().st_size > (WHOLE_GZIPPED_BYTES if part.suffix == ".gz" else WHOLE_BYTES) for part in parts)


def read_in_chunks(parts: Sequence[Path], folder: Path, options: Mapping[str, Any]) -> datasets.Dataset | None:
    """Read csv or tsv files in two passes: one finds the column types of the first file, one writes `rows.arrow`.

    `options` are those of `pandas.read_csv`. Returns the rows, mapped from that file; None if the type of a column can
    only be told from the whole file.
    """
    kinds = _kinds(parts[0], options)
    if None in kinds.values():
        return None
    dtype = {column: str for column, kind in kinds.items() if kind == "O"}
    tables = (table for part in parts for table in _tables(part, {**options, "dtype": dtype}))
    first = next(tables, None)
    if first is None:
        return None
    numbers = {"i": pa.int64(), "f": pa.float64(), "b": pa.bool_()}
    schema = pa.schema([(field.name, numbers.get(str(kinds[field.name]), field.type)) for field in first.schema])
    file = str(folder / "rows.arrow")
    with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for table in itertools.chain([first], tables):
            # Text in a column of numbers, or a fraction in one of whole numbers, is an error of the cast.
            writer.write_table(table.select(schema.names).cast(schema))
    return datasets.Dataset.from_file(file)


def _tables(path: Path, options: Mapping[str, Any]) -> Iterator[pa.Table]:
    with pandas.read_csv(path, chunksize=ROWS, **options) as chunks:
        for chunk in chunks:
            yield pa.Table.from_pandas(chunk, preserve_index=False).replace_schema_metadata(None)


def _kinds(path: Path, options: Mapping[str, Any]) -> dict[str, str | None]:
    """Return column -> "O" for text, "i", "f" or "b" for numbers; None if chunks disagree about it."""
    found: dict[str, set[str]] = {}
    with pandas.read_csv(path, chunksize=ROWS, **options) as chunks:
        for chunk in chunks:
            for column in chunk.columns:
                found.setdefault(column, set()).add(_kind(chunk[column]))
    return {column: _together(kinds) for column, kinds in found.items()}


def _kind(values: pandas.Series) -> str:
    # True, False and empty cells are objects, but no text.
    truth_with_gaps = values.dtype.kind == "O" and pandas.api.types.infer_dtype(values, skipna=True) == "boolean"
    return "?" if truth_with_gaps else values.dtype.kind


def _together(kinds: set[str]) -> str | None:
    """Return the kind of a column whose chunks are of these kinds."""
    if "O" in kinds:
        return "O"
    if kinds <= {"i", "f"}:
        return max(kinds, key="if".index)
    return "b" if kinds == {"b"} else None
