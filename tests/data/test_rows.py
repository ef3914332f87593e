"""Rows against files written and read by hand."""

import gzip
import json
import os
import tempfile
from unittest.mock import Mock

import datasets
import pandas
import PIL.Image
import pytest

from hies_export.data.rows import load_rows, mapped_rows, take, taken_from
from hies_export.errors import DataError

# Words that naive readers lose: a quote, a comma, a word that looks missing, a line separator, non-ASCII.
TEXTS = ['"quoted", word', "None", "plain", "zwei\u2028Zeilen", "naïve 字"]
RECORDS = [{"text": text, "label": index % 2} for index, text in enumerate(TEXTS)]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows_of(columns, features=None):
    return datasets.Dataset.from_dict(columns, features=features)


def load(path, **options):
    return load_rows(files={"only": path}, split="only", **options)


TABLE = pandas.DataFrame(RECORDS)
# File ending -> the records in this format.
CONTENTS = {
    "jsonl": "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode(),
    "json": json.dumps(RECORDS, indent=1).encode(),
    "csv": TABLE.to_csv(index=False).encode(),
    "tsv": ("text\tlabel\n" + "".join(f"{record['text']}\t{record['label']}\n" for record in RECORDS)).encode(),
    "parquet": TABLE.to_parquet(),
}


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz", "a.parquet", "A.CSV"],
)
def test_every_table_format_gives_the_same_rows(tmp_path, name):
    content = CONTENTS[name.lower().split(".")[1]]
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows = load(tmp_path / name)
    assert rows.to_list() == RECORDS
    assert rows.features["label"].dtype == "int64"


def test_text_file_has_one_row_a_line(tmp_path):
    content = "first\n\nthird \u2028 line\r\nlast".encode()
    for name, written in (("a.txt", content), ("a.txt.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(written)
        assert load(tmp_path / name)["text"][:] == ["first", "", "third \u2028 line", "last"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in (("a.txt", "one\n"), ("a.csv", "text\none\n"), ("a.jsonl", '{"text": "one"}')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert load(tmp_path / name).to_list() == [{"text": "one"}]


def test_column_types_are_those_of_the_whole_file(tmp_path):
    """A score column that is whole numbers for a megabyte, then fractions."""
    path = tmp_path / "scores.csv"
    path.write_text("score,pad\n" + "3,xx\n" * 220_000 + "2.5,xx\n")
    assert path.stat().st_size > 1 << 20
    rows = load(path)
    assert rows.features["score"].dtype == "float64"
    assert rows[len(rows) - 1]["score"] == 2.5
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [{"score": 3}, {"score": 2.5, "late": "column"}])
    assert load(mixed).to_list() == [{"score": 3.0, "late": None}, {"score": 2.5, "late": "column"}]


def test_a_changed_file_is_read_anew(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "old"}])
    stamp = path.stat()
    load(path)
    write_jsonl(path, [{"text": "new"}])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size, same time
    assert load(path)["text"][:] == ["new"]


def test_nothing_is_left_behind_or_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "cache/downloads")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for folder in ("files", "temporary"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "files/a.jsonl.gz"
    path.write_bytes(gzip.compress(CONTENTS["jsonl"]))
    rows = load(path, samples=3)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["a.jsonl.gz", "files", "temporary"]
    path.unlink()
    assert rows.to_list() == RECORDS[:3]
    assert rows.cache_files == []
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(DataError, match="bad.csv"):
        load(tmp_path / "bad.csv")
    assert capfd.readouterr() == ("", "")


def test_parts_are_read_in_name_order_with_the_column_types_of_the_first(tmp_path):
    write_jsonl(tmp_path / "train-1.jsonl", [{"n": 2}, {"n": 3}])
    write_jsonl(tmp_path / "train-0.jsonl", [{"n": 0}, {"n": 1}])
    assert load(tmp_path / "train-*.jsonl")["n"][:] == [0, 1, 2, 3]
    write_jsonl(tmp_path / "train-1.jsonl", [{"n": 2}, {"n": 3.5}])
    with pytest.raises(DataError, match=r"train-\*\.jsonl must be a readable jsonl file .*3\.5.* truncated"):
        load(tmp_path / "train-*.jsonl")


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path):
    folder = tmp_path / "run [1]"
    folder.mkdir()
    assert load(write_jsonl(folder / "a[2].jsonl", [{"n": 1}]))["n"][:] == [1]
    assert len(load(write_image_folder(folder / "images [3]"))) == 20


def test_samples_are_the_first_rows_or_the_first_of_a_seeded_order(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"n": n} for n in range(50)])
    assert load(path, samples=5)["n"][:] == [0, 1, 2, 3, 4]
    few, all_rows = load(path, samples=8, shuffle_seed=3)["n"][:], load(path, shuffle_seed=3)["n"][:]
    assert all_rows[:8] == few
    assert sorted(all_rows) == list(range(50)) != all_rows
    assert few != load(path, samples=8, shuffle_seed=4)["n"][:]
    for samples in (8, 60, None):
        drawn, ordered = (load(path, samples=samples, shuffle_seed=3, in_order=order) for order in (False, True))
        assert ordered["n"][:] == sorted(drawn["n"][:])
        assert len(drawn) == min(samples or 50, 50)
        assert taken_from(drawn) == taken_from(ordered) == 50
    with mapped_rows(files={"train": path}, split="train[10:30]") as part:
        assert taken_from(take(part, samples=3, shuffle_seed=None)) == 20


