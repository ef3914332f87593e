"""Measure whether memory stays flat: over rows of data, over plans, and per token of one long calibration sample.

python bench/load.py [--tables rows plans tokens] [--rows 10000 1000000] [--plans 10000] [--tokens 4096 8192 16384]

Each line of the first and the third table is a process of its own. Memory is what Linux counts for the process: `after`
and `peak` are resident memory with mapped files, `anonymous` is the peak without them, which the system cannot drop.
  rows    `Task.load` draws 256 samples at random, for a classifier, and packed into blocks for a language model
  plans   random scores -> `select_units` -> the masked model's predictions -> judgement, in one process
  tokens  `collect_statistics` (HIS and entropy) on one sample, LLaMA of two layers, random weights
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
from rich.console import Console
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hies_export import Constraints, Scores, collect_statistics, find_attention, select_units
from hies_export.evaluate.judge import Judge
from hies_export.pipeline.stages import predict_pruned
from hies_export.recipe.sections import Columns
from hies_export.report.tables import PlainTable
from hies_export.tasks import TASKS

SAMPLES = 256
WORDS = [f"word{number}" for number in range(1000)]


def memory(field: str) -> float:
    """Return a field of /proc/self/status in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status must have {field}; this needs Linux")


@contextlib.contextmanager
def watched(found: dict[str, float]) -> Iterator[None]:
    """Write peaks and seconds of the block, and memory before and after it, into `found`, in MB and seconds."""
    gc.collect()
    found |= {"before": memory("VmRSS"), "anonymous": memory("RssAnon")}
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is there now
    done, started = threading.Event(), time.perf_counter()

    def watch() -> None:
        while not done.wait(0.005):
            found["anonymous"] = max(found["anonymous"], memory("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found["seconds"] = time.perf_counter() - started
        found["peak"] = memory("VmHWM")
        gc.collect()
        found["after"] = memory("VmRSS")


def write_rows(path: Path, count: int) -> None:
    """Write rows of a text of ten to twenty words and a label, with little memory."""
    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=draw.randint(10, 20))) for _ in range(count))
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {"text": list(texts), "label": [number % 2 for number in range(count)]}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return
    with path.open("w") as file:
        file.write("text,label\n" if path.suffix == ".csv" else "")
        for number, text in enumerate(texts):
            row = f"{text},{number % 2}" if path.suffix == ".csv" else json.dumps({"text": text, "label": number % 2})
            file.write(row + "\n")


def tokenizer() -> PreTrainedTokenizerFast:
    numbers = {word: number for number, word in enumerate(["<pad>", "<unk>", "</s>", *WORDS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=512
    )


def rows_case(task: str, file: str) -> dict[str, float]:
    """Draw samples of a file for a task."""
    config = BertConfig(num_labels=2) if task == "text-classification" else LlamaConfig(vocab_size=1003, pad_token_id=0)
    columns = Columns(text=("text",), label="label" if task == "text-classification" else None, max_length=128)
    found: dict[str, float] = {}
    with watched(found):
        reading = TASKS[task](config).to_read(columns, tokenizer())
        samples = reading.load("train", files={"train": Path(file)}, samples=SAMPLES, shuffle_seed=0)
        batches = reading.read(samples, size=32)
    found["samples"] = sum(len(batch["input_ids"]) for batch in batches)
    return found


def tokens_case(tokens: str) -> dict[str, float]:
    """Collect statistics on one sample of so many tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=int(tokens),
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(0, 256, (1, int(tokens)))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    modules = find_attention(model, {key: value[:, :8] for key, value in batch.items()})
    found: dict[str, float] = {}
    with watched(found):
        collect_statistics(model, [batch], modules)
    return found


def run_case(*arguments: object) -> dict[str, float]:
    """Run a case in a process of its own."""
    command = [sys.executable, __file__, "--case", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_table(counts: list[int], console: Console) -> None:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for task, ending in (
            *(("text-classification", ending) for ending in ("jsonl", "csv", "parquet")),
            ("text-generation", "jsonl"),
        ):
            first: dict[str, float] = {}
            for count in counts:
                path = Path(folder) / f"{count}.{ending}"
                if not path.exists():
                    write_rows(path, count)
                found = run_case("rows", task, path)
                first = first or found
                numbers = [
                    f"{found[name]:.0f} ({found[name] / first[name]:.2f})" for name in ("after", "anonymous", "peak")
                ]
                lines.append(
                    (task, ending, f"{count:,}", f"{found['samples']:.0f}", *numbers, f"{found['seconds']:.1f}")
                )
    header = ("task", "file", "rows", "samples", "after, MB", "anonymous, MB", "peak, MB", "seconds")
    console.print(PlainTable(header, lines))


def plans_table(plans: int, console: Console) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, intermediate_size=64, num_labels=3
    )
    model = BertForSequenceClassification(config).eval().requires_grad_(False)
    batch = {"input_ids": torch.randint(0, 100, (8, 10)), "attention_mask": torch.ones(8, 10, dtype=torch.int64)}
    sites = find_attention(model, batch)
    batches = [batch | {"labels": torch.arange(8) % 3}]
    judge = Judge.on(model, batches, metrics=("accuracy",))
    lines, started = [], time.perf_counter()
    marks = sorted({max(1, plans // 100), plans // 10, plans // 4, plans // 2, 3 * plans // 4, plans})
    for number in range(1, plans + 1):
        scores = Scores("random", {}, {site.name: torch.rand(site.units).double() for site in sites})
        selection = select_units(scores, sites, heads=0.5, constraints=Constraints())
        judge.judgement(predict_pruned(model, selection, sites, batches))
        if number in marks:
            gc.collect()
            objects = len(gc.get_objects())
            lines.append(
                (f"{number:,}", f"{memory('VmRSS'):.1f}", f"{objects:,}", f"{time.perf_counter() - started:.0f}")
            )
    console.print(PlainTable(("plans", "resident, MB", "Python's objects", "seconds"), lines))


def tokens_table(lengths: list[int], console: Console) -> None:
    lines = []
    for length in lengths:
        found = run_case("tokens", length)
        grown = found["peak"] - found["before"]
        lines.append((f"{length:,}", f"{grown:.0f}", f"{1024 * grown / length:.1f}", f"{found['seconds']:.1f}"))
    console.print(PlainTable(("tokens", "peak over before, MB", "KB per token", "seconds"), lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=("rows", "plans", "tokens"), default=["rows", "plans", "tokens"])
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 1_000_000])
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = {"rows": rows_case, "tokens": tokens_case}[options.case[0]]
        print(json.dumps(case(*options.case[1:])))
        return
    console = Console(width=120)
    tables = SimpleNamespace(rows=(rows_table, options.rows), plans=(plans_table, options.plans))
    tables.tokens = (tokens_table, options.tokens)
    for name in options.tables:
        table, size = getattr(tables, name)
        table(size, console)
        console.print()


if __name__ == "__main__":
    main()
