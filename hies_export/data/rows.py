"""Load the rows of one split, of a Hub dataset or of local files, with `datasets`.

Rows stay on disk until some of them are taken, so that memory does not grow with the number of rows; csv and tsv files
are read whole first. Rows are drawn, shuffled, sliced and repeated before they are read. A column keeps their numbers,
so that an error names a row that its user can look up.
"""

from __future__ import annotations

import csv
import glob
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, listed, quoted, refusing, root_cause
from ..late import datasets, pa, pandas, parquet
from ..progress import quiet

# Only empty cells are missing values: "None", "NA" and "null" are words that texts contain. Without index_col, a row
# wider than the header shifts all columns. A file is read whole, so that its columns have one type each.
_DELIMITED = {"na_values": [""], "keep_default_na": False, "index_col": False, "chunksize": None}
_JSON = {"on_mixed_types": None, "parse_agent_traces": False}
# File ending -> the builder of `datasets` and its options.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "jsonl": ("json", _JSON),
    "json": ("json", _JSON),
    "csv": ("csv", _DELIMITED),
    "tsv": ("csv", {**_DELIMITED, "sep": "\t", "quoting": csv.QUOTE_NONE}),
    "parquet": ("parquet", {"batch_size": 10_000}),
    "txt": ("text", {"encoding": "utf-8-sig"}),
}

# Rows that are read or copied at once; with images, they are a few hundred megabytes.
_TAKEN = 1000
# The column's name contains the source of the rows. No data set or prompt has such a column.
_NUMBERS = "hies_export: row of "


def load_rows(
    *,
    split: str,
    files: Mapping[str, str | Path] | None = None,
    samples: int | None = None,
    shuffle_seed: int | None = None,
    in_order: bool = False,
    together: str | None = None,
    **source: Any,
) -> datasets.Dataset:
    """Load the rows of one split as `mapped_rows`, which takes the `source`, and `take` some.

    Only the returned rows are held in memory. The rows of an image folder are sorted by class, so there `samples`
    without a seed uses seed 0.
    """
    with mapped_rows(split=split, files=files, together=together, **source) as rows:
        path = None if files is None else Path(files[whole_split(split)]).expanduser()
        is_image_folder = path is not None and path.is_dir() and not _is_saved(path)
        if is_image_folder and samples and shuffle_seed is None:
            shuffle_seed = 0
        return take(rows, samples=samples, shuffle_seed=shuffle_seed, in_order=in_order, together=together)


