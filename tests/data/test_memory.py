"""Reading many rows takes as much memory as reading few, and reading in chunks gives what reading as a whole does."""

import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from support.models import WORDS, causal_lm, generative_tokenizer
from support.reading import reading

from hies_export.data.rows import load_rows
from hies_export.recipe.sections import Columns


def write(path: Path, count: int) -> Path:
    texts = [" ".join(WORDS[(i * 7 + j) % 10] for j in range(9)) for i in range(count)]
    rows = datasets.Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(count)]})
    kind = path.suffix.removeprefix(".").removesuffix("l")
    getattr(rows, f"to_{kind}")(path, batch_size=count)  # one row group, as many files have
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