def write_image_folder(folder, *, classes=("cat", "dog"), each=10):
    for class_index, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            PIL.Image.new("RGB", (4, 4), (class_index * 100, index, 0)).save(folder / name / f"{index:02}.png")
    (folder / classes[0] / "notes.md").write_text("not an image")
    return folder


def test_image_folder(tmp_path):
    folder = write_image_folder(tmp_path / "images")
    rows = load(folder)
    assert rows.features["label"].names == ["cat", "dog"]
    assert rows["label"][:] == [0] * 10 + [1] * 10
    pixels = [image.getpixel((0, 0)) for image in rows["image"]]
    assert pixels == [(label * 100, index, 0) for label in (0, 1) for index in range(10)]
    first = load(folder, samples=8)["label"][:]
    assert set(first) == {0, 1}  # the files are in the order of their classes
    assert first == load(folder, samples=8, shuffle_seed=0)["label"][:]
    assert load(write_image_folder(tmp_path / "one", classes=("test",))).features["label"].names == ["test"]


def test_image_folder_with_labels_in_a_file(tmp_path):
    for index in range(4):
        PIL.Image.new("RGB", (4, 4), (index, 0, 0)).save(tmp_path / f"{index}.PNG")
    named = [{"file_name": f"{index}.PNG", "label": ("dog", "cat")[index % 2]} for index in (2, 0, 3, 1)]
    write_jsonl(tmp_path / "metadata.jsonl", named)
    rows = load(tmp_path)
    found = {image.getpixel((0, 0))[0]: label for image, label in zip(rows["image"], rows["label"], strict=True)}
    assert found == {0: "dog", 1: "cat", 2: "dog", 3: "cat"}


def test_hub_names(monkeypatch):
    loads = Mock(return_value=datasets.DatasetDict(validation=rows_of({"n": [1, 2, 3]})))
    monkeypatch.setattr(datasets, "load_dataset", loads)
    for name, asked in (("nyu-mll/glue/sst2", ("nyu-mll/glue", "sst2")), ("org/name", ("org/name", None))):
        assert load_rows(name=name, split="validation", samples=2)["n"][:] == [1, 2]
        loads.assert_called_with(*asked)
    with pytest.raises(DataError, match="split must be one of validation, got 'test'"):
        load_rows(name="imdb", split="test")
    loads.side_effect = ConnectionError("no route")
    with pytest.raises(DataError, match=r"'org/name' could not be loaded .*ConnectionError: no route"):
        load_rows(name="org/name", split="train")


@pytest.mark.parametrize("name", ["a/b/c/d", "a//b", "/tmp", "my/data"])
def test_hub_names_are_not_paths(name, tmp_path, monkeypatch):
    (tmp_path / "my/data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"must be a Hub dataset .* use data\.files"):
        load_rows(name=name, split="train")


def test_what_names_no_file_is_refused(tmp_path):
    other = write_jsonl(tmp_path / "a.xlsx", [{"n": 1}])
    with pytest.raises(DataError, match="split must be one of train, dev, got 'test'"):
        load_rows(files={"train": other, "dev": other}, split="test")
    with pytest.raises(DataError, match=r"there is no .*missing\.jsonl"):
        load(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match=r"one of jsonl, json, csv, tsv, parquet, txt, .* got .*a\.xlsx"):
        load(other)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bad.jsonl", b'{"a": 1}\n{"a":'),
        ("bad.json", b'[{"a": 1},'),
        ("latin.jsonl", b'{"a": "na\xefve"}'),
        ("mixed.jsonl", b'{"a": 1}\n{"a": "one"}'),
        ("doccano.jsonl", b'{"text": "ab c d", "label": [[0, 3, "name"], [4, 5, "name"]]}'),
        ("bad.csv", b"a,b\n1,2\n1,2,3\n"),
        ("wide.csv", b"a,b\n1,2,3\n"),
        ("bad.parquet", b"not parquet"),
        ("bad.txt", b"\xff\xfe\xff"),
        ("plain.txt.gz", b"not gzipped"),
        ("cut.txt.gz", gzip.compress(b"text " * 100, mtime=0)[:-12]),
        ("damaged.txt.gz", gzip.compress(b"text", mtime=0)[:10] + b"\xff" * 300),
    ],
)
def test_unreadable_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} must be a readable {name.split('.')[1]} file .*but: \w+: "):
        load(tmp_path / name)


