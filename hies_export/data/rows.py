"""Load the rows of one split, of a Hub dataset or of local files, with `datasets`."""

from __future__ import annotations

import csv
import glob
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ..errors import DataError, listed, quoted, root_cause
from ..progress import quiet
from .row_names import number_rows

# Only an empty cell is missing: "None", "NA" and "null" are words that texts contain. The file is read in one chunk,
# because a column's type is inferred chunk by chunk. Without index_col, a row wider than the header shifts all columns.
_DELIMITED = {"na_values": [""], "keep_default_na": False, "chunksize": None, "index_col": False}
_JSON = {"on_mixed_types": None, "parse_agent_traces": False}
# File ending -> the builder of `datasets` and its options.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "jsonl": ("json", _JSON),
    "json": ("json", _JSON),
    "csv": ("csv", _DELIMITED),
    "tsv": ("csv", {**_DELIMITED, "sep": "\t", "quoting": csv.QUOTE_NONE}),
    "parquet": ("parquet", {}),
    "txt": ("text", {"encoding": "utf-8-sig"}),
}


def load_rows(
    *,
    name: str | None = None,
    files: Mapping[str, str | Path] | None = None,
    split: str,
    samples: int | None = None,
    shuffle_seed: int | None = None,
    numbered: bool = False,
) -> datasets.Dataset:
    """Load the rows of one split, from the Hub or from local files.

    Local files are read into memory and their cache is thrown away: a file that changed is never served stale, and
    nothing is left beside the user's files or in the cache of `datasets`.

    Args:
        name: A Hub dataset with its configuration last: `nyu-mll/glue/sst2`, `org/name` or `name`.
        files: Split -> path. Endings: parquet, and with or without `.gz` jsonl, json (a list of objects), csv, tsv
            (quotes are ordinary characters, as in GLUE's files), txt (a row a line, column `text`); or a folder with
            one sub-folder of images per class (columns `image` and `label`). The last part of a path may be a
            pattern: `train-*.parquet` reads all parts in name order. All parts have the column types of the first
            one, and a jsonl file those of its first 10 MB; in csv and tsv only an empty cell is missing.
        split: The split to load, or a slice of it as `datasets` writes it: "train[:80%]", "train[100:200]".
        samples: How many rows; None for all. When there are fewer, all are returned: report `len(rows)`.
        shuffle_seed: Take the rows in a seeded random order, not in file order. The rows of an image folder are
            sorted by class, so there `samples` without a seed takes the first rows of the shuffle with seed 0.
        numbered: Add a column with the number of every row in its file or split, for `row_name`.

    Returns:
        The rows; those of local files are held in memory, but for the images of a folder.

    Raises:
        DataError: not exactly one of name and files; a file, split or file ending that is not known; a file
            that cannot be read; a split without rows; a Hub dataset that does not load.
    """
    if (name is None) == (files is None):
        given = "neither" if name is None else "both"
        raise DataError(f"data must give exactly one of name and files, got {given}")
    if samples is not None and samples < 1:
        raise DataError(f"samples must be at least 1, got {samples}")
    split, bracket, slice_ = split.partition("[")
    if files is None:
        rows, source = _load_hub_split(str(name), split), f"the split {split!r}"
    else:
        _check_split(split, files)
        path = Path(files[split]).expanduser().absolute()
        source = path.name
        if path.is_dir():
            rows = _load_image_folder(path)
            shuffle_seed = 0 if samples and shuffle_seed is None else shuffle_seed
        else:
            rows = _load_files(path)
    if numbered:
        rows = number_rows(rows, source=source)
    if bracket:
        rows = _sliced(rows, split, bracket + slice_)
    if len(rows) == 0:
        raise DataError(f"the split {quoted(split + bracket + slice_)} must have at least one row, but it is empty")
    order: Sequence[int] | np.ndarray = range(len(rows))
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(rows))
    return rows.select(order[:samples], keep_in_memory=True)


def _load_hub_split(name: str, split: str) -> datasets.Dataset:
    parts = name.split("/")
    if len(parts) > 3 or not all(parts) or Path(name).exists():
        raise DataError(
            f"data.name must be a Hub dataset with its configuration last, such as 'nyu-mll/glue/sst2', "
            f"got {name!r}; for files on this machine use data.files"
        )
    repository, configuration = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    try:
        splits = datasets.load_dataset(repository, configuration)
    except Exception as error:  # the Hub, the network, the file formats: each raises its own kind
        raise DataError(
            f"the dataset {name!r} could not be loaded from the Hub ({root_cause(error)}); "
            f"check its name and configuration and the network, or use data.files"
        ) from error
    _check_split(split, splits)
    return splits[split]


def _sliced(rows: datasets.Dataset, split: str, slice_: str) -> datasets.Dataset:
    try:
        (part,) = datasets.ReadInstruction.from_spec(split + slice_).to_absolute({split: len(rows)})
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"a slice of a split must be like train[:80%] or train[100:200], got {quoted(split + slice_)} "
            f"({root_cause(error)})"
        ) from error
    return rows.select(range(part.from_ or 0, len(rows) if part.to is None else part.to))


def _check_split(split: str, splits: Mapping[str, Any]) -> None:
    if split not in splits:
        raise DataError(f"the split must be one of {listed(splits)}, got {quoted(split)}")


def _load_files(path: Path) -> datasets.Dataset:
    parts = [path] if path.is_file() else sorted(part for part in path.parent.glob(path.name) if part.is_file())
    if not parts:
        raise DataError(f"data.files must name files that are there, but there is no {path}")
    ending = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if ending not in _BUILDERS:
        raise DataError(
            f"a data file must end in one of {', '.join(_BUILDERS)}, each but parquet with or without .gz, "
            f"or be a folder of images, got {path}"
        )
    builder, options = _BUILDERS[ending]
    try:
        return _build(builder, [glob.escape(str(part)) for part in parts], **options)
    except Exception as error:  # pandas, pyarrow, gzip: each raises its own kind
        raise DataError(
            f"{path} must be a readable {ending} file with at least one row, but: {root_cause(error)}"
        ) from error


def _load_image_folder(folder: Path) -> datasets.Dataset:
    try:
        return _build("imagefolder", [f"{glob.escape(str(folder))}/*/*"], drop_labels=False)
    except Exception as error:  # as for files
        raise DataError(
            f"an image folder must have one sub-folder of images per class, but {folder} does not load: "
            f"{root_cause(error)}"
        ) from error


def _build(builder: str, patterns: list[str], **options: Any) -> datasets.Dataset:
    with quiet(), tempfile.TemporaryDirectory() as cache:
        # pandas warns so before it drops the surplus cells of rows wider than the header.
        warnings.filterwarnings("error", message="Length of header")
        rows = datasets.load_dataset(
            builder, data_files={"train": patterns}, split="train", cache_dir=cache, keep_in_memory=True, **options
        )
    rows.data.validate(full=True)  # pyarrow reads text that is not UTF-8 without complaint
    return rows
