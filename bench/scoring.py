"""Measure what scoring costs: time and peak memory against a plain forward and backward pass of the same batch.

python bench/scoring.py [--shapes 128x32 512x8 2048x2] [--layers 6] [--repeats 3]
python bench/scoring.py --model llama --layers 8 --shapes 1024x1 2048x1 4096x1 --ways plain hies

Four ways to run one batch through a BERT of base width, or a LLaMA of width 1024 (random weights, frozen):
  plain    forward and backward to the input embeddings: what any gradient criterion pays
  hies     `collect_statistics`: HIS and entropy of every head in that one pass
  eager    the textbook way: attention maps from eager attention, gradients to a mask in front of each projection
  per sample  the same, one sample at a time
Times are medians of interleaved rounds in one process, so only ratios within a row are meant to be read. Peak memory is
that of torch's allocations over what was allocated before, taken from a profile of one round. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hies_export import PrunableModule, collect_statistics, find_attention
from hies_export.forms.measure.machine import machine_facts


def bert(layers: int) -> PreTrainedModel:
    config = BertConfig(num_hidden_layers=layers, max_position_embeddings=2048, num_labels=2)
    return BertForSequenceClassification(config).eval().requires_grad_(False)


def llama(layers: int) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def plain(model: PreTrainedModel, batch: dict[str, Tensor], modules: tuple[PrunableModule, ...]) -> None:
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_(True)
    inputs = {k: v for k, v in batch.items() if k != "input_ids"}
    options = {} if model.config.model_type == "bert" else {"use_cache": False}
    torch.autograd.grad(model(inputs_embeds=embeddings, **inputs, **options).loss, embeddings)


def hies(model: PreTrainedModel, batch: dict[str, Tensor], modules: tuple[PrunableModule, ...]) -> None:
    collect_statistics(model, [batch], modules)


def eager(model: PreTrainedModel, batch: dict[str, Tensor], modules: tuple[PrunableModule, ...]) -> None:
    masks = [torch.ones(len(batch["labels"]), 1, m.units, 1, requires_grad=True) for m in modules]

    def multiply(mask: Tensor) -> Callable[..., Tensor]:
        return lambda module, inputs: (inputs[0].unflatten(-1, (mask.shape[2], -1)) * mask).flatten(-2)

    hooks = [
        model.get_submodule(module.consumer).register_forward_pre_hook(multiply(mask))
        for module, mask in zip(modules, masks, strict=True)
    ]
    model.set_attn_implementation("eager")
    try:
        outputs = model(**batch, output_attentions=True)
        torch.autograd.grad(outputs.loss * len(batch["labels"]), masks)
        with torch.no_grad():
            for p in outputs.attentions:
                (torch.special.entr(p).sum(-1) / math.log(p.shape[-1])).mean((0, 2))
    finally:
        model.set_attn_implementation("sdpa")
        for hook in hooks:
            hook.remove()


def per_sample(model: PreTrainedModel, batch: dict[str, Tensor], modules: tuple[PrunableModule, ...]) -> None:
    for i in range(len(batch["labels"])):
        eager(model, {k: v[i : i + 1] for k, v in batch.items()}, modules)


WAYS = {"plain": plain, "hies": hies, "eager": eager, "per sample": per_sample}


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Silence the profiler, which announces itself from C++."""
    saved = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def peak_megabytes(run: Callable[[], None]) -> float:
    """Return the largest sum of torch's live CPU allocations during `run`, above the sum before it, in MB."""
    gc.collect()
    with silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    live = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["128x32", "512x8", "2048x2"], metavar="SEQUENCExBATCH")
    parser.add_argument("--model", choices=("bert", "llama"), default="bert")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()

    torch.manual_seed(0)
    model = (bert if options.model == "bert" else llama)(options.layers)
    config = model.config
    rows = []
    print("sequence x batch  way          seconds  time/plain   peak MB  memory/plain")
    for shape in options.shapes:
        sequence, _, size = shape.partition("x")
        batch = {
            "input_ids": torch.randint(0, config.vocab_size, (int(size), int(sequence))),
            "attention_mask": torch.ones(int(size), int(sequence), dtype=torch.int64),
            "labels": torch.arange(int(size)) % 2,
        }
        batch["attention_mask"][-1, -int(sequence) // 4 :] = 0  # a padded row, as real batches have
        if options.model == "llama":
            batch["labels"] = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
        modules = find_attention(model, {k: v[:1, :8] for k, v in batch.items() if k != "labels"})
        seconds: dict[str, list[float]] = {way: [] for way in options.ways}
        memory = {way: peak_megabytes(functools.partial(WAYS[way], model, batch, modules)) for way in options.ways}
        for _ in range(options.repeats):
            for way in options.ways:
                started = time.perf_counter()
                WAYS[way](model, batch, modules)
                seconds[way].append(time.perf_counter() - started)
        for way in options.ways:
            median = statistics.median(seconds[way])
            row = {
                "sequence": int(sequence),
                "batch": int(size),
                "way": way,
                "seconds": median,
                "time_ratio": statistics.median(a / b for a, b in zip(seconds[way], seconds["plain"], strict=True)),
                "peak_mb": memory[way],
                "memory_ratio": memory[way] / memory["plain"],
            }
            rows.append(row)
            print(
                f"{sequence + ' x ' + size:17} {way:11} {median:8.2f} {row['time_ratio']:11.2f} {memory[way]:9.0f} "
                f"{row['memory_ratio']:13.2f}",
                flush=True,
            )
    print(
        json.dumps(
            {
                "model": options.model,
                "layers": options.layers,
                "repeats": options.repeats,
                "rows": rows,
                "environment": machine_facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
