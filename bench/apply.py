"""Measure how a checkpoint is cut on disk: seconds, MB/s and peak memory, beside a plain copy of the same files.

python bench/apply.py [--gigabytes 4] [--rounds 3] [--folder DIR]

A LLaMA in bfloat16 with random weights is written in shards of 1 GB to a temporary folder that is removed afterwards. A
random plan removes 30 % of its key/value groups, unevenly. Three ways, each in a process of its own, are interleaved:
  copy       shutil.copyfile of every file
  apply      `apply_plan`
  in memory  load, `prune_units`, `save_pretrained` (once; its files must be the same bytes)
Before every run all writes are flushed and the source is dropped from the page cache, so that reads come from the disk.
"written" ends when the last file is handed to the system, "on disk" when all of them are flushed. MB/s are megabytes of
the dense checkpoint per second. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEGABYTE = 1e6
BOUND_MB = 500


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """Write the dense checkpoint and its plan; return the size of the largest tensor in bytes."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from hies_export import Provenance, PruningPlan, Scores, find_attention, select_units
    from hies_export.model.tokens import synthetic_batch

    layer_bytes, embedding_bytes = 2 * (3072 * (2 * 3072 + 2 * 1024) + 3 * 3072 * 8192), 2 * 2 * 64000 * 3072
    config = LlamaConfig(
        vocab_size=64000,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=max(1, round((gigabytes * 1e9 - embedding_bytes) / layer_bytes)),
        num_attention_heads=24,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, state_dict={})
    state = model.state_dict()
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size="1GB"
    )
    for file, names in split.filename_to_tensors.items():
        shard = {name: torch.empty(state[name].shape, dtype=torch.bfloat16).normal_(std=0.02) for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        del shard
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    modules = find_attention(model, synthetic_batch(model, batch=2, sequence=8))
    generator = torch.Generator().manual_seed(0)
    scores = {m.name: torch.rand(m.units, generator=generator, dtype=torch.float64) for m in modules}
    selection = select_units(Scores("random", {}, scores), modules, heads=0.3)
    plan = PruningPlan.of(selection, Provenance("random"))
    (folder.parent / "plan.json").write_text(plan.to_json())
    return max(tensor.nbytes for tensor in state.values())


def one_way(way: str, source: Path, target: Path) -> None:
    """Do it one way, in a child process, and print the seconds and the process's own peak memory."""
    if way == "copy":
        start = time.perf_counter()
        target.mkdir()
        for path in source.iterdir():
            shutil.copyfile(path, target / path.name)
    else:
        from transformers.utils import logging

        from hies_export import PruningPlan, apply_plan, find_attention, load, prune_units
        from hies_export.model.tokens import synthetic_batch

        logging.disable_progress_bar()
        plan = PruningPlan.from_file(source.parent / "plan.json")
        start = time.perf_counter()
        if way == "apply":
            apply_plan(plan, source, target)
        else:
            model = load(source)
            modules = find_attention(model, synthetic_batch(model, batch=2, sequence=8))
            prune_units(model, plan, modules, inplace=True).save_pretrained(target)
    written = time.perf_counter() - start
    os.sync()
    result = {
        "written_seconds": written,
        "on_disk_seconds": time.perf_counter() - start,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE,
    }
    print(json.dumps(result))


def run(way: str, source: Path, target: Path) -> dict[str, float]:
    os.sync()
    for path in source.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--way", way, "--source", str(source), "--target", str(target)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.glob("model*.safetensors*")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to put the temporary folder")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        one_way(options.way, options.source, options.target)
    elif options.make:
        print(make_checkpoint(options.make, options.gigabytes))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="hies-bench-", dir=options.folder) as temporary:
        free = shutil.disk_usage(temporary).free
        if free < 3.5e9 * options.gigabytes:
            sys.exit(
                f"{3.5 * options.gigabytes:.0f} GB must be free in {temporary}, got {free / 1e9:.1f}; try --folder"
            )
        source, target, other = (Path(temporary) / name for name in ("dense", "slim", "other"))
        source.mkdir()
        # In a process of its own: on Linux the children inherit the peak memory of this one.
        made = subprocess.run(
            [sys.executable, __file__, "--make", str(source), "--gigabytes", str(options.gigabytes)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        largest = int(made.stdout.splitlines()[-1])
        total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        bound = 1.5 * largest / MEGABYTE + BOUND_MB
        print(
            f"{total / 1e9:.2f} GB, largest tensor {largest / MEGABYTE:.0f} MB: "
            f"peak memory must stay under {bound:.0f} MB"
        )
        print("way            written s on disk s   MB/s written   MB/s on disk   peak MB")
        rows: list[dict[str, Any]] = []
        for way in [*("copy", "apply") * options.rounds, "in memory"]:
            row = {"way": way} | run(way, source, target)
            rows.append(row)
            print(line(way, row, total))
            if way == "in memory":
                run("apply", source, other)
                same = digests(target) == digests(other)
            slim_bytes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
            shutil.rmtree(target)
        medians = {}
        for way in ("copy", "apply"):
            medians[way] = {
                key: statistics.median(row[key] for row in rows if row["way"] == way)
                for key in ("written_seconds", "on_disk_seconds", "peak_mb")
            }
            print(line(f"{way}, median", medians[way], total))
        print(f"{slim_bytes / 1e9:.2f} GB written; the same bytes as in memory: {'yes' if same else 'NO'}")
    result = {
        "dense_bytes": total,
        "slim_bytes": slim_bytes,
        "largest_tensor_bytes": largest,
        "bound_mb": bound,
        "same_bytes": same,
        "median": medians,
        "runs": rows,
    }
    print(json.dumps(result))


def line(way: str, row: dict[str, float], total: int) -> str:
    written, flushed = row["written_seconds"], row["on_disk_seconds"]
    rates = [total / MEGABYTE / seconds for seconds in (written, flushed)]
    return f"{way:14} {written:6.2f} {flushed:9.2f} {rates[0]:12.0f} {rates[1]:14.0f} {row['peak_mb']:12.0f}"


if __name__ == "__main__":
    main()