@pytest.mark.parametrize("part", ["[80%:]", "[1:]", "[:0]"])
def test_a_slice_without_rows_is_refused(tmp_path, part):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match=r"the split 'train\[.*\]' must have at least one row, but it is empty"):
        load_rows(files={"train": tmp_path / "a.jsonl"}, split=f"train{part}")


@pytest.mark.parametrize("together", [None, "query"])
def test_shuffled_slices_are_of_all_rows(tmp_path, together):
    rows = [{"n": n, "query": None if n % 5 == 4 else n // 10, "label": n // 50} for n in range(100)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    how = {"files": {"train": tmp_path / "a.jsonl"}, "shuffled": True, "together": together}
    first, last = (load_rows(split=f"train{part}", **how).to_list() for part in ("[:80%]", "[80%:]"))
    assert sorted(first + last, key=lambda row: row["n"]) == rows
    assert {row["label"] for row in last} == {0, 1}
    # `take` puts rows of a query beside each other.
    assert together or [row["n"] for row in last] == sorted(row["n"] for row in last)
    assert (12 if together else 20) <= len(last) <= 20
    shared = {row["query"] for row in first} & {row["query"] for row in last} - {None}
    assert bool(shared) == (together is None)


def test_files_without_rows_and_folders_without_images(tmp_path):
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "header.csv").write_bytes(b"text,label\n")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(DataError, match=rf"{path.name} must be a readable \w+ file with at least one row, but"):
            load(path)
    for name in ("a.jsonl", "header.csv"):
        with pytest.raises(DataError, match="but: it has none$"):
            load(tmp_path / name)
    rows_of({"text": ["a"]}).select([]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="must .* at least one row"):
        load(tmp_path / "a.parquet")
    (tmp_path / "folder" / "cat").mkdir(parents=True)
    match = "of images per class, or a metadata.csv .*, but .*: it has none; for other data name the files"
    with pytest.raises(DataError, match=match):
        load(tmp_path / "folder")


def test_what_save_to_disk_wrote_is_read(tmp_path):
    rows = datasets.Dataset.from_list(RECORDS)
    rows.with_format("torch").save_to_disk(tmp_path / "rows")
    datasets.DatasetDict(train=rows.select([0, 1]), test=rows.select([2, 3, 4])).save_to_disk(tmp_path / "whole")
    assert load(tmp_path / "rows").to_list() == RECORDS
    assert load(tmp_path / "whole" / "train").to_list() == RECORDS[:2]
    files = {split: tmp_path / "whole" for split in ("train", "test", "validation")}
    assert load_rows(files=files, split="test[1:]").to_list() == RECORDS[3:]
    with pytest.raises(DataError, match="must hold the split 'validation' of data.files, but has train, test"):
        load_rows(files=files, split="validation")
    (tmp_path / "rows" / "state.json").write_text("{")
    with pytest.raises(DataError, match="must be a folder as save_to_disk writes it, but it does not load: "):
        load(tmp_path / "rows")


@pytest.mark.parametrize("kind", ["folder", "parquet", "disk"])
@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (["a", "b", "c"], ["b", "c"], ["a", "b", "c"]),
        (["a", "b"], ["b", "c"], ["a", "b", "c"]),
        (["c", "a", "b"], ["c", "b"], ["c", "a", "b"]),
        (["b", "a"], ["a", "b"], None),
        (["c", "a"], ["b", "c"], None),
    ],
)
def test_splits_that_number_their_classes_apart_are_numbered_alike(tmp_path, kind, first, second, together):
    if kind == "folder" and first != sorted(first):
        pytest.skip("folders are numbered by their names")
    named = {"train": first, "validation": second}
    files = {split: tmp_path / (f"{split}.parquet" if kind == "parquet" else split) for split in named}
    for split, path in files.items():
        if kind == "folder":
            write_image_folder(path, classes=(*named[split], ".hidden"), each=1)
            continue
        names, classes = named[split], datasets.ClassLabel(names=named[split])
        features = datasets.Features({"text": datasets.Value("string"), "label": classes})
        rows = rows_of({"text": names, "label": list(range(len(names)))}, features)
        rows.to_parquet(path) if kind == "parquet" else rows.save_to_disk(path)
    for split, names in named.items():
        rows = load_rows(files=files, split=split)
        feature, labels = rows.features["label"], rows["label"][:]
        if together:
            assert feature.names == together
            labels = [together[number] for number in labels]
        assert labels == names


def test_hidden_labels_and_lists_of_classes_are_numbered_alike_too(tmp_path):
    names = {"train": ["O", "A", "B"], "test": ["O", "B"]}
    files = {split: tmp_path / f"{split}.parquet" for split in names}
    for split, of_split in names.items():
        classes = datasets.ClassLabel(names=of_split)
        features = datasets.Features({"tags": datasets.List(classes), "label": classes})
        rows_of({"tags": [[0, 1], []], "label": [-1, 1]}, features).to_parquet(files[split])
    rows = load_rows(files=files, split="test")
    assert (rows["tags"][:], rows["label"][:]) == ([[0, 2], []], [-1, 2])
    assert rows.features["tags"].feature.names == ["O", "A", "B"]
