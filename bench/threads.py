#!/usr/bin/env python
"""Time one scoring batch on one thread and on torch's own number, for models of growing size.

`SMALL_FLOPS` of hies_export/model/modes.py is judged by this table: below it, one thread must never cost much. Run it
on an idle machine, and with `--busy` beside one process that keeps a core busy.

    python bench/threads.py [--busy]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.pop(variable, None)

import torch  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification  # noqa: E402

from hies_export.calibrate.statistics import collect_statistics  # noqa: E402
from hies_export.model import modes as threads  # noqa: E402
from hies_export.units.find import find_modules  # noqa: E402

# Width, layers and (batch, sequence): from the quickstart's model to BERT-base.
SIZES = (
    (64, 4, 16, 16),
    (64, 4, 64, 16),
    (128, 4, 16, 64),
    (256, 4, 16, 64),
    (384, 6, 16, 32),
    (384, 6, 16, 128),
    (768, 12, 16, 32),
)


def model_and_batch(width: int, layers: int, rows: int, tokens: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a random BERT and a batch for it."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "intermediate_size": 4 * width,
    }
    model = BertForSequenceClassification(BertConfig(vocab_size=1000, **sizes)).eval()
    return model, {"input_ids": torch.randint(5, 1000, (rows, tokens)), "labels": torch.randint(2, (rows,))}


def milliseconds(model: Any, batch: dict[str, torch.Tensor], modules: Any) -> dict[bool, list[float]]:
    """Return the times of scoring a batch on one thread (True) and on torch's number (False), in turns."""
    times: dict[bool, list[float]] = {True: [], False: []}
    limit = threads.SMALL_FLOPS
    for repeat in range(8):
        for single in (True, False) if repeat % 2 else (False, True):
            threads.SMALL_FLOPS = 0.0  # the choice is made here
            with threads.torch_threads(1) if single else nullcontext():
                started = time.perf_counter()
                collect_statistics(model, [batch], modules)
                times[single].append(1000 * (time.perf_counter() - started))
    threads.SMALL_FLOPS = limit
    return {single: found[2:] for single, found in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps a core busy")
    busy = None
    if parser.parse_args().busy:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        print(f"{'width x layers, batch':28} {'GFLOPs':>7} {'1 thread, ms':>13} {torch.get_num_threads()} threads, ms")
        for width, layers, rows, tokens in SIZES:
            model, batch = model_and_batch(width, layers, rows, tokens)
            found = milliseconds(model, batch, find_modules(model, batch))
            one, several = (statistics.median(found[single]) for single in (True, False))
            flops = threads.mean_flops(model, [batch]) / 1e9
            name = f"{width} x {layers}, {rows} x {tokens}"
            print(f"{name:28} {flops:7.2f} {one:13.1f} {several:13.1f}", flush=True)
    finally:
        if busy is not None:
            busy.kill()


if __name__ == "__main__":
    main()