@contextmanager
def mapped_rows(
    *,
    split: str,
    name: str | None = None,
    files: Mapping[str, str | Path] | None = None,
    shuffled: bool = False,
    together: str | None = None,
    numbered: bool = False,
) -> Iterator[datasets.Dataset]:
    """Yield the rows of one split (or a slice: "train[:80%]"), of files or, without them, of a Hub dataset.

    Rows stay on disk, and memory holds only what was read. The cache of local files is deleted afterwards: a changed
    file is never read from an old cache, and nothing is left beside the user's files or in the cache of `datasets`.

    Args:
        split: If it is a slice, it keeps the order of the file.
        name: The Hub dataset and its configuration: `nyu-mll/glue/sst2`.
        files: Split -> path: of json (a list of objects), jsonl, csv, tsv (quotes are ordinary characters, as in GLUE's
            files) and txt (a row a line, column `text`), each with or without `.gz`; parquet; a folder with one
            sub-folder of images per class (columns `image` and `label`) or with a metadata.csv, as for `datasets`; or
            one that `save_to_disk` wrote, of a data set with this split or of its rows alone. The last part of a path
            may be a pattern: `train-*.parquet` reads all parts in name order. All parts have the column types of the
            first one, and a jsonl file those of its first 10 MB. In csv and tsv only an empty cell is missing.
        shuffled: Whether a slice is of the rows in a random order, which is the same for every run.
        together: A column; of rows with the same value in it, a shuffled slice has all or none.
        numbered: Whether the rows get a column of their numbers, see `number_rows`.
    """
    wanted = whole_split(split)
    # Windows does not delete files that are mapped.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        splits: Mapping[str, Any] = hub_splits(str(name)) if files is None else files
        if wanted not in splits:
            raise DataError(f"the split must be one of {listed(splits)}, got {quoted(wanted)}")
        if files is None:
            rows, source = splits[wanted], f"the split {wanted!r}"
        else:
            path = Path(files[wanted]).expanduser().absolute()
            if _is_saved(path):
                rows = _load_saved(path, wanted)
            else:
                rows = _load_image_folder(path, cache) if path.is_dir() else _load_files(path, cache)
            rows, source = _numbered_alike(rows, files), path.name
        if numbered:
            rows = number_rows(rows, source=source)
        if split != wanted:
            must = f"a slice of a split must be like train[:80%] or train[100:200], got {quoted(split)}"
            with refusing(must, kind=DataError):
                (bounds,) = datasets.ReadInstruction.from_spec(split).to_absolute({wanted: len(rows)})
            places = range(len(rows))[bounds.from_ : bounds.to]
            chosen = _rows_at(places, rows, together) if shuffled else places
            # An empty range that begins behind the last row is an IndexError in `datasets`.
            rows = rows.select(chosen or [])
        if len(rows) == 0:
            raise DataError(f"the split {quoted(split)} must have at least one row, but it is empty")
        try:
            yield rows
        finally:
            # Arrow keeps what it has freed: 300 MB of a parquet file of a million rows.
            pa.default_memory_pool().release_unused()


def take(
    rows: datasets.Dataset,
    *,
    samples: int | None = None,
    shuffle_seed: int | None = None,
    in_order: bool = False,
    together: str | None = None,
) -> datasets.Dataset:
    """Return the first `samples` rows, or the first of a seeded random order, copied into memory without the others.

    `taken_from` of the result is how many rows there were. With `in_order`, drawn rows keep their original order. Rows
    of the same value in the column `together` follow each other and are all taken or none, so that there may be more
    rows than `samples`; rows without a value come last.
    """
    order: Sequence[int] | np.ndarray = range(len(rows))
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(rows))
    if together is not None and has_one_value(rows, together):  # what reads the rows refuses other columns
        order, values = side_by_side(np.asarray(order), common_values(rows, together))
        samples = None if samples is None else run_end(values, samples)
    order, arrow = order[:samples], rows.with_format("arrow")
    order = np.sort(order) if in_order else order
    tables = [arrow[order[start : start + _TAKEN]] for start in range(0, len(order), _TAKEN)]
    # These may be views of the file or of the whole table, and `take` copies.
    copies = [table.take(pa.array(np.arange(len(table)))) for table in tables]
    info, split = rows.info.copy(), str(rows.split)
    info.splits = datasets.SplitDict({split: datasets.SplitInfo(split, num_examples=len(rows))})
    return datasets.Dataset(datasets.table.InMemoryTable(pa.concat_tables(copies)), info=info, split=rows.split)


def _rows_at(places: range, rows: datasets.Dataset, together: str | None) -> list[int]:
    """Return the numbers of the rows at places of a random order, sorted; see `shuffled` of `mapped_rows`."""
    order = fixed_permutation(len(rows))
    if together is not None and has_one_value(rows, together):
        # A row without a value is like no other.
        distinct = [object() if value is None else value for value in common_values(rows, together)]
        order, values = side_by_side(order, distinct)
        places = range(run_end(values, places.start), run_end(values, places.stop))
    return sorted(order[places.start : places.stop].tolist())


def fixed_permutation(count: int) -> np.ndarray:
    """Return a random permutation of `count` numbers, (count,) int64, which is the same in every run."""
    return np.random.default_rng(0).permutation(count)


