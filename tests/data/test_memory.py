"""Reading many rows takes as much memory as reading few, and reading in chunks gives what reading as a whole does."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.models import WORDS, causal_lm, generative_tokenizer
from support.reading import reading

from hies_export.data import rows as rows_module
from hies_export.data.rows import load_rows
from hies_export.errors import DataError
from hies_export.recipe.sections import Columns


def write(path: Path, count: int) -> Path:
    texts = [" ".join(WORDS[(i * 7 + j) % 10] for j in range(9)) for i in range(count)]
    if path.suffix == ".parquet":
        table = pa.table({"text": texts, "label": [i % 2 for i in range(count)]})
        parquet.write_table(table, path, row_group_size=count)
    elif path.suffix == ".csv":
        path.write_text("text,label\n" + "".join(f"{text},{i % 2}\n" for i, text in enumerate(texts)))
    else:
        path.write_text("".join(json.dumps({"text": text, "label": i % 2}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_samples_hold_no_other_rows(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a.{ending}", 20_000)  # 1 MB of text
    before = pa.total_allocated_bytes()
    some = load_rows(files={"only": path}, split="only", samples=5, shuffle_seed=1)
    assert pa.total_allocated_bytes() - before < 50_000
    every = load_rows(files={"only": path}, split="only", shuffle_seed=1)
    assert pa.total_allocated_bytes() - before > 1_000_000
    assert some.to_list() == every.select(range(5)).to_list()
    assert some.cache_files == every.cache_files == []


def test_packing_takes_as_much_memory_for_many_rows_as_for_few(tmp_path: Path) -> None:
    tokenizer, config = generative_tokenizer(), causal_lm().config

    def peak(count: int) -> int:
        fields = {"columns": Columns(text=("text",)), "config": config, "processor": tokenizer}
        reader = reading("text-generation", **fields, max_length=16, bos=False)
        path = write(tmp_path / f"{count}.jsonl", count)
        tracemalloc.start()
        try:
            blocks = reader.load("train", files={"train": path}, samples=4, shuffle_seed=0)
            assert [len(ids) for ids in blocks["input_ids"]] == [16] * 4
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100)  # what is imported and compiled once
    assert peak(8000) < 1.2 * peak(2000)


TABLES = {
    "whole numbers, then fractions": "a\n1\n2\n3\n4\n2.5\n",
    "numbers, then a word": "a,b\n007,1\n08,2\n9,3\nten,4\n",
    "a missing number": "a,b\n1,x\n2,x\n,x\n4,x\n",
    "a column of missing words, for a while": "a,b\n,1\n,2\n,3\nword,4\n",
    "truth": "a,b\nTrue,1\nFalse,2\nTrue,3\nFalse,4\n",
    "truth with a gap": "a,b\nTrue,1\nFalse,2\n,3\nFalse,4\n",
    "quotes and breaks": 'a,b\n"one, ""two""",1\n"three\nfour",2\nNone,3\nNA,4\n',
    "large numbers": "a,b\n1,1\n18446744073709551615,2\n3,3\n4,4\n",
}


@pytest.mark.parametrize("content", TABLES.values(), ids=TABLES.keys())
def test_csv_in_chunks_is_csv_as_a_whole(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text(content)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(content.encode()))
    read_csv = rows_module._BUILDERS["csv"][1]
    with monkeypatch.context() as patched:
        patched.setattr(rows_module, "_column_types", lambda files, options: None)
        whole = load_rows(files={"only": tmp_path / "a.csv"}, split="only")
    monkeypatch.setattr(rows_module, "_TYPED", 2)
    monkeypatch.setitem(rows_module._BUILDERS, "csv", ("csv", {**read_csv, "chunksize": 2}))
    for name in ("a.csv", "b.csv.gz"):
        chunked = load_rows(files={"only": tmp_path / name}, split="only")
        assert chunked.to_list() == whole.to_list()
        assert chunked.features == whole.features
    # What no chunk can say is read as a whole.
    types = rows_module._column_types([tmp_path / "a.csv"], read_csv)
    assert (types is None) == (content in (TABLES["truth with a gap"], TABLES["large numbers"]))


def test_parts_have_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "a-0.csv").write_text("n,t\n1,x\n2,y\n")
    (tmp_path / "a-1.csv").write_text("t,n\nz,3\n")
    rows = load_rows(files={"only": tmp_path / "a-*.csv"}, split="only")
    assert rows.to_list() == [{"n": 1, "t": "x"}, {"n": 2, "t": "y"}, {"n": 3, "t": "z"}]
    (tmp_path / "a-1.csv").write_text("n,t\n3.5,z\n,7\n")
    rows = load_rows(files={"only": tmp_path / "a-*.csv"}, split="only")
    assert rows["n"][:] == [1.0, 2.0, 3.5, None]
    assert rows["t"][:] == ["x", "y", "z", "7"]
    for content, said in (
        ("n,u\n3,z\n", "u"),
        ("n,t\n1,2,3\n", "Length of header"),
    ):
        (tmp_path / "a-1.csv").write_text(content)
        with pytest.raises(DataError, match=rf"a-\*\.csv must be a readable csv file .*{said}"):
            load_rows(files={"only": tmp_path / "a-*.csv"}, split="only")
