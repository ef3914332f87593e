"""Minutes and peak memory of `prune()` on a decoder, by stage.

    python bench/size.py MODEL TEXT [--flops 0.8] [--score 32] [--refit 240] [--length 256] [--dtype DTYPE]
        [--sequential true|false] [--save FOLDER] [--units FILE]

MODEL is a checkpoint folder, loaded in float32, or `llama-1b` or `llama-8b` for random weights of these shapes in
bfloat16, with `--layers` of their blocks; `--dtype` takes another dtype. TEXT is a .txt or .txt.gz; its first blocks of
tokens are scored and refitted on, and the next 16 are held out. Memory is what the operating system says is resident,
sampled every 20 ms, and `processor` the seconds of all threads. The units that stay go to `--units`, for a comparison
with another version.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from hies_export import prune

SHAPES = {
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
HELD_OUT = 16


class Memory:
    """Prints each stage with its minutes and the peak of resident memory since the last one."""

    def __init__(self) -> None:
        self.began, self.peak, self.highest, self.stage_name = time.time(), 0.0, 0.0, "load"
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            self.peak = max(self.peak, pages * os.sysconf("SC_PAGESIZE") / 1e9)
            time.sleep(0.02)

    def stage(self, name: str) -> None:
        """Print the stage that ends, and begin another."""
        self.highest = max(self.highest, self.peak)
        seconds = time.time() - self.began
        print(
            f"{seconds:8.1f} s  {time.process_time():8.1f} s processor  {self.peak:5.2f} GB  {self.stage_name}",
            flush=True,
        )
        self.stage_name, self.peak = name, 0.0

    def track(self, items: Sequence[Any], name: str) -> Iterable[Any]:
        """Return the items as they are; a loop is part of its stage, named by it if it takes long."""
        return items


def loaded(args: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """Return the model, and its tokenizer; None for random weights."""
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.model in SHAPES else "float32"))
    if args.model not in SHAPES:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval(), tokenizer
    shape = SHAPES[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    config = LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, tie_word_embeddings=args.model == "llama-1b", **shape
    )
    torch.set_default_dtype(dtype)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    return model, None


def blocks(args: argparse.Namespace, tokenizer: Any, vocabulary: int) -> torch.Tensor:
    """Return rows of tokens, (rows, length): of the text, or random ones for random weights."""
    rows = args.score + args.refit + HELD_OUT
    if tokenizer is None:
        return torch.randint(0, vocabulary, (rows, args.length), generator=torch.Generator().manual_seed(0))
    opened = gzip.open if args.text.endswith(".gz") else open
    with opened(args.text, "rt", encoding="utf-8") as file:
        ids = tokenizer(file.read(12 * rows * args.length), return_tensors="pt")["input_ids"][0]
    return ids[: rows * args.length].view(rows, args.length)


def main() -> None:
    """Prune, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--flops", type=float, default=0.8)
    parser.add_argument("--score", type=int, default=32)
    parser.add_argument("--refit", type=int, default=240)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--sequential", choices=("true", "false"))
    parser.add_argument("--save")
    parser.add_argument("--units")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    memory = Memory()
    model, tokenizer = loaded(args)
    rows = blocks(args, tokenizer, model.config.vocab_size)
    score, refit, held_out = (
        [{"input_ids": part} for part in of.split(args.batch)] for of in rows.split([args.score, args.refit, HELD_OUT])
    )
    how = {} if args.sequential is None else {"sequential": args.sequential == "true"}
    result = prune(
        model,
        score,
        compensation_batches=refit,
        held_out=held_out,
        budget={"flops": args.flops},
        compensation={"method": "least_squares", "samples": args.refit, **how},
        shape=(1, args.length),
        progress=memory,
    )
    memory.stage("save")
    if args.save:
        result.save_pretrained(args.save)
        memory.stage("end")
    print(f"peak {memory.highest:.2f} GB, {time.time() - memory.began:.0f} s, processor {time.process_time():.0f} s")
    print(result)
    if args.units:
        kept = {name: list(units.units) for name, units in result.plan.kept.items()}
        Path(args.units).write_text(json.dumps(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