def side_by_side(order: np.ndarray, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return an order of rows, (rows,), changed so that those of one value stand together, and the values in it.

    `values` are by the number of a row. Rows of one value move to the first of them, those without a value to the end.
    """
    ordered = np.array(values, dtype=object)[order]
    numbers = pandas.factorize(ordered)[0]  # of each row's value: from 0 as values first appear, -1 for none
    together = np.argsort(np.where(numbers < 0, len(order), numbers), kind="stable")
    return order[together], ordered[together]


def has_one_value(rows: datasets.Dataset, column: str) -> bool:
    """Return whether rows have a column, and it holds single values rather than lists."""
    return isinstance(rows.features.get(column), (datasets.Value, datasets.ClassLabel))


def common_values(rows: datasets.Dataset, column: str) -> list[Any]:
    """Return the values of a column, with None in place of blank text."""
    return [None if isinstance(value, str) and not value.strip() else value for value in column_values(rows, column)]


def run_end(values: Sequence[Any] | np.ndarray, end: int) -> int:
    """Return the first index from `end` on that splits no run of equal values; values that are None are a run each."""
    while 0 < end < len(values) and values[end] is not None and values[end] == values[end - 1]:
        end += 1
    return min(end, len(values))


def taken_from(rows: datasets.Dataset) -> int:
    """Return how many rows `take` chose these from."""
    return int(rows.info.splits.total_num_examples)  # where `take` noted it


def column_values(rows: datasets.Dataset, column: str) -> Iterator[Any]:
    """Yield the values of a column, reading `_TAKEN` rows at a time."""
    only = rows.select_columns(column)  # reading a row decodes all its columns
    for start in range(0, len(rows), _TAKEN):
        yield from only[start : start + _TAKEN][column]


def number_rows(rows: datasets.Dataset, *, source: str) -> datasets.Dataset:
    """Return the rows with a column of their numbers from 0, whose name has their source, such as "train.jsonl"."""
    return rows.add_column(_NUMBERS + source, np.arange(len(rows)))


def row_name(rows: datasets.Dataset, row: int) -> str:
    """Return what an error calls a row: "row 30 of train.jsonl (from 0)", or "row 3 (from 0)" if it has no number."""
    for column in rows.column_names:
        if column.startswith(_NUMBERS):
            return f"row {rows[column][row]} of {column.removeprefix(_NUMBERS)} (from 0)"
    return f"row {row} (from 0)"


def own_columns(rows: datasets.Dataset) -> list[str]:
    """Return the names of all columns but that of row numbers."""
    return [column for column in rows.column_names if not column.startswith(_NUMBERS)]


def hub_splits(name: str) -> Mapping[str, datasets.Dataset]:
    """Load the splits of a Hub data set; `name` ends in the configuration, see `mapped_rows`."""
    parts = name.split("/")
    if len(parts) > 3 or not all(parts) or Path(name).exists():
        raise DataError(
            f"data.name must be a Hub dataset with its configuration last, such as 'nyu-mll/glue/sst2', "
            f"got {name!r}; for files on this machine use data.files"
        )
    repository, configuration = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    remedy = "check its name and configuration and the network, or use data.files"
    with refusing(f"the dataset {name!r} could not be loaded from the Hub", remedy, DataError):
        splits: Mapping[str, datasets.Dataset] = datasets.load_dataset(repository, configuration)
    return splits


def _files_of(path: Path) -> list[Path]:
    """Return the files that a path stands for, in the order of their names; its last part may be a glob pattern."""
    return [path] if path.is_file() else sorted(file for file in path.parent.glob(path.name) if file.is_file())


def _load_files(path: Path, cache: str) -> datasets.Dataset:
    """Return the rows of the files that a path stands for, by the ending of their names."""
    files = _files_of(path)
    if not files:
        raise DataError(f"a data file must be there, but there is no {path}; check its name")
    ending = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if ending not in _BUILDERS:
        raise DataError(
            f"a data file must end in one of {', '.join(_BUILDERS)}, each but parquet with or without .gz, "
            f"or be a folder of images, got {path}"
        )
    builder, options = _BUILDERS[ending]
    if builder == "parquet":
        import pyarrow.dataset

        # By default, a row group is read as a whole, and many files have only one.
        scan = pyarrow.dataset.ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
        options = {**options, "fragment_scan_options": scan}
    try:
        return _build(builder, [glob.escape(str(file)) for file in files], cache, **options)
    except Exception as error:  # pandas, pyarrow, gzip: each raises its own kind
        raise DataError(
            f"{path} must be a readable {ending} file with at least one row, but: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """Return why data did not load: "it has none" for no rows, which `datasets` does not say, or its own error."""
    cause = root_cause(error)
    return "it has none" if cause == "StopIteration" or "corresponds to no data" in cause else cause


def _is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` wrote a folder; any other folder is one of images."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _load_saved(path: Path, split: str) -> datasets.Dataset:
    """Return the rows of a split that `save_to_disk` wrote, alone or with others."""
    must = f"{path} must be a folder as save_to_disk writes it, but it does not load"
    with refusing(must, "save the data set again", DataError), quiet():
        saved = datasets.load_from_disk(path)
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(f"{path} must hold the split {quoted(split)} of data.files, but has {listed(saved)}")
        saved = saved[split]
    return saved.with_format(None)


def _numbered_alike(rows: datasets.Dataset, files: Mapping[str, str | Path]) -> datasets.Dataset:
    """Return rows with classes numbered as in all splits of `files`, or named, as text, where no numbering fits all.

    Numbers differ between splits if a folder of images lacks a class, or if a split numbered its classes by itself.
    """
    if not any(map(_class_names, rows.features.values())):
        return rows
    of_splits = [_stored_features(Path(file).expanduser().absolute(), split) for split, file in files.items()]
    columns = rows.column_names
    for column in columns:
        own = _class_names(rows.features[column])
        if not own:
            continue
        of_all = [_class_names(features.get(column)) for features in of_splits]
        merged = _one_numbering([own, *(names for names in of_all if names)])
        if merged == own:
            continue
        if merged:
            renumbered: dict[int, Any] = {-1: -1, **{n: merged.index(name) for n, name in enumerate(own)}}  # -1: hidden
            classes: Any = datasets.ClassLabel(names=merged)
        else:
            renumbered, classes = dict(enumerate(own)), datasets.Value("string")
        values = [
            [renumbered.get(label) for label in value] if isinstance(value, list) else renumbered.get(value)
            for value in column_values(rows, column)
        ]
        feature = datasets.List(classes) if is_list(rows.features[column]) else classes
        with quiet():
            rows = rows.remove_columns(column).add_column(column, values, feature=feature)
    return rows.select_columns(columns)


def is_list(feature: Any) -> bool:
    """Return whether a column holds lists."""
    return isinstance(feature, (datasets.List, datasets.LargeList))


def item_feature(feature: Any) -> Any:
    """Return the feature of the items of a column of lists; that of the column itself if it holds no lists."""
    return feature.feature if is_list(feature) else feature


def _class_names(feature: Any) -> list[str] | None:
    """Return the names of the classes that a column holds, or holds lists of; None for other columns."""
    inner = item_feature(feature)
    return list(inner.names) if isinstance(inner, datasets.ClassLabel) else None


def _one_numbering(lists: Sequence[Sequence[str]]) -> list[str] | None:
    """Return the classes of several lists in one order that every list keeps; None if there is none.

    It is that of a list with all classes, else the sorted order, as of image folders and `class_encode_column`.
    """
    longest, names = max(lists, key=len), set().union(*lists)
    order = list(longest) if names == set(longest) else sorted(names)
    is_kept = all(list(classes) == [name for name in order if name in classes] for classes in lists)
    return order if is_kept else None


def _stored_features(path: Path, split: str) -> Mapping[str, Any]:
    """Return the features of a split by column, as far as its files say them without being read whole; else none."""
    if _is_saved(path):
        return _load_saved(path, split).features
    if path.is_dir():
        from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

        images = (file for file in path.glob("[!.]*/[!.]*") if file.suffix.lower() in ImageFolder.EXTENSIONS)
        named = {image.parent.name for image in images if not image.parent.name.startswith("__")}  # as `datasets` does
        return {"label": datasets.ClassLabel(names=sorted(named))}
    if path.suffix.lower() == ".parquet":
        files = _files_of(path)
        with suppress(Exception):  # reading the split itself says what is wrong with it, or that there is no file
            return datasets.Features.from_arrow_schema(parquet.read_schema(files[0]))
    return {}


def _load_image_folder(folder: Path, cache: str) -> datasets.Dataset:
    """Return the images of a folder, labelled by its metadata file, or without one by their sub-folders."""
    described = any((folder / f"metadata.{ending}").is_file() for ending in ("csv", "jsonl", "parquet"))
    # By default `datasets` gives no labels where there is only one sub-folder.
    pattern, options = ("**", {}) if described else ("*/*", {"drop_labels": False})
    try:
        return _build("imagefolder", [f"{glob.escape(str(folder))}/{pattern}"], cache, **options)
    except Exception as error:  # readers of images and of metadata each raise their own kind
        raise DataError(
            "an image folder must have one sub-folder of images per class, or a metadata.csv with columns file_name "
            f"and label, but {folder} does not load: {_reason(error)}; for other data name the files, such as "
            f"{folder / 'train-*.parquet'}"
        ) from error


def _build(builder: str, patterns: list[str], cache: str, **options: Any) -> datasets.Dataset:
    """Return the rows that a builder of `datasets` reads, mapped from an Arrow file in the folder `cache`."""
    with quiet():
        # pandas warns so before it drops the surplus cells of rows wider than the header.
        warnings.filterwarnings("error", message="Length of header")
        rows = datasets.load_dataset(
            builder, data_files={"train": patterns}, split="train", cache_dir=cache, keep_in_memory=False, **options
        )
    for file in rows.cache_files:
        # pyarrow reads text that is not UTF-8 without complaint. The file is opened again for this, as every page of
        # the mapped one that is touched would stay in memory.
        with pa.OSFile(file["filename"]) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                batch.validate(full=True)
    return rows


def whole_split(split: str) -> str:
    """Return the split that a slice is of: "train" for "train[:80%]"."""
    return split.partition("[")[0]


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Which rows units were scored on, plans were judged on (held out), and metrics were measured on.

    `labels` are "data" or the model's own "predictions"; `evaluation_of` is how many samples the split has; without
    labels (`evaluation_labelled`), metrics compare both models with the dense model's own predictions; held-out rows
    are `further` ones if they come from the calibration split; `name` is on the Hub, and `fingerprint` is that of the
    calibration batches.
    """

    labels: str
    calibration_samples: int
    compensation_samples: int
    evaluation_samples: int
    evaluation_of: int
    evaluation_split: str
    evaluation_labelled: bool = True
    held_out_samples: int
    held_out_split: str
    held_out_further: bool
    name: str | None
    file: str | None
    fingerprint: str

    @property
    def alike(self) -> bool:
        """Whether held-out and evaluated rows are of one split, or of slices of one."""
        return whole_split(self.held_out_split) == whole_split(self.evaluation_split)

    @property
    def apart(self) -> bool:
        """Whether no held-out row is evaluated; those of a recipe's `held_out` are left out of the evaluated rows."""
        held_out, evaluated = self.held_out_split, self.evaluation_split
        # Two different slices of one split are taken to share no rows.
        may_overlap = self.alike and (held_out == evaluated or "[" not in held_out or "[" not in evaluated)
        return not (self.held_out_further and may_overlap)
